"""costs: bytes and operations against published sizes, the real network, PyTorch's own counter and sums by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvlab import config, costs, reference
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import MLAConfig, ModelConfig, MoEConfig
from kvlab.model import Decoder

NAN = float("nan")
PLAIN = [name for name, shape in config.MODELS.items() if shape.mla is None]

# Odd sizes that no other size equals, so that a dimension taken for another shows.
SMALL = ModelConfig("small", 3, 40, 6, 2, 10, 70, 97, 512)
TIED = dataclasses.replace(SMALL, name="tied", tie_embeddings=True, qk_norm=True)
BIASED = dataclasses.replace(SMALL, name="biased", attention_bias=True, attention_out_bias=True, mlp_bias=True)
MLA = ModelConfig(
    "mla", 4, 40, 6, 6, 10, 70, 97, 512, mla=MLAConfig(12, 20, 10, 4, 8), moe=MoEConfig(16, 3, 1, 24, 1)
)  # fmt: skip

sizes = st.integers(1, 12)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    """A small plain decoder's shape."""
    kv_heads = draw(st.integers(1, 4))
    return ModelConfig(
        "drawn",
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(sizes),
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(sizes),
        intermediate_size=draw(sizes),
        vocab_size=draw(sizes),
        max_seq_len=64,
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        attention_out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


# The cache.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("llama-3.2-1b", 32_768),
        ("mistral-7b", 131_072),
        ("qwen3-0.6b", 114_688),
        ("qwen3-8b", 147_456),
        ("qwen3-32b", 262_144),
        ("deepseek-v3", 70_272),
    ],
)
def test_kv_bytes_per_token_of_published_models(name: str, expected: int) -> None:
    shape = config.get(name)
    assert costs.kv_bytes_per_token(shape) == expected
    assert costs.kv_bytes_per_token(shape, "fp32") == 2 * expected
    assert costs.kv_bytes_per_token(shape, "fp8") == expected / 2
    assert costs.kv_bytes_per_token(shape, "int4") == expected / 4
    assert costs.kv_bytes_per_token(shape, "int2") == expected / 8
    assert costs.kv_bytes(shape, 4096, 3) == 3 * 4096 * expected
    assert costs.kv_bytes(shape, 0, 3) == costs.kv_bytes(shape, 5, 0) == 0


@pytest.mark.parametrize("shape", [SMALL, TIED, config.get("stdlib-7m")], ids=lambda shape: shape.name)
def test_a_token_leaves_in_the_cache_what_the_projections_of_a_layer_give(shape: ModelConfig) -> None:
    layer = Decoder(shape, device="meta").layers[0].self_attn
    row = torch.empty(1, shape.hidden_size, device="meta")
    assert costs.kv_elements_per_token(shape) == layer.k_proj(row).numel() + layer.v_proj(row).numel()


# Parameters.


def built(shape: ModelConfig) -> dict[str, int]:
    """The parameters of a real ``Decoder`` by part; on the meta device, so that 70B cost nothing."""
    found = dict.fromkeys(("embedding", "lm_head", "attention", "mlp", "norms"), 0)
    for name, parameter in Decoder(shape, device="meta").named_parameters():
        part = "norms" if "norm" in name else ""
        for key, mark in (
            ("embedding", "embed_tokens"),
            ("lm_head", "lm_head"),
            ("mlp", "mlp."),
            ("attention", "proj"),
        ):
            part = part or (key if mark in name else "")
        found[part] += parameter.numel()
    return found


@pytest.mark.parametrize("shape", [*(config.get(n) for n in PLAIN), SMALL, TIED, BIASED], ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_network(shape: ModelConfig) -> None:
    counted, there = costs.num_parameters(shape), built(shape)
    assert {part: getattr(counted, part) for part in there} == there
    assert counted.total == sum(there.values())
    assert counted.mlp_active == counted.mlp
    head = shape.vocab_size * shape.hidden_size
    assert counted.active == counted.total - (0 if shape.tie_embeddings else head)


@settings(max_examples=25, deadline=None)
@given(shapes())
def test_parameters_of_any_plain_shape(shape: ModelConfig) -> None:
    counted, there = costs.num_parameters(shape), built(shape)
    assert {part: getattr(counted, part) for part in there} == there


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.554),
        ("llama-3.2-1b", 1.236),
        ("mistral-7b", 7.242),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
        ("deepseek-v3", 671.03),
    ],
)
def test_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert costs.num_parameters(config.get(name)).total / 1e9 == pytest.approx(billions, rel=2e-4)


def test_deepseek_v3_uses_37_billion_parameters_a_token() -> None:
    assert costs.num_parameters(config.get("deepseek-v3")).active / 1e9 == pytest.approx(37, rel=0.02)


def test_parameters_of_latent_attention_and_experts_by_hand() -> None:
    # d 40, 6 heads, latent 12, query latent 20, 10 + 4 dimensions a query head, 8 a value head
    attention = 40 * 20 + 20 * 6 * 14 + 40 * (12 + 4) + 12 * 6 * (10 + 8) + 6 * 8 * 40
    dense, expert, router = 3 * 40 * 70, 3 * 40 * 24, 40 * 16 + 16
    assert costs.num_parameters(MLA) == costs.Parameters(
        embedding=97 * 40,
        lm_head=97 * 40,
        attention=4 * attention,
        mlp=dense + 3 * (17 * expert + router),
        mlp_active=dense + 3 * (4 * expert + router),
        norms=4 * (40 + 40 + 20 + 12) + 40,
    )


@pytest.mark.parametrize("name", config.MODELS)
@pytest.mark.parametrize(("dtype", "size"), costs.BYTES_PER_ELEMENT.items())
def test_weight_bytes(name: str, dtype: str, size: float) -> None:
    shape = config.get(name)
    assert costs.weight_bytes(shape, dtype) == costs.num_parameters(shape).total * size


# The work of a pass.


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40))
def test_visible_pairs_are_those_of_the_mask(q_len: int, past: int) -> None:
    kv_len = q_len + past
    by_hand = sum(1 for i in range(q_len) for j in range(kv_len) if j <= past + i)
    assert costs.visible_pairs(q_len, kv_len) == by_hand
    assert by_hand == int(reference.visible_keys(q_len, kv_len, causal=True).sum())


def counted_flops(shape: ModelConfig, q_lens: list[int]) -> tuple[int, int]:
    """What PyTorch counts in one pass: (products with weights, attention as computed, masked pairs included)."""
    model = Decoder(shape)
    tokens = [[i % shape.vocab_size for i in range(q)] for q in q_lens]
    batch = Batch.build(list(range(len(q_lens))), tokens, [0] * len(q_lens))
    counter = FlopCounterMode(display=False)
    # The counter does not know the fused attention of CPUs; the plain one is made of products that it counts.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(batch, NoCache(shape))
    operators = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in operators.items() if str(op) in ("aten.mm", "aten.addmm"))
    return linear, counter.get_total_flops() - linear


@pytest.mark.parametrize("shape", [SMALL, TIED, BIASED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("q_lens", [[1], [17], [5, 5, 5], [3, 11, 1]], ids=str)
def test_flops_against_pytorchs_counter(shape: ModelConfig, q_lens: list[int]) -> None:
    work = costs.forward(shape, q_lens, q_lens)
    linear, attention = counted_flops(shape, q_lens)
    # The counter sees matrix products alone. costs counts two operations a bias too: an addition, doubled.
    biases = sum(p.numel() for n, p in Decoder(shape, device="meta").named_parameters() if n.endswith(".bias"))
    assert work.flops_linear - 2 * sum(q_lens) * biases == linear

    # Attention here computes all Lq * Lk scores and masks; costs counts those that causality leaves.
    heads, head_dim = shape.num_heads, shape.head_dim
    per_pair = shape.num_layers * 4 * heads * head_dim
    assert attention == per_pair * sum(q * q for q in q_lens)
    assert work.flops_attention == per_pair * sum(q * (q + 1) // 2 for q in q_lens)


def test_a_decode_step_by_hand() -> None:
    work = costs.decode(SMALL, context=50, batch=4, dtype="bf16")
    attention = 40 * 60 + 2 * 40 * 20 + 60 * 40  # q; k and v; output
    mlp, head, norms = 3 * 40 * 70, 97 * 40, 3 * 80 + 40
    kv = 2 * 2 * 10  # a key and a value of 2 heads of 10
    # norm; q, k and v; attention (its k and v count as cache); output; residual; norm; gate and up; SwiGLU; down; ...
    per_layer = 80 + (40 + 100) + (60 + 60) + (60 + 40) + 120 + 80 + (80 + 140) + 210 + (70 + 40) + 120
    assert work.flops_linear == 2 * 4 * (3 * (attention + mlp) + head)
    assert work.flops_attention == 3 * 4 * 6 * 10 * 4 * 50
    assert work.bytes_weights == 2 * (3 * (attention + mlp) + norms + head)
    assert work.bytes_kv_read == 2 * 3 * kv * 4 * 50
    assert work.bytes_kv_write == 2 * 3 * kv * 4
    assert work.bytes_activations == 2 * 4 * 3 * per_layer
    assert work.flops == work.flops_linear + work.flops_attention
    parts = (work.bytes_weights, work.bytes_kv_read, work.bytes_kv_write, work.bytes_activations)
    assert work.bytes == sum(parts)
    assert work.intensity == work.flops / work.bytes


@pytest.mark.parametrize("shape", [SMALL, TIED, BIASED], ids=lambda shape: shape.name)
def test_a_pass_reads_each_weight_of_the_network_once(shape: ModelConfig) -> None:
    model = Decoder(shape, dtype=torch.bfloat16, device="meta")
    read = sum(p.nbytes for p in model.parameters())
    if not shape.tie_embeddings:
        read -= model.embed_tokens.weight.nbytes  # a lookup touches a few rows only
    for work in (costs.decode(shape, 9, 5), costs.prefill(shape, 9, 5), costs.forward(shape, [3, 1], [3, 30])):
        assert work.bytes_weights == read


def test_latent_attention_in_absorbed_form_by_hand() -> None:
    work = costs.decode(MLA, 30, 2)
    # scores over latent and rotated key, values over the latent: 12 + 4 and 12, a multiply-add each
    assert work.flops_attention == 4 * 2 * 30 * 6 * 2 * (12 + 4 + 12)
    assert work.bytes_kv_read == 4 * (12 + 4) * 2 * 30 * 2


def test_experts_are_read_as_tokens_choose_them_up_to_all() -> None:
    params = costs.num_parameters(MLA)
    rest = params.attention + params.norms + 97 * 40
    dense = 3 * 40 * 70
    active = params.mlp_active - dense
    for batch in (1, 2, 3):
        assert costs.decode(MLA, 8, batch, "int8").bytes_weights == rest + dense + batch * active
    assert costs.decode(MLA, 8, 100, "int8").bytes_weights == rest + params.mlp
    reads = [costs.decode(MLA, 8, batch).bytes_weights for batch in range(1, 30)]
    assert reads == sorted(reads)


lens = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=5)


@settings(deadline=None)
@given(lens, st.sampled_from([SMALL, TIED, BIASED, config.get("llama-3-8b")]))
def test_a_batch_is_the_sum_of_its_sequences_but_reads_the_weights_once(
    pairs: list[tuple[int, int]], shape: ModelConfig
) -> None:
    whole = costs.forward(shape, [q for q, _ in pairs], [q + past for q, past in pairs])
    alone = [costs.forward(shape, [q], [q + past]) for q, past in pairs]
    for part in ("flops_linear", "flops_attention", "bytes_kv_read", "bytes_kv_write", "bytes_activations"):
        assert getattr(whole, part) == sum(getattr(work, part) for work in alone)
    assert whole.bytes_weights == max(work.bytes_weights for work in alone)


@pytest.mark.parametrize("shape", [SMALL, MLA], ids=lambda shape: shape.name)
def test_an_idle_sequence_costs_nothing(shape: ModelConfig) -> None:
    nothing = costs.Work(0, 0, 0, 0, 0, 0)
    assert costs.forward(shape, [0], [5000]) == costs.forward(shape, [], []) == costs.decode(shape, 100, 0) == nothing
    assert nothing.intensity == 0
    assert costs.forward(shape, [0, 2], [5000, 7]) == costs.forward(shape, [2], [7])


def test_numpys_integers_do_not_wrap() -> None:
    many = np.int32(2**30)
    assert costs.kv_bytes(SMALL, many, np.int8(100)) == costs.kv_bytes(SMALL, 2**30, 100)
    assert costs.visible_pairs(many, many) == 2**29 * (2**30 + 1)
    assert costs.decode(SMALL, many, np.int8(2)) == costs.decode(SMALL, 2**30, 2)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 59), st.sampled_from([SMALL, MLA]))
def test_a_prompt_in_two_chunks_does_the_same_attention_and_writes_the_same_cache(
    length: int, cut: int, shape: ModelConfig
) -> None:
    cut = min(cut, length)
    whole = costs.prefill(shape, length)
    first, second = costs.prefill(shape, cut), costs.forward(shape, [length - cut], [length])
    assert whole.flops_attention == first.flops_attention + second.flops_attention
    assert whole.bytes_kv_write == first.bytes_kv_write + second.bytes_kv_write


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(list(config.MODELS)))
def test_intensity_of_decode_falls_with_context_towards_that_of_attention_alone(
    context: int, more: int, name: str
) -> None:
    shape = config.get(name)
    if shape.mla is not None:  # absorbed latent attention is itself above the weights' intensity
        return
    short, long = (costs.decode(shape, c, 256).intensity for c in (1000 + context, 1000 + context + more))
    assert long < short
    limit = shape.group_size  # 4 H D operations over 2 H_kv D elements of 2 bytes
    assert long > limit


# Time and energy.


def test_roofline_time_is_the_slower_of_the_two() -> None:
    card = costs.Hardware("card", 1e9, 100.0, 1000.0)
    assert card.ridge == 10
    memory_bound = costs.Work(2000.0, 0.0, 500.0, 0.0, 0.0, 0.0)
    compute_bound = costs.Work(6000.0, 4000.0, 100.0, 100.0, 50.0, 50.0)
    assert costs.roofline_time(memory_bound, card) == 5.0
    assert costs.roofline_time(compute_bound, card) == 10.0


@settings(deadline=None)
@given(st.floats(1, 1e15), st.floats(1, 1e15), st.sampled_from(list(costs.HARDWARE)))
def test_the_ridge_separates_the_two_sides(flops: float, size: float, name: str) -> None:
    card = costs.HARDWARE[name]
    work = costs.Work(flops, 0.0, size, 0.0, 0.0, 0.0)
    by_bytes, by_flops = size / card.bandwidth, flops / card.flops
    assert costs.roofline_time(work, card) >= max(by_bytes, by_flops)
    if work.intensity < card.ridge * (1 - 1e-9):
        assert costs.roofline_time(work, card) == by_bytes
    if work.intensity > card.ridge * (1 + 1e-9):
        assert costs.roofline_time(work, card) == by_flops


def test_energy_by_hand_and_its_refusal() -> None:
    work = costs.Work(1e12, 1e12, 3e9, 1e9, 0.0, 0.0)
    known = costs.Hardware("known", 1e9, 1.0, 1.0, "measured", joules_per_byte=1e-10, joules_per_flop=5e-13)
    assert costs.energy(work, known) == pytest.approx(4e9 * 1e-10 + 2e12 * 5e-13)
    for missing in ("joules_per_byte", "joules_per_flop"):
        with pytest.raises(ValueError, match="joules_per_byte and joules_per_flop"):
            costs.energy(work, dataclasses.replace(known, **{missing: 0.0}))


def test_the_cards_offered_cover_the_sizes_of_the_book() -> None:
    assert {h.memory for h in costs.HARDWARE.values()} == {24e9, 40e9, 80e9, 141e9}
    assert all(h.source == "datasheet" and name == h.name for name, h in costs.HARDWARE.items())


# Capacity.


def brute_force_tokens(shape: ModelConfig, memory: float, num_gpus: int, utilization: float) -> int:
    """Add tokens until the next one would not fit; each GPU is filled by itself where KV heads are copied."""
    room = memory * num_gpus * utilization - costs.num_parameters(shape).total * 2
    heads = 1 if shape.mla else shape.num_kv_heads
    copies = num_gpus * max(sum(h % num_gpus == g for h in range(heads)) for g in range(num_gpus)) / heads
    elements = 16 if shape.mla else 2 * shape.num_kv_heads * shape.head_dim
    token = 2 * shape.num_layers * elements * copies
    tokens = 0
    while (tokens + 1) * token <= room:
        tokens += 1
    return tokens


@example(SMALL, 300_000, 7, 8, 0.5)
@example(MLA, 300_000, 7, 3, 1.0)
@example(SMALL, 100, 1, 1, 1.0)
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([SMALL, TIED, MLA]), st.integers(40_000, 600_000), st.integers(1, 30), st.integers(1, 8),
    st.sampled_from([0.25, 0.5, 1.0]),
)  # fmt: skip
def test_capacity_against_adding_tokens_one_by_one(
    shape: ModelConfig, memory: int, seq_len: int, num_gpus: int, utilization: float
) -> None:
    got = costs.capacity(shape, memory, seq_len, num_gpus=num_gpus, utilization=utilization)
    assert got.max_tokens == brute_force_tokens(shape, memory, num_gpus, utilization)
    batch = 0
    while (batch + 1) * seq_len <= got.max_tokens:
        batch += 1
    assert got.max_batch == batch
    assert got.fits == (batch >= 1)
    assert (got.total, got.weights) == (memory * num_gpus, costs.weight_bytes(shape))
    assert got.reserved == pytest.approx(got.total * (1 - utilization))


@settings(deadline=None)
@given(
    st.sampled_from(list(config.MODELS)), st.floats(1e9, 2e11), st.integers(1, 200_000), st.integers(1, 8),
    st.floats(0.05, 0.99), st.sampled_from(["bf16", "fp8", "int4"]),
)  # fmt: skip
def test_capacity_is_monotonic(
    name: str, memory: float, seq_len: int, num_gpus: int, utilization: float, dtype: str
) -> None:
    shape = config.get(name)

    def tokens(**changes: Any) -> costs.Capacity:
        given: dict[str, Any] = {
            "memory": memory, "seq_len": seq_len, "num_gpus": num_gpus, "weight_dtype": "bf16", "kv_dtype": "bf16",
            "utilization": utilization,
        }  # fmt: skip
        return costs.capacity(shape, **(given | changes))

    base = tokens()
    assert tokens(memory=memory * 1.5).max_tokens >= base.max_tokens
    assert tokens(utilization=min(1.0, utilization * 1.01)).max_tokens >= base.max_tokens
    assert tokens(weight_dtype=dtype).max_tokens >= base.max_tokens
    assert tokens(kv_dtype=dtype).max_tokens >= base.max_tokens
    assert tokens(seq_len=seq_len + 1).max_batch <= base.max_batch
    assert tokens(num_gpus=num_gpus + 1).max_tokens >= base.max_tokens
    used = base.weights + base.max_tokens * base.kv_per_token + base.reserved
    assert base.max_tokens == 0 or used <= base.total * (1 + 1e-12)


def test_capacity_copies_heads_that_cannot_be_split() -> None:
    def per_token(name: str, num_gpus: int) -> float:
        return costs.capacity(config.get(name), 80e9, 1, num_gpus=num_gpus).kv_per_token

    assert per_token("llama-3-8b", 8) == 131_072  # eight heads, one on each
    assert per_token("llama-3-8b", 16) == 2 * 131_072
    assert per_token("deepseek-v3", 8) == 8 * 70_272  # the latent has no heads to split


def test_known_answers_of_capacity() -> None:
    llama = config.get("llama-3-8b")
    got = costs.capacity(llama, 80e9, 8192)
    # (0.9 * 80e9 - 2 * 8,030,261,248) / 131,072 = 426,784.3
    assert (got.max_tokens, got.max_batch) == (426_784, 52)
    assert not costs.capacity(config.get("llama-3-70b"), 141e9, 1).fits
    assert costs.capacity(config.get("llama-3-70b"), 141e9, 8192, weight_dtype="fp8").fits


# Errors.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: costs.kv_bytes_per_token(SMALL, "fp7"), "dtype is 'fp7'; it must be one of fp32, bf16"),
        (lambda: costs.kv_bytes(SMALL, 1, 1, "fp7"), "dtype is 'fp7'"),
        (lambda: costs.weight_bytes(SMALL, "fp7"), "dtype is 'fp7'"),
        (lambda: costs.forward(SMALL, [1], [1], "fp7"), "dtype is 'fp7'"),
        (lambda: costs.prefill(SMALL, 1, dtype="fp7"), "dtype is 'fp7'"),
        (lambda: costs.decode(SMALL, 1, dtype="fp7"), "dtype is 'fp7'"),
        (lambda: costs.capacity(SMALL, 1e9, 1, weight_dtype="fp7"), "dtype is 'fp7'"),
        (lambda: costs.capacity(SMALL, 1e9, 1, kv_dtype="fp7"), "dtype is 'fp7'"),
        (lambda: costs.kv_bytes(SMALL, -1), "seq_len is -1"),
        (lambda: costs.kv_bytes(SMALL, 1, -2), "batch is -2"),
        (lambda: costs.visible_pairs(3, 2), "q_len is 3 and kv_len 2"),
        (lambda: costs.visible_pairs(-1, 2), "q_len is -1"),
        (lambda: costs.forward(SMALL, [1, 2], [3]), "q_lens has 2 entries and kv_lens 1"),
        (lambda: costs.forward(SMALL, [4], [3]), "q_len is 4 and kv_len 3"),
        (lambda: costs.prefill(SMALL, -1), "q_len is -1"),
        (lambda: costs.decode(SMALL, 0), "q_len is 1 and kv_len 0"),
        (lambda: costs.capacity(SMALL, 0, 1), "memory is 0"),
        (lambda: costs.capacity(SMALL, 1e9, 0), "seq_len is 0"),
        (lambda: costs.capacity(SMALL, 1e9, 1, num_gpus=0), "num_gpus is 0"),
        (lambda: costs.capacity(SMALL, 1e9, 1, utilization=0.0), "utilization is 0.0"),
        (lambda: costs.capacity(SMALL, 1e9, 1, utilization=1.1), "utilization is 1.1"),
        (lambda: costs.Hardware("none", 0, 1, 1), "none: memory is 0; it must be a positive number"),
        (lambda: costs.Hardware("none", 1, -1, 1), "bandwidth is -1"),
        (lambda: costs.Hardware("none", 1, 1, NAN), "flops is nan"),
        (lambda: costs.Hardware("none", 1, float("inf"), 1), "bandwidth is inf"),
        (lambda: costs.Hardware("none", 1, 1, 1, "", -1.0), "joules_per_byte is -1.0"),
        (lambda: costs.Hardware("none", 1, 1, 1, "", 1.0, NAN), "joules_per_flop is nan"),
        (lambda: costs.kv_bytes_per_token(SMALL, ["bf16"]), "dtype is "),  # type: ignore[arg-type]
        (lambda: costs.forward(SMALL, [1.0], [1]), "q_len is 1.0"),
        (lambda: costs.forward(SMALL, [1], [True]), "kv_len is True"),
        (lambda: costs.forward(SMALL, [0], [-1]), "kv_len is -1"),
        *((lambda bad=bad: costs.prefill(SMALL, 100, bad), "batch is") for bad in (-1, NAN, 1.5, True, None)),
        *((lambda bad=bad: costs.decode(SMALL, 100, bad), "batch is") for bad in (-1, NAN, 1.5, True, None)),
        *((lambda bad=bad: costs.kv_bytes(SMALL, bad), "seq_len is") for bad in (NAN, 1.5, True, "3")),
        *((lambda bad=bad: costs.kv_bytes(SMALL, 1, bad), "batch is") for bad in (NAN, 1.5, True, "3")),
        *((lambda bad=bad: costs.visible_pairs(bad, 2), "q_len is") for bad in (NAN, 1.5, True)),
        *((lambda bad=bad: costs.visible_pairs(1, bad), "kv_len is") for bad in (NAN, 1.5, True)),
        *((lambda bad=bad: costs.capacity(SMALL, bad, 1), "memory is") for bad in (NAN, float("inf"), 10**400, "8")),
        *((lambda bad=bad: costs.capacity(SMALL, 1e9, bad), "seq_len is") for bad in (NAN, 1.5, True)),
        *((lambda bad=bad: costs.capacity(SMALL, 1e9, 1, num_gpus=bad), "num_gpus is") for bad in (NAN, 1.5, True)),
        (lambda: costs.capacity(SMALL, 1e9, 1, utilization=NAN), "utilization is nan"),
    ],
)
def test_bad_input_is_a_sentence(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
