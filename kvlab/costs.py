"""Bytes, FLOPs and the time they give: the arithmetic that every chapter predicts with before it measures.

Everything here is counted from ``config`` alone. 1 GB is 1e9 bytes, 1 TFLOP/s 1e12 operations a second, and a
multiply-add is two operations.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.config import ModelConfig, is_number

BYTES_PER_ELEMENT: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "int2": 0.25}


def kv_elements_per_token(config: ModelConfig) -> int:
    """Elements that one token leaves in the cache of one layer.

    Shapes and units: 2 * H_kv * D, a key and a value for every KV head; for multi-head latent attention
    kv_lora_rank + qk_rope_head_dim. A count of elements.

    Source: chapter 00; DeepSeek-AI 2024 for the latent form.
    """
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 2 * config.num_kv_heads * config.head_dim


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bf16") -> float:
    """Bytes that one token leaves in the cache, all layers together.

    Raises: ValueError for a dtype not in ``BYTES_PER_ELEMENT``.  Source: chapter 00.
    """
    return config.num_layers * kv_elements_per_token(config) * _element_bytes(dtype)


def kv_bytes(config: ModelConfig, seq_len: int, batch: int = 1, dtype: str = "bf16") -> float:
    """Bytes of the cache of ``batch`` sequences of ``seq_len`` tokens.

    Sliding windows are not subtracted: a cache that forgets is chapter 11.

    Raises: ValueError where the length or batch is no integer or negative, or the dtype unknown.  Source: chapter 00.
    """
    return _count("seq_len", seq_len) * _count("batch", batch) * kv_bytes_per_token(config, dtype)


def _count(name: str, value: Any, least: int = 0) -> int:
    """A count as Python's own int, which does not wrap as NumPy's do."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer, {least} or more")
    return found


def _element_bytes(dtype: str) -> float:
    if not isinstance(dtype, str) or dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(BYTES_PER_ELEMENT)}")
    return BYTES_PER_ELEMENT[dtype]


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model has, by part (counts of elements; ``attention`` and ``mlp`` over all layers).

    ``mlp_active`` is what one token uses; it differs from ``mlp`` for a mixture of experts.

    Source: chapter 00.
    """

    embedding: int
    lm_head: int
    attention: int
    mlp: int
    mlp_active: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters; tied embeddings are counted once. Source: chapter 00."""
        return self.embedding + self.lm_head + self.attention + self.mlp + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token multiplies with: no embedding table, and its own experts only.

        The output head counts even where it is tied. Source: chapter 00."""
        return (self.lm_head or self.embedding) + self.attention + self.mlp_active + self.norms


def num_parameters(config: ModelConfig) -> Parameters:
    """Count a model's parameters by part (elements).

    Source: chapter 00; checked against ``model.Decoder`` and the published sizes.
    """
    d, h, h_kv, head = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    if config.mla is not None:
        attention, norms_per_layer = _mla_parameters(config)
    else:
        attention = 2 * d * h * head + 2 * d * h_kv * head
        attention += config.attention_bias * (h + 2 * h_kv) * head + config.attention_out_bias * d
        norms_per_layer = 2 * d + config.qk_norm * 2 * head
    dense_mlp = 3 * d * config.intermediate_size + config.mlp_bias * (2 * config.intermediate_size + d)
    mlp = mlp_active = config.num_layers * dense_mlp
    if config.moe is not None:
        moe = config.moe
        expert = 3 * d * moe.intermediate_size
        sparse_layers = config.num_layers - moe.num_dense_layers
        router = d * moe.num_experts + moe.num_experts
        mlp = moe.num_dense_layers * dense_mlp
        mlp_active = mlp + sparse_layers * ((moe.num_experts_per_token + moe.num_shared_experts) * expert + router)
        mlp += sparse_layers * ((moe.num_experts + moe.num_shared_experts) * expert + router)
    table = config.vocab_size * d
    return Parameters(
        embedding=table,
        lm_head=0 if config.tie_embeddings else table,
        attention=config.num_layers * attention,
        mlp=mlp,
        mlp_active=mlp_active,
        norms=config.num_layers * norms_per_layer + d,
    )


def _mla_parameters(config: ModelConfig) -> tuple[int, int]:
    """Per layer: the low-rank projections of DeepSeek's attention, and its norms."""
    mla, d, h = config.mla, config.hidden_size, config.num_heads
    assert mla is not None
    query = d * mla.q_lora_rank + mla.q_lora_rank * h * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latent = d * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expand = mla.kv_lora_rank * h * (mla.qk_nope_head_dim + mla.v_head_dim)
    out = h * mla.v_head_dim * d
    return query + latent + expand + out, 2 * d + mla.q_lora_rank + mla.kv_lora_rank


def weight_bytes(config: ModelConfig, dtype: str = "bf16") -> float:
    """Bytes of all weights. Raises: ValueError for an unknown dtype.  Source: chapter 00."""
    return num_parameters(config).total * _element_bytes(dtype)


@dataclass(frozen=True)
class Work:
    """What one forward pass must do, at the least.

    Shapes and units: ``flops_linear`` (products with weights) and ``flops_attention`` in operations; the rest in
    bytes through device memory: weights read once, cached keys and values read once a sequence, new ones written,
    and the activations that cross device memory between operators when each operator reads and writes once.

    Source: chapter 00; Williams et al. 2009 (roofline), Pope et al. 2022.
    """

    flops_linear: float
    flops_attention: float
    bytes_weights: float
    bytes_kv_read: float
    bytes_kv_write: float
    bytes_activations: float

    @property
    def flops(self) -> float:
        """Operations in all. Source: chapter 00."""
        return self.flops_linear + self.flops_attention

    @property
    def bytes(self) -> float:
        """Bytes in all. Source: chapter 00."""
        return self.bytes_weights + self.bytes_kv_read + self.bytes_kv_write + self.bytes_activations

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where there is no work. Source: Williams et al. 2009."""
        return self.flops / self.bytes if self.flops else 0.0


def visible_pairs(q_len: int, kv_len: int) -> int:
    """How many (query, key) pairs a causal pass computes, the q_len queries being the last of kv_len tokens.

    Raises: ValueError where one is no integer or negative, or q_len is over kv_len.  Source: chapter 00.
    """
    q_len, kv_len = _count("q_len", q_len), _count("kv_len", kv_len)
    if q_len > kv_len:
        raise ValueError(f"q_len is {q_len} and kv_len {kv_len}; q_len must lie between 0 and kv_len")
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2


def forward(config: ModelConfig, q_lens: Sequence[int], kv_lens: Sequence[int], dtype: str = "bf16") -> Work:
    """The least work of one forward pass over B sequences, logits for the last token of each.

    Shapes and units: ``q_lens[b]`` new tokens, ``kv_lens[b]`` tokens of the sequence once the pass is done.

    A sequence without new tokens is idle and costs nothing; a pass in which all are idle does not run.

    Sliding windows are not subtracted. Attention counts 4 * H * D operations a visible pair (a product for the score
    and one for the value); for latent attention the absorbed form that decodes use, 2 * H * (2 * kv_lora_rank +
    qk_rope_head_dim). The weights of a mixture of experts are counted as if each token chose other experts, up to all
    of them.

    Raises: ValueError where the lists disagree in length, as ``visible_pairs``, or for an unknown dtype.

    Source: chapter 00.
    """
    if len(q_lens) != len(kv_lens):
        raise ValueError(f"q_lens has {len(q_lens)} entries and kv_lens {len(kv_lens)}; each needs one a sequence")
    lens = [(_count("q_len", q), _count("kv_len", kv)) for q, kv in zip(q_lens, kv_lens, strict=True)]
    pairs = sum(visible_pairs(q, kv) for q, kv in lens)
    running = [(q, kv) for q, kv in lens if q]
    size, tokens, params = _element_bytes(dtype), sum(q for q, _ in running), num_parameters(config)
    head = config.vocab_size * config.hidden_size
    if config.mla is not None:
        per_pair = 2 * config.num_heads * (2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim)
    else:
        per_pair = 4 * config.num_heads * config.head_dim
    mlp_read = params.mlp
    if config.moe is not None:
        dense = config.moe.num_dense_layers * 3 * config.hidden_size * config.intermediate_size
        mlp_read = min(params.mlp, dense + tokens * (params.mlp_active - dense))
    read = (params.attention + mlp_read + params.norms + head) * size if running else 0.0
    return Work(
        flops_linear=2.0 * tokens * (params.attention + params.mlp_active) + 2.0 * len(running) * head,
        flops_attention=float(config.num_layers * per_pair * pairs),
        bytes_weights=read,
        bytes_kv_read=sum(kv for _, kv in running) * kv_bytes_per_token(config, dtype),
        bytes_kv_write=tokens * kv_bytes_per_token(config, dtype),
        bytes_activations=tokens * activation_elements_per_token(config) * size,
    )


def activation_elements_per_token(config: ModelConfig) -> int:
    """Elements of activations that cross device memory for one token, all layers.

    Counted with one kernel an operator, each input read once and each output written once: norm (2d), q/k/v
    projections (d in, (H + 2 H_kv) D out), attention (H D in and out), output projection (H D in, d out), residual
    (3d), norm (2d), gate and up (2d in, 2f out), SwiGLU (2f in, f out), down (f in, d out), residual (3d).

    Source: chapter 00.
    """
    d, f = config.hidden_size, config.intermediate_size
    if config.moe is not None:
        f = config.moe.intermediate_size * (config.moe.num_experts_per_token + config.moe.num_shared_experts)
    q = config.num_heads * (config.mla.v_head_dim if config.mla else config.head_dim)
    qkv = q + kv_elements_per_token(config)
    attention = 2 * d + d + qkv + 2 * q + q + d + 3 * d
    mlp = 2 * d + 2 * d + 2 * f + 3 * f + f + d + 3 * d
    return config.num_layers * (attention + mlp)


def prefill(config: ModelConfig, prompt_len: int, batch: int = 1, dtype: str = "bf16") -> Work:
    """The work of computing ``batch`` prompts of ``prompt_len`` tokens.

    Raises: ValueError as ``forward``, and for a batch that is no integer or negative.  Source: chapter 00."""
    batch = _count("batch", batch)
    return forward(config, [prompt_len] * batch, [prompt_len] * batch, dtype)


def decode(config: ModelConfig, context: int, batch: int = 1, dtype: str = "bf16") -> Work:
    """The work of one more token for ``batch`` sequences that then have ``context`` tokens.

    Raises: ValueError as ``forward``, and for a batch that is no integer or negative.  Source: chapter 00."""
    batch = _count("batch", batch)
    return forward(config, [1] * batch, [context] * batch, dtype)


@dataclass(frozen=True)
class Hardware:
    """What a card can hold and how fast: memory in bytes, bandwidth in bytes/s, flops in bf16 operations/s.

    ``source`` says whether the rates are a datasheet's or measured. ``joules_per_byte`` and ``joules_per_flop`` are
    0 where unknown.

    Raises: ValueError for a size or rate that is not finite and positive, or a negative energy.  Source: chapter 00.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    source: str = "datasheet"
    joules_per_byte: float = 0.0
    joules_per_flop: float = 0.0

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "flops", "joules_per_byte", "joules_per_flop"):
            value, may_be_0 = getattr(self, field), field.startswith("joules")
            if not is_number(value) or value < 0 or (value == 0 and not may_be_0):
                must = "a finite number, 0 or more" if may_be_0 else "a positive number"
                raise ValueError(f"{self.name}: {field} is {value!r}; it must be {must}")

    @property
    def ridge(self) -> float:
        """The intensity, in operations a byte, above which arithmetic is the limit. Source: Williams et al. 2009."""
        return self.flops / self.bandwidth


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in [
        Hardware("rtx-4090", 24e9, 1.008e12, 165e12),
        Hardware("a100-40gb", 40e9, 1.555e12, 312e12),
        Hardware("a100-80gb", 80e9, 2.039e12, 312e12),
        Hardware("h100-sxm", 80e9, 3.35e12, 989e12),
        Hardware("h200", 141e9, 4.8e12, 989e12),
    ]
}


def roofline_time(work: Work, hardware: Hardware) -> float:
    """The seconds under which no implementation of ``work`` runs: the larger of bytes and operations over their rate.

    Source: Williams et al. 2009."""
    return max(work.bytes / hardware.bandwidth, work.flops / hardware.flops)


def energy(work: Work, hardware: Hardware) -> float:
    """Joules that moving the bytes and doing the operations take, without the card's idle power.

    Raises: ValueError where the hardware's energies are unknown.  Source: chapter 00; Horowitz 2014.
    """
    if not hardware.joules_per_byte or not hardware.joules_per_flop:
        raise ValueError(f"{hardware.name} has no measured joules_per_byte and joules_per_flop")
    return work.bytes * hardware.joules_per_byte + work.flops * hardware.joules_per_flop


@dataclass(frozen=True)
class Capacity:
    """What a card, or several, can hold: bytes by use, and how many tokens of KV cache the rest is.

    ``max_tokens`` is summed over all sequences; ``max_batch`` is how many of the asked length fit.

    Source: chapter 00.
    """

    total: float
    weights: float
    reserved: float
    kv_per_token: float
    max_tokens: int
    max_batch: int

    @property
    def fits(self) -> bool:
        """Whether the weights fit, and one sequence of the asked length beside them. Source: chapter 00."""
        return self.max_batch >= 1


def capacity(
    config: ModelConfig,
    memory: float,
    seq_len: int,
    *,
    num_gpus: int = 1,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    utilization: float = 0.9,
) -> Capacity:
    """How many sequences of ``seq_len`` tokens fit on ``num_gpus`` cards of ``memory`` bytes each.

    Shapes and units: ``utilization`` is the part of the memory that weights and cache may take, the rest being left
    to activations and the runtime (vLLM's gpu_memory_utilization). Over several cards the KV heads are split, and
    copied where there are fewer heads than cards; where they do not divide, the card with most of them is the limit.
    The latent of MLA is copied to each.

    Raises: ValueError for a memory that is not finite and positive, a count that is no integer or under 1, a
    utilization outside (0, 1], or an unknown dtype.

    Source: chapter 00.
    """
    if not is_number(memory) or memory <= 0:
        raise ValueError(f"memory is {memory!r}; it must be a positive number of bytes")
    seq_len, num_gpus = _count("seq_len", seq_len, 1), _count("num_gpus", num_gpus, 1)
    if not is_number(utilization) or not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization}; it must be over 0 and at most 1")
    heads = 1 if config.mla is not None else config.num_kv_heads
    fullest = -(-heads // num_gpus)  # heads on the card that has most of them
    per_token = kv_bytes_per_token(config, kv_dtype) * num_gpus * fullest / heads
    weights = weight_bytes(config, weight_dtype)
    usable = memory * num_gpus * utilization
    max_tokens = max(0, int((usable - weights) // per_token))
    return Capacity(
        total=memory * num_gpus,
        weights=weights,
        reserved=memory * num_gpus - usable,
        kv_per_token=per_token,
        max_tokens=max_tokens,
        max_batch=max_tokens // seq_len,
    )
