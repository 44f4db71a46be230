"""Shapes of real models: everything the rest of kvlab needs to know about a decoder, and nothing else.

The numbers are those of each model's published ``config.json``. Chapter 00 counts bytes and FLOPs from them;
``model.Decoder`` builds a network from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, and how it is stretched beyond the trained context.

    Shapes and units: ``theta`` is the base (no unit); ``factor`` the ratio of the new context to the old one;
    ``original_max_seq_len`` is in tokens. ``low_freq_factor`` and ``high_freq_factor`` belong to ``llama3``;
    ``beta_fast``, ``beta_slow``, ``attention_factor``, ``mscale``, ``mscale_all_dim`` and ``truncate`` to ``yarn``.

    Raises: ValueError where ``kind`` is unknown, ``theta`` is not positive or ``factor`` is under 1.

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
        if not self.theta > 0:
            raise ValueError(f"rope theta is {self.theta}; it must be positive")
        if self.factor < 1:
            raise ValueError(f"rope factor is {self.factor}; it must be 1 or more")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: what DeepSeek-V3 caches instead of keys and values.

    Shapes and units: all in elements. A token's cache entry in one layer is one latent of ``kv_lora_rank`` and one
    rotated key of ``qk_rope_head_dim``, shared by all heads.

    Source: DeepSeek-AI 2024 (DeepSeek-V2 and V3).
    """

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: how many there are and how many one token uses.

    Shapes and units: counts of experts and layers; ``intermediate_size`` is one expert's inner width in elements.
    The first ``num_dense_layers`` layers keep an ordinary MLP.

    Source: DeepSeek-AI 2024 (DeepSeek-V3).
    """

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    num_dense_layers: int


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family.

    Shapes and units: sizes in elements, lengths in tokens. ``head_dim`` is independent of ``hidden_size``;
    ``num_heads`` must be a multiple of ``num_kv_heads``. ``sliding_window`` is a count of tokens, the query itself
    included, and holds for the layers in ``sliding_layers`` (None: all of them).

    Raises: ValueError naming the field that is not a positive integer or does not divide.

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
        sizes = "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocab_size max_seq_len"
        for name in sizes.split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be 1 or more, or None")

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
    if name not in MODELS:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(MODELS)}")
    return MODELS[name]
