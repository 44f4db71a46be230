"""Rotary position embedding: the angle at which a token's query and key are turned, in all five published variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.config import ModelConfig, RopeConfig


def frequencies(rope: RopeConfig, head_dim: int, max_seq_len: int) -> tuple[Tensor, float]:
    """Angular frequencies of the head_dim / 2 rotated pairs.

    Shapes and units: gives ([head_dim / 2] float32 in radians a token, a factor on cosine and sine). ``max_seq_len``
    is the trained context in tokens where ``rope.original_max_seq_len`` does not name it; ``dynamic`` stretches
    nothing below it.

    Source: Su et al. 2021; Peng et al. 2023 (YaRN); Grattafiori et al. 2024 (Llama 3).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    original = rope.original_max_seq_len or max_seq_len
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope, original), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim, original), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig, original: int) -> Tensor:
    """Keep short wavelengths, stretch long ones by ``factor``, and blend in between."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int, original: int) -> Tensor:
    """Leave pairs that turn often within the trained context, stretch those that turn rarely, ramp in between."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, trained: int, lengths: Tensor) -> Tensor:
    """One row of frequencies a token: the base grows with the length of the token's own sequence."""
    stretch = rope.factor * lengths.clamp(min=trained).float() / trained - (rope.factor - 1)
    base = rope.theta * stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim
    return 1.0 / base[:, None] ** exponents


class Rope:
    """Cosines and sines for the positions of a batch.

    Shapes and units: ``table(positions [T], lengths [T])`` gives cos, sin [T, head_dim] float32. ``lengths`` is the
    length in tokens of each token's own sequence and matters to ``dynamic`` alone (``needs_lengths``): a sequence's
    angles never depend on what else is in the batch.

    Raises: ValueError where head_dim is odd.

    Source: chapter 01; Su et al. 2021.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.head_dim % 2:
            raise ValueError(f"head_dim is {config.head_dim}; RoPE turns pairs, so it must be even")
        self.rope, self.head_dim = config.rope, config.head_dim
        self.trained = config.rope.original_max_seq_len or config.max_seq_len
        self.inv_freq, self.attention_factor = frequencies(config.rope, config.head_dim, config.max_seq_len)

    @property
    def needs_lengths(self) -> bool:
        """Whether angles depend on how long a sequence is. Source: Su et al. 2021; dynamic NTK scaling."""
        return self.rope.kind == "dynamic"

    def table(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, both [T, head_dim] float32, of positions [T] in sequences of lengths [T].

        Raises: ValueError where the angles need lengths and there are none.

        Source: Su et al. 2021."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        inv_freq = self.inv_freq[None, :]
        if self.needs_lengths:
            if lengths is None:
                raise ValueError(f"lengths is None; {self.rope.kind} angles depend on the length of each sequence")
            inv_freq = _dynamic_frequencies(self.rope, self.head_dim, self.trained, lengths)
        angles = positions[:, None].float() * inv_freq
        angles = torch.cat([angles, angles], dim=1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of x by its token's angles; pair i is (x[i], x[i + D / 2]), as in Llama checkpoints.

    Shapes and units: x [T, H, D]; cos, sin [T, D] in x's dtype; gives [T, H, D].

    Source: Su et al. 2021.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None, :] + torch.cat([-second, first], dim=-1) * sin[:, None, :]
