"""batch: how sequences are laid end to end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvlab.batch import Batch, as_int, as_ints


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
        ((["a"], [[1]], [0]), {}, r"seq_ids\[0\] is 'a'"),
        (([0, 1.5], [[1], [1]], [0, 0]), {}, r"seq_ids\[1\] is 1.5"),
        (([True], [[1]], [0]), {}, r"seq_ids\[0\] is True"),
        (([0], [[1]], [math.nan]), {}, r"past_lens\[0\] is nan"),
        (([0], [[1]], [2.0]), {}, r"past_lens\[0\] is 2.0"),
        (([0], [[1]], [True]), {}, r"past_lens\[0\] is True"),
        (([0], [[1]], [2**40]), {}, r"past_lens\[0\] is 1099511627776"),
        (([0], [[1, 2]], [2**31 - 2]), {}, r"past_lens\[0\] is 2147483646"),
        (([0], [[1, True]], [0]), {}, r"new_tokens\[0\]\[1\] is True"),
        (([0], [np.array([1.0])], [0]), {}, r"new_tokens\[0\]\[0\] is"),
        (([0], ["ab"], [0]), {}, r"new_tokens\[0\]\[0\] is 'a'"),
        (([0], [5], [0]), {}, r"new_tokens\[0\] is 5"),
        (([0], [[2**63]], [0]), {}, r"new_tokens\[0\] holds 9223372036854775808"),
        (([0], [[1, 2]], [0]), {"tree_mask": [[1, 3.0]]}, r"tree_mask\[0\]\[1\] is 3.0"),
    ],
)
def test_refuses(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        Batch.build(*arguments, **options)


def test_a_spare_row_sees_no_keys_and_ids_must_be_integers():
    batch = Batch.build([7, None], [[1, 2], [0]], [3, 0])
    assert batch.seq_lens.tolist() == [5, 0]
    for wrong in ([1.7], [True]):
        with pytest.raises(ValueError, match="must be an integer"):
            Batch.build([7], [wrong], [0])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_any_kind_become_python_ints(kind):
    tokens = kind([5, 6]) if kind is torch.tensor else np.array([5, 6], dtype=kind)
    batch = Batch.build([kind(3)], [tokens], [kind(2)], tree_mask=[[kind(1), kind(3)]])
    assert (batch.seq_ids, batch.past_lens, batch.token_ids.tolist()) == ([3], [2], [5, 6])
    assert {type(x) for x in batch.seq_ids + batch.past_lens} == {int}
    assert batch.positions.tolist() == [2, 3]


def test_as_int_and_as_ints():
    assert [type(as_int(x, "x")) for x in (3, np.int8(3), torch.tensor(3))] == [int] * 3
    for wrong in (3.0, True, np.True_, torch.tensor(True), torch.tensor(3.0), None, "3", [3]):
        with pytest.raises(ValueError, match=r"^x is "):
            as_int(wrong, "x")
    assert as_ints(range(3), "x") == [0, 1, 2]
