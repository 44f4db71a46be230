"""Checkers of chapter 01: shapes and texts, drawn by one seed, against the float64 oracle; no stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlab import costs, reference
from kvlab.config import ModelConfig
from kvlab.exercises import SEED, ExerciseError, checker, integer, near, number
from kvlab.rope import rotate


def _same(value: Any, expected: Tensor, what: str, limit: float = 1e-4) -> None:
    """Refuse what is no tensor of the expected shape, holds a NaN, or differs by over ``limit`` anywhere."""
    if not isinstance(value, Tensor):
        raise ExerciseError(f"{what} gave {type(value).__name__}; it must give a tensor {list(expected.shape)}")
    if value.shape != expected.shape:
        raise ExerciseError(f"{what} gave a tensor {list(value.shape)}; it must be {list(expected.shape)}")
    if value.is_complex() or value.dtype == torch.bool:
        raise ExerciseError(f"{what} gave a tensor of {value.dtype}; it must hold real numbers")
    difference = (value.double() - expected.double()).abs()
    if difference.isnan().any():
        raise ExerciseError(f"{what} gave NaN: something read a slot that holds none of its tokens")
    if difference.numel() and difference.max() > limit:
        where = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
        raise ExerciseError(f"{what} is off by {difference.max():.3g} at {where}; at most {limit:g} is rounding")


@checker("01.1")
def tokens_computed(answer: Any) -> None:
    """(recomputed, cached) tokens of a prompt of 100 and 50 new ones. Raises: ExerciseError.  Source: chapter 01."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ExerciseError(f"answer is {answer!r}; it must be two integers: (recomputed, cached)")
    recomputed, cached = (integer(n, what) for n, what in zip(answer, ("recomputed", "cached"), strict=True))
    expected = sum(100 + made for made in range(50)), 100 + 49
    if cached == 150:
        raise ExerciseError("cached: the 50th new token is chosen by the last pass and never computed")
    if cached == 50 or cached == 49:
        raise ExerciseError("cached: the prompt is computed too, once")
    if cached != expected[1]:
        raise ExerciseError(f"cached: {cached} is not right; the prompt goes in once, then one token a pass")
    if recomputed == sum(100 + made for made in range(1, 51)):
        raise ExerciseError("recomputed: the first pass brings the prompt alone, 100 tokens, and there are 50 passes")
    if recomputed != expected[0]:
        raise ExerciseError(f"recomputed: {recomputed} is not right; the pass for new token i brings 100 + i, i from 0")


@checker("01.2")
def interleaved_rope(function: Callable[..., Any]) -> None:
    """RoPE over neighbouring pairs: x [T, H, D], positions [T], theta. Raises: ExerciseError.  Source: chapter 01."""
    rng = random.Random(SEED)
    for _ in range(8):
        tokens, heads, size = rng.randint(1, 6), rng.randint(1, 3), 2 * rng.randint(1, 8)
        theta = rng.choice([100.0, 10_000.0, 500_000.0])
        x = torch.randn(tokens, heads, size)
        positions = torch.tensor([rng.randint(0, 60) for _ in range(tokens)])
        given = x.clone()
        value = function(x, positions, theta)
        if not torch.equal(x, given):
            raise ExerciseError("rope changed its argument x; give a new tensor")
        speed = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        turned = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * speed)
        expected = torch.view_as_real(torch.view_as_complex(given.double().unflatten(-1, (-1, 2))) * turned).flatten(-2)
        shape = f"for x [{tokens}, {heads}, {size}], positions {positions.tolist()}, theta {theta:g}"
        if isinstance(value, Tensor) and value.shape == expected.shape and size > 2:
            halves = _halves(given.double(), positions, theta)
            if (value - halves).abs().max() < 1e-4 and (expected - halves).abs().max() > 1e-4:
                raise ExerciseError(f"rope {shape} pairs x[i] with x[i + D/2]; neighbours were asked for")
            if (value - _conjugate(given.double(), turned)).abs().max() < 1e-4 < (value - expected).abs().max():
                raise ExerciseError(f"rope {shape} turns the wrong way round: the second number of a pair gains + sin")
        _same(value, expected, f"rope {shape}")


def _halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    both = torch.cat([angle, angle], dim=1)
    return rotate(x, both.cos(), both.sin())


def _conjugate(x: Tensor, turned: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turned.conj()).flatten(-2)


@checker("01.3")
def window_step(function: Callable[..., Any]) -> None:
    """One cached step with a window: q [H, D], k, v [L, H_kv, D]. Raises: ExerciseError.  Source: chapter 01."""
    rng = random.Random(SEED)
    sizes = [(1, 1), (5, 5), (5, 6), (6, 5), (9, 1)]
    for length, window in sizes + [(rng.randint(1, 40), rng.randint(1, 40)) for _ in range(10)]:
        kv_heads, group, size = rng.randint(1, 3), rng.choice([1, 2, 5]), rng.choice([8, 20])
        q = torch.randn(kv_heads * group, size)
        k, v = torch.randn(2, length, kv_heads, size)
        expected, _ = reference.attend_one(q[None], k, v, window_size=(window - 1, 0))
        k[: max(0, length - window)] = float("nan")
        v[: max(0, length - window)] = float("nan")
        _same(
            function(q, k, v, window), expected[0],
            f"window_step for {length} tokens, window {window}, {kv_heads * group} query heads over {kv_heads},",
        )  # fmt: skip


@checker("01.4")
def chunk_attention(function: Callable[..., Any]) -> None:
    """Attention of new tokens after ``past`` cached ones in a row. Raises: ExerciseError.  Source: chapter 01."""
    rng = random.Random(SEED)
    slots, size = 24, 8
    angles = torch.arange(slots)[:, None].float() * 100.0 ** (-torch.arange(size // 2) / (size // 2))
    cos, sin = (torch.cat([t, t], dim=1) for t in (angles.cos(), angles.sin()))
    cases = [(0, 4), (0, 1), (4, 1), (4, 3), (23, 1), (12, 12)]
    for past, new in cases + [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(6)]:
        kv_heads, group = rng.randint(1, 2), rng.choice([1, 3])
        q = torch.randn(past + new, kv_heads * group, size)
        k, v = torch.randn(2, past + new, kv_heads, size)
        turned_q, turned_k = (
            rotate(q, cos[: past + new], sin[: past + new]),
            rotate(k, cos[: past + new], sin[: past + new]),
        )
        k_row, v_row = torch.full((2, slots, kv_heads, size), float("nan"))
        k_row[:past], v_row[:past] = turned_k[:past], v[:past]
        expected, _ = reference.attend_one(turned_q[past:], turned_k, v)
        value = function(q[past:].clone(), k[past:].clone(), v[past:].clone(), k_row, v_row, past, cos, sin)
        where = f"chunk_attention for {new} new tokens after {past}"
        for name, row, kept in (("k_row", k_row, turned_k), ("v_row", v_row, v)):
            _same(row[:past], kept[:past], f"{name} before the chunk, {where},")
            _same(row[past : past + new], kept[past:], f"{name}[past : past + new], {where},")
            if not row[past + new :].isnan().all():
                raise ExerciseError(f"{where} wrote into {name} beyond its own tokens")
        _same(value, expected, where)


def _config(rng: random.Random) -> ModelConfig:
    kv_heads = rng.choice([1, 2, 8])
    return ModelConfig(
        "a random shape",
        num_layers=rng.randint(1, 12),
        hidden_size=rng.choice([256, 640]),
        num_heads=kv_heads * rng.choice([1, 4, 5]),
        num_kv_heads=kv_heads,
        head_dim=rng.choice([40, 64]),
        intermediate_size=rng.choice([700, 1024]),
        vocab_size=rng.choice([1000, 5000]),
        max_seq_len=4096,
        tie_embeddings=rng.random() < 0.5,
    )


@checker("01.5")
def flops_saved(function: Callable[..., Any]) -> None:
    """Operations a cache saves over a generation. Raises: ExerciseError.  Source: chapter 01."""
    rng = random.Random(SEED)
    for prompt_len, new in [(1, 1), (50, 1), (1, 2), (7, 20), (rng.randint(2, 90), rng.randint(2, 40))]:
        c = _config(rng)
        ends = range(prompt_len, prompt_len + new)
        recomputed = sum(costs.forward(c, [n], [n]).flops for n in ends)
        cached = sum(costs.forward(c, [n if n == prompt_len else 1], [n]).flops for n in ends)
        what = f"flops_saved for a prompt of {prompt_len} and {new} new tokens"
        if new == 1:
            if number(function(c, prompt_len, new), what) != 0:
                raise ExerciseError(f"{what}: one new token takes the prompt's pass either way; nothing is saved")
            continue
        near(function(c, prompt_len, new), recomputed - cached, 1e-9, what)
