"""Shapes of real models: everything the rest of kvlab needs to know about a decoder, and nothing else.

The numbers are those of each model's published ``config.json``. Chapter 00 counts bytes and FLOPs from them;
``model.Decoder`` builds a network from them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def is_number(value: Any) -> bool:
    """Whether a value is a plain finite number that a float can hold; a boolean is none. Source: chapter 00."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _require_integers(config: Any, names: str, least: int = 1) -> None:
    for name in names.split():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            must = "a positive integer" if least == 1 else f"an integer, {least} or more"
            raise ValueError(f"{name} is {value!r}; it must be {must}")


def _require_flags(config: Any, names: str) -> None:
    for name in names.split():
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be True or False")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, and how it is stretched beyond the trained context.

    Shapes and units: ``theta`` is the base (no unit); ``factor`` the ratio of the new context to the old one;
    ``original_max_seq_len`` is in tokens. ``low_freq_factor`` and ``high_freq_factor`` belong to ``llama3``;
    ``beta_fast``, ``beta_slow``, ``attention_factor``, ``mscale``, ``mscale_all_dim`` and ``truncate`` to ``yarn``.

    Raises: ValueError where ``kind`` is unknown, a number is not finite and positive (``mscale`` and
    ``mscale_all_dim`` may be 0: off), ``factor`` is under 1, the two ends of a ``llama3`` ramp are not in order, or the
    ``theta`` of ``yarn``, whose logarithm it takes, is not over 1.

    Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Grattafiori et al. 2024 (Llama 3).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_seq_len: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind is {self.kind!r}; it must be one of {', '.join(ROPE_KINDS)}")
        for name in "theta factor low_freq_factor high_freq_factor beta_fast beta_slow".split():  # noqa: SIM905
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise ValueError(f"rope {name} is {value!r}; it must be a positive number")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or value < 0 or (name == "attention_factor" and not value)):
                raise ValueError(f"rope {name} is {value!r}; it must be a positive number, or None")
        if self.original_max_seq_len is not None:
            _require_integers(self, "original_max_seq_len")
        _require_flags(self, "truncate")
        if self.factor < 1:
            raise ValueError(f"rope factor is {self.factor}; it must be 1 or more")
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"rope theta is {self.theta}; for yarn it must be over 1")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor is {self.low_freq_factor}; it must be under high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: what DeepSeek-V3 caches instead of keys and values.

    Shapes and units: all in elements. A token's cache entry in one layer is one latent of ``kv_lora_rank`` and one
    rotated key of ``qk_rope_head_dim``, shared by all heads.

    Raises: ValueError naming the field that is not a positive integer.

    Source: DeepSeek-AI 2024 (DeepSeek-V2 and V3).
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _require_integers(self, "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: how many there are and how many one token uses.

    Shapes and units: counts of experts and layers; ``intermediate_size`` is one expert's inner width in elements.
    The first ``num_dense_layers`` layers keep an ordinary MLP.

    Raises: ValueError naming the field that is not a positive integer (``num_shared_experts`` and
    ``num_dense_layers`` may be 0), or where a token would use more experts than there are.

    Source: DeepSeek-AI 2024 (DeepSeek-V3).
    """

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    num_dense_layers: int

    def __post_init__(self) -> None:
        _require_integers(self, "num_experts num_experts_per_token intermediate_size")
        _require_integers(self, "num_shared_experts num_dense_layers", 0)
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token is {self.num_experts_per_token}; it must be at most num_experts "
                f"({self.num_experts})"
            )


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family.

    Shapes and units: sizes in elements, lengths in tokens. ``head_dim`` is independent of ``hidden_size``;
    ``num_heads`` must be a multiple of ``num_kv_heads``. ``sliding_window`` is a count of tokens, the query itself
    included, and holds for the layers in ``sliding_layers`` (None: all of them).

    Raises: ValueError naming the field that is of a wrong type, not positive, does not divide, or names a layer that
    the model does not have.

    Source: chapter 00; the ``config.json`` of each published model.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        _require_integers(self, "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size")
        _require_integers(self, "vocab_size max_seq_len")
        _require_flags(self, "tie_embeddings attention_bias attention_out_bias mlp_bias qk_norm")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if not is_number(self.norm_eps) or self.norm_eps <= 0:
            raise ValueError(f"norm_eps is {self.norm_eps!r}; it must be a positive number")
        for name, kind, optional in (("rope", RopeConfig, False), ("mla", MLAConfig, True), ("moe", MoEConfig, True)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (optional and value is None):
                raise ValueError(f"{name} is {value!r}; it must be a {kind.__name__}" + ", or None" * optional)
        if self.rope.kind == "dynamic" and self.head_dim <= 2:
            raise ValueError(f"head_dim is {self.head_dim}; for a dynamic rope it must be over 2")
        if self.moe is not None and self.moe.num_dense_layers > self.num_layers:
            raise ValueError(
                f"moe has num_dense_layers {self.moe.num_dense_layers}; it must be at most num_layers "
                f"({self.num_layers})"
            )
        if self.sliding_window is not None:
            _require_integers(self, "sliding_window")
        layers = self.sliding_layers
        if layers is not None and not (
            isinstance(layers, tuple) and all(type(i) is int and 0 <= i < self.num_layers for i in layers)
        ):
            raise ValueError(
                f"sliding_layers is {layers!r}; it must be a tuple of layers from 0 to {self.num_layers - 1}, or None"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head: G = H / H_kv (a count).

        Source: Ainslie et al. 2023 (GQA)."""
        return self.num_heads // self.num_kv_heads

    def window_size(self, layer: int) -> tuple[int, int]:
        """The attention window of one layer as (left, right) in tokens, -1 meaning unlimited.

        A window of W tokens counts the query itself, so its left part is W - 1.

        Source: Jiang et al. 2023 (Mistral 7B); FlashAttention's ``window_size``.
        """
        if self.sliding_window is None or (self.sliding_layers is not None and layer not in self.sliding_layers):
            return (-1, -1)
        return (self.sliding_window - 1, 0)


_LLAMA3_ROPE = RopeConfig(theta=500_000.0)
_LLAMA32_ROPE = RopeConfig(theta=500_000.0, kind="llama3", factor=32.0, original_max_seq_len=8192)


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> ModelConfig:
    rope = RopeConfig(theta=1_000_000.0)
    return ModelConfig(
        name, layers, hidden, heads, 8, 128, intermediate, 151_936, 40_960, rope, 1e-6, tied, qk_norm=True
    )


def _models() -> dict[str, ModelConfig]:
    yarn = RopeConfig(10_000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    configs = [
        ModelConfig("llama-2-7b", 32, 4096, 32, 32, 128, 11_008, 32_000, 4096),
        ModelConfig("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 8192, _LLAMA3_ROPE),
        ModelConfig("llama-3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256, 8192, _LLAMA3_ROPE),
        ModelConfig("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, _LLAMA32_ROPE, tie_embeddings=True),
        ModelConfig("mistral-7b", 32, 4096, 32, 8, 128, 14_336, 32_000, 32_768, sliding_window=4096),
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12_288, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 64, 25_600, tied=False),
        ModelConfig(
            "deepseek-v3", 61, 7168, 128, 128, 128, 18_432, 129_280, 163_840, yarn, 1e-6,
            mla=MLAConfig(512, 1536, 128, 64, 128), moe=MoEConfig(256, 8, 1, 2048, 3),
        ),
        ModelConfig("stdlib-7m", 8, 256, 4, 2, 64, 688, 4096, 4096, tie_embeddings=True),
        ModelConfig("stdlib-1m", 2, 128, 2, 1, 64, 344, 4096, 4096, tie_embeddings=True),
    ]  # fmt: skip
    return {config.name: config for config in configs}


MODELS: dict[str, ModelConfig] = _models()


def get(name: str) -> ModelConfig:
    """The configuration published under ``name`` (a key of ``MODELS``, such as ``"llama-3-8b"``).

    Shapes and units: see ``ModelConfig``.

    Raises: ValueError listing the known names.

    Source: chapter 00.
    """
    if not isinstance(name, str) or name not in MODELS:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(MODELS)}")
    return MODELS[name]
