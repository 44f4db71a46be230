"""Checkers of chapter 00: they test properties on shapes drawn by one seed, never stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvlab import config, costs
from kvlab.config import MLAConfig, ModelConfig
from kvlab.costs import Hardware
from kvlab.exercises import SEED, ExerciseError, checker, integer, near


def _random_config(rng: random.Random, latent: bool) -> ModelConfig:
    kv_heads, group = rng.choice([1, 2, 3, 8]), rng.choice([2, 4, 5, 7])
    return ModelConfig(
        "a random shape",
        num_layers=rng.randint(2, 40),
        hidden_size=rng.choice([384, 1024, 2560]),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=rng.choice([40, 64, 80, 128]),
        intermediate_size=rng.choice([1000, 4096]),
        vocab_size=rng.choice([5000, 50_000]),
        max_seq_len=4096,
        tie_embeddings=rng.random() < 0.5,
        mla=MLAConfig(rng.choice([256, 512]), 768, 96, rng.choice([32, 64]), 96) if latent else None,
    )


def _shape(c: ModelConfig) -> str:
    return f"{c.num_layers} layers, {c.num_heads} query and {c.num_kv_heads} KV heads of {c.head_dim}"


@checker("00.1")
def kv_of_qwen3(answer: Any) -> None:
    """GB of cache (1 GB = 1e9 bytes) of 12 sequences of 20 000 tokens of Qwen3-8B.

    Raises: ExerciseError.  Source: chapter 00.
    """
    expected = costs.kv_bytes(config.get("qwen3-8b"), 20_000, batch=12) / 1e9
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        slips = {
            0.5: "it is half: a token leaves a key and a value",
            2.0: "it is double: bf16 has 2 bytes, not 4",
            4.0: "it is four times too much: use the 8 KV heads, not the 32 query heads",
            1 / 36: "that is one layer; there are 36",
            1e9: "give GB, not bytes",
            1e9 / 2**30: "that is GiB; this book counts 1 GB = 1e9 bytes",
        }
        for factor, hint in slips.items():
            if abs(answer / expected / factor - 1) < 0.01:
                raise ExerciseError(f"{answer:g} is not right: {hint}")
    near(answer, expected, 0.01)


@checker("00.2")
def kv_bytes_per_token(function: Callable[..., Any]) -> None:
    """Bytes a token leaves in all layers, for random shapes. Raises: ExerciseError.  Source: chapter 00."""
    rng = random.Random(SEED)
    for trial in range(40):
        c, size = _random_config(rng, latent=trial % 4 == 3), rng.choice([4, 2, 1, 0.5])
        expected = c.num_layers * costs.kv_elements_per_token(c) * size
        value = function(c, size)
        kind = f"a latent of {c.mla.kv_lora_rank} and a rotated key of {c.mla.qk_rope_head_dim}" if c.mla else _shape(c)
        near(value, expected, 1e-9, f"kv_bytes_per_token for {kind}, {c.num_layers} layers, {size} bytes an element")


@checker("00.3")
def compute_bound_batch(function: Callable[..., Any]) -> None:
    """Smallest batch (sequences) whose decode step reaches the ridge. Raises: ExerciseError.  Source: chapter 00."""
    rng = random.Random(SEED)
    hardware = [Hardware("a random card", 1e11, rng.uniform(1e12, 5e12), rng.uniform(1e14, 1e15)) for _ in range(3)]
    hardware.append(Hardware("a card with all bandwidth", 1e11, 1e15, 1e14))
    hardware.append(Hardware("a card with no bandwidth", 1e11, 1e9, 1e15))
    for card in hardware:
        for c in (config.get("llama-3-8b"), _random_config(rng, latent=False)):
            reached = [b for b in (1, 65536) if costs.decode(c, 1, b).intensity >= card.ridge]
            value = function(c, card)
            where = f"for {_shape(c)} on {card.name} with its ridge at {card.ridge:.1f} operations a byte"
            if not reached:
                if value is not None:
                    raise ExerciseError(
                        f"compute_bound_batch gave {value!r} {where}; no batch to 65536 reaches it: None"
                    )
                continue
            value = integer(value, f"compute_bound_batch {where}")
            if not 1 <= value <= 65536:
                raise ExerciseError(f"compute_bound_batch gave {value!r} {where}; it must be an integer, 1 to 65536")
            if costs.decode(c, 1, value).intensity < card.ridge:
                raise ExerciseError(f"batch {value} is too small {where}: its intensity is below")
            if value > 1 and costs.decode(c, 1, value - 1).intensity >= card.ridge:
                raise ExerciseError(f"batch {value} is not the smallest {where}: {value - 1} reaches it too")


@checker("00.4")
def longest_context(function: Callable[..., Any]) -> None:
    """Most tokens a sequence may have beside the weights. Raises: ExerciseError.  Source: chapter 00."""
    rng = random.Random(SEED)
    for trial in range(30):
        c = _random_config(rng, latent=trial % 5 == 4) if trial % 2 else config.get(rng.choice(list(config.MODELS)))
        memory, batch, part = rng.choice([2e9, 24e9, 80e9, 141e9]), rng.choice([1, 3, 16]), rng.choice([0.5, 0.9, 1.0])
        value = function(c, memory, batch, part)
        where = f"for {c.name} ({_shape(c)}), {memory / 1e9:.0f} GB, batch {batch}, utilization {part}"
        value = integer(value, f"longest_context {where}")
        if value < 0:
            raise ExerciseError(f"longest_context gave {value!r} {where}; it must be an integer, 0 or more")
        room = memory * part - costs.weight_bytes(c)
        expected = max(0, int(room // (batch * costs.kv_bytes_per_token(c))))
        if value != expected:
            raise ExerciseError(
                f"longest_context gave {value} {where}; with {max(room, 0) / 1e9:.3f} GB left beside the weights it is "
                + ("too many tokens" if value > expected else "fewer than fit")
            )


@checker("00.5")
def step_bytes(function: Callable[..., Any]) -> None:
    """Bytes of weights and cache that a bf16 decode step reads. Raises: ExerciseError.  Source: chapter 00."""
    rng = random.Random(SEED)
    for trial in range(40):
        c = _random_config(rng, latent=False)
        c = replace(c, num_kv_heads=c.num_heads) if trial % 3 == 0 else c
        context, batch = rng.choice([1, 100, 40_000]), rng.choice([1, 2, 64])
        work = costs.decode(c, context, batch)
        near(
            function(c, context, batch), work.bytes_weights + work.bytes_kv_read, 1e-9,
            f"step_bytes for {_shape(c)}, context {context}, batch {batch}",
        )  # fmt: skip
