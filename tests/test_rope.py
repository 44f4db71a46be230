"""rope: the five kinds by their own definitions, and rotation by what makes it a position code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvlab.config import ModelConfig, RopeConfig
from kvlab.rope import Rope, frequencies, rotate

D = 16
CONFIG = ModelConfig("small", 1, 32, 2, 1, D, 48, 64, 64)
PLAIN = [10_000 ** (-2 * i / D) for i in range(D // 2)]


def table(rope: RopeConfig, positions, length=None, **changes):
    positions = torch.tensor(positions)
    lengths = positions.max() + 1 if length is None else torch.tensor(length)
    return Rope(replace(CONFIG, rope=rope, **changes)).table(positions, lengths.expand(positions.shape))


def test_default_frequencies():
    found, factor = frequencies(RopeConfig(), D, 64)
    torch.testing.assert_close(found, torch.tensor(PLAIN))
    assert factor == 1.0


def test_position_zero_turns_nothing():
    cos, sin = table(RopeConfig(), [0])
    assert (cos == 1).all()
    assert (sin == 0).all()


def test_rotation_keeps_length_and_gives_relative_positions():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, D), torch.randn(1, 1, D)

    def score(i: int, j: int) -> float:
        cos, sin = table(RopeConfig(), [i, j])
        a, b = rotate(q, cos[:1], sin[:1]), rotate(k, cos[1:], sin[1:])
        assert math.isclose(a.norm().item(), q.norm().item(), rel_tol=1e-5)
        return (a * b).sum().item()

    assert math.isclose(score(7, 3), score(27, 23), abs_tol=1e-4)
    assert not math.isclose(score(7, 3), score(8, 3), abs_tol=1e-2)


def test_rotation_by_hand():
    quarter = torch.tensor([[math.pi / 2, 0.0, math.pi / 2, 0.0]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # the pairs are (1, 3) and (2, 4)
    turned = rotate(x, quarter.cos(), quarter.sin())
    torch.testing.assert_close(turned, torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_linear_is_a_slower_clock():
    cos, sin = table(RopeConfig(), [0, 1, 2])
    slow_cos, slow_sin = table(RopeConfig(kind="linear", factor=4.0), [0, 4, 8])
    torch.testing.assert_close(slow_cos, cos)
    torch.testing.assert_close(slow_sin, sin)


def test_dynamic_changes_nothing_within_the_trained_context():
    dynamic = RopeConfig(kind="dynamic", factor=4.0)
    for pair in zip(table(dynamic, [0, 5, 63]), table(RopeConfig(), [0, 5, 63]), strict=True):
        torch.testing.assert_close(*pair)


def test_dynamic_base_beyond_it():
    cos, _ = table(RopeConfig(kind="dynamic", factor=4.0), [100], length=128)
    base = 10_000 * (4.0 * 128 / 64 - 3.0) ** (D / (D - 2))
    angles = torch.tensor([100 * base ** (-2 * i / D) for i in range(D // 2)] * 2)
    torch.testing.assert_close(cos[0], angles.cos(), atol=1e-4, rtol=0)


def test_dynamic_prefers_the_length_it_was_trained_on():
    rope = RopeConfig(kind="dynamic", factor=4.0, original_max_seq_len=64)
    here = table(rope, [100], length=128, max_seq_len=256)
    for pair in zip(here, table(RopeConfig(kind="dynamic", factor=4.0), [100], length=128), strict=True):
        assert torch.equal(*pair)


def test_dynamic_angles_of_a_sequence_do_not_depend_on_its_neighbours():
    rope = Rope(replace(CONFIG, rope=RopeConfig(kind="dynamic", factor=4.0)))
    positions, lengths = torch.tensor([3, 90, 3]), torch.tensor([10, 120, 120])
    cos, _ = rope.table(positions, lengths)
    alone, _ = rope.table(positions[:1], lengths[:1])
    assert torch.equal(cos[:1], alone)
    assert not torch.allclose(cos[0], cos[2], atol=1e-3)


def test_dynamic_angles_without_lengths_are_refused():
    rope = Rope(replace(CONFIG, rope=RopeConfig(kind="dynamic", factor=4.0)))
    assert rope.needs_lengths
    assert not Rope(CONFIG).needs_lengths
    with pytest.raises(ValueError, match="lengths is None"):
        rope.table(torch.tensor([3]))


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = RopeConfig(kind="llama3", factor=8.0, original_max_seq_len=1000, low_freq_factor=1.0, high_freq_factor=4.0)
    found, factor = frequencies(rope, D, 8000)
    assert factor == 1.0
    for plain, now in zip(PLAIN, found.tolist(), strict=True):
        turns = 1000 * plain / (2 * math.pi)  # within the original context
        if turns > 4:
            want = plain
        elif turns < 1:
            want = plain / 8
        else:
            share = (turns - 1) / 3
            want = share * plain + (1 - share) * plain / 8
        assert math.isclose(now, want, rel_tol=1e-5)
    assert any(1 < 1000 * plain / (2 * math.pi) < 4 for plain in PLAIN)  # all three branches were taken


def test_yarn_ends_and_temperature():
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_seq_len=1000)
    found, factor = frequencies(rope, D, 4000)
    assert math.isclose(found[0].item(), PLAIN[0], rel_tol=1e-6)
    assert math.isclose(found[-1].item(), PLAIN[-1] / 4, rel_tol=1e-5)
    assert ((found <= torch.tensor(PLAIN) * (1 + 1e-6)) & (found >= torch.tensor(PLAIN) / 4 * (1 - 1e-6))).all()
    assert math.isclose(factor, 0.1 * math.log(4) + 1)
    cos, sin = table(rope, [0])
    assert torch.allclose(cos, torch.full_like(cos, factor))
    assert (sin == 0).all()


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor(fields, want):
    _, factor = frequencies(RopeConfig(kind="yarn", factor=40.0, original_max_seq_len=4096, **fields), D, 163_840)
    assert math.isclose(factor, want)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_factor_one_is_the_default(kind):
    stretched = table(RopeConfig(kind=kind, factor=1.0, original_max_seq_len=64), [0, 40, 63])
    for pair in zip(stretched, table(RopeConfig(), [0, 40, 63]), strict=True):
        torch.testing.assert_close(*pair)


def test_odd_heads_are_refused():
    with pytest.raises(ValueError, match="head_dim"):
        Rope(replace(CONFIG, head_dim=15))
