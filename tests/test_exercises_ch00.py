"""Chapter 00's checkers: the solution and a different right answer pass, wrong ones are refused with a reason."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab import costs, exercises
from kvlab.exercises import ExerciseError

QWEN_GB = 36 * 2 * 8 * 128 * 2 * 20_000 * 12 / 1e9


def by_hand(c, size):
    per_layer = 2 * c.num_kv_heads * c.head_dim
    if c.mla is not None:
        per_layer = c.mla.kv_lora_rank + c.mla.qk_rope_head_dim
    return c.num_layers * per_layer * size


def search_up(c, hardware):
    """A linear search in doubling strides: slower than the solution, and as right."""
    batch = stride = 1
    while stride:
        while batch + stride - 1 <= 65536 and costs.decode(c, 1, batch + stride - 1).intensity < hardware.ridge:
            batch += stride
            stride *= 2
        stride //= 2
    return batch if batch <= 65536 else None


def context_by_capacity(c, memory, batch, utilization=0.9):
    return costs.capacity(c, memory, 1, utilization=utilization).max_tokens // batch


def step_bytes(c, context, batch):
    per_token = 4 * c.num_kv_heads * c.head_dim * c.num_layers
    return costs.decode(c, 1, 1).bytes_weights + per_token * context * batch


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("00.1", QWEN_GB),
        ("00.1", round(QWEN_GB, 2)),
        ("00.2", by_hand),
        ("00.2", lambda c, size: costs.kv_elements_per_token(c) * c.num_layers * size),
        ("00.3", search_up),
        ("00.4", context_by_capacity),
        ("00.3", lambda c, hardware: (found := search_up(c, hardware)) and np.int64(found)),
        ("00.4", lambda *args: np.int64(context_by_capacity(*args))),
        ("00.5", step_bytes),
    ],
)
def test_right_answers_pass(id, answer, capsys):
    exercises.check(id, answer)
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("id", "answer", "reason"),
    [
        ("00.1", QWEN_GB / 2, "half"),
        ("00.1", QWEN_GB * 4, "KV heads"),
        ("00.1", QWEN_GB * 1e9 / 2**30, "GiB"),
        ("00.1", float("nan"), "nan"),
        ("00.1", "4.8 GB", "number"),
        ("00.2", lambda c, size: c.num_layers * 2 * c.num_heads * c.head_dim * size, "large"),
        ("00.2", lambda c, size: c.num_layers * 2 * c.num_kv_heads * c.head_dim * size, "latent"),
        ("00.2", lambda c, size: by_hand(c, 2), "element"),
        ("00.3", lambda c, hardware: int(hardware.ridge), "batch|no batch|integer"),
        ("00.3", lambda c, hardware: None, "None"),
        ("00.3", lambda c, hardware: 65536, "not the smallest|None"),
        ("00.3", lambda c, hardware: (found := search_up(c, hardware)) and float(found), "integer"),
        ("00.4", lambda *args: float(context_by_capacity(*args)), "integer"),
        ("00.4", lambda c, memory, batch, u=0.9: context_by_capacity(c, memory, 1, u), "too many"),
        ("00.4", lambda c, memory, batch, u=0.9: context_by_capacity(c, memory, batch, 0.9), "too many|fewer"),
        ("00.4", lambda c, memory, batch, u=0.9: int((memory * u - costs.weight_bytes(c)) // costs.kv_bytes_per_token(c)
                                                    // batch), "0 or more"),
        ("00.5", lambda c, n, b: step_bytes(c, n, b) + (b - 1) * costs.decode(c, 1, 1).bytes_weights, "large"),
        ("00.5", lambda c, n, b: c.num_key_value_heads * n * b, "AttributeError"),
        ("00.5", lambda c, n, b: step_bytes(c, n, 1), "small"),
    ],
)  # fmt: skip
def test_wrong_answers_are_refused_with_a_reason(id, answer, reason):
    with pytest.raises(ExerciseError, match=reason):
        exercises.check(id, answer)


@pytest.mark.parametrize("id", [f"00.{i}" for i in range(1, 6)])
def test_a_stub_is_not_yet_solved(id, capsys):
    exercises.check(id, ...)
    assert "not yet" in capsys.readouterr().out
