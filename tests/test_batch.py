"""batch: how sequences are laid end to end."""

from __future__ import annotations

import pytest
import torch

from kvlab.batch import Batch


def test_layout():
    batch = Batch.build([7, 3, 5], [[10, 11], [12], [13, 14, 15]], [0, 4, 2])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 4, 2, 3, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3, 6]
    assert batch.seq_lens.tolist() == [2, 5, 5]
    assert batch.logits_indices.tolist() == [1, 2, 5]
    assert (batch.q_lens, batch.past_lens, batch.seq_ids) == ([2, 1, 3], [0, 4, 2], [7, 3, 5])
    assert batch.num_tokens == 6
    assert batch.tree_mask is None


def test_dtypes():
    batch = Batch.build([0], [[1]], [0], tree_mask=[[1]])
    assert batch.token_ids.dtype == batch.positions.dtype == batch.logits_indices.dtype == torch.int64
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == torch.int32
    assert batch.tree_mask.dtype == torch.int64


def test_short_rows_start_at_position_zero():
    """Nothing is padded on the left: the first real token of every sequence stands at 0."""
    batch = Batch.build([0, 1], [[3, 4, 5], [1, 2, 3, 4, 5]], [0, 0])
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_sequences_without_new_tokens_ask_for_no_logits():
    batch = Batch.build([0, 1, 2], [[], [9, 8], []], [3, 0, 0])
    assert batch.cu_seqlens_q.tolist() == [0, 0, 2, 2]
    assert batch.seq_lens.tolist() == [3, 2, 0]
    assert batch.logits_indices.tolist() == [1]


def test_all_logits():
    assert Batch.build([0, 1], [[1, 2], [3]], [0, 0], all_logits=True).logits_indices.tolist() == [0, 1, 2]


def test_empty_batch():
    batch = Batch.build([], [], [])
    assert batch.num_tokens == 0
    assert batch.cu_seqlens_q.tolist() == [0]


def test_tree_positions_are_depths():
    #      0
    #     / \
    #    1   2
    #    |
    #    3
    masks = [0b0001, 0b0011, 0b0101, 0b1011]
    batch = Batch.build([0], [[5, 6, 7, 8]], [10], tree_mask=[masks])
    assert batch.positions.tolist() == [10, 11, 11, 12]
    assert batch.tree_mask.tolist() == masks


def test_spare_rows_may_repeat():
    assert Batch.build([None, 4, None], [[0], [1], [0]], [0, 0, 0]).seq_ids == [None, 4, None]


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (([0, 1], [[1]], [0, 0]), {}, "seq_ids, new_tokens and past_lens have 2, 1 and 2"),
        (([0], [[1]], [0, 0]), {}, "past_lens"),
        (([4, 4], [[1], [2]], [0, 0]), {}, r"\[4\] more than once"),
        (([0], [[1, -2]], [0]), {}, r"new_tokens\[0\] holds -2"),
        (([0, 1], [[1], [2]], [0, -1]), {}, r"past_lens\[1\] is -1"),
        (([0], [[1, 2]], [0]), {"tree_mask": [[1]]}, "tree_mask"),
        (([0], [[1, 2]], [0]), {"tree_mask": [[1, 1]]}, r"tree_mask\[0\]\[1\]"),  # does not see itself
        (([0], [[1, 2]], [0]), {"tree_mask": [[3, 3]]}, r"tree_mask\[0\]\[0\]"),  # sees a later token
        (([0], [[0] * 64], [0]), {"tree_mask": [[1 << i for i in range(64)]]}, "63 at most"),
    ],
)
def test_refuses(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        Batch.build(*arguments, **options)


def test_a_spare_row_sees_no_keys_and_ids_must_be_integers():
    batch = Batch.build([7, None], [[1, 2], [0]], [3, 0])
    assert batch.seq_lens.tolist() == [5, 0]
    for wrong in ([1.7], [True]):
        with pytest.raises(ValueError, match="must be integers"):
            Batch.build([7], [wrong], [0])
