"""config: the published shapes, and what a configuration refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from kvlab import config
from kvlab.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig

NAN, INF = float("nan"), float("inf")
ROPE_NUMBERS = ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
SMALL = ModelConfig("small", 2, 32, 4, 2, 8, 48, 64, 64)

# name: layers, hidden, heads, KV heads, head size, intermediate, vocabulary, context, theta, tied
PUBLISHED = {
    "llama-2-7b": (32, 4096, 32, 32, 128, 11008, 32000, 4096, 1e4, False),
    "llama-3-8b": (32, 4096, 32, 8, 128, 14336, 128256, 8192, 5e5, False),
    "llama-3-70b": (80, 8192, 64, 8, 128, 28672, 128256, 8192, 5e5, False),
    "llama-3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, 131072, 5e5, True),
    "mistral-7b": (32, 4096, 32, 8, 128, 14336, 32000, 32768, 1e4, False),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e6, True),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6, False),
    "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 151936, 40960, 1e6, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shape(name):
    c = config.get(name)
    found = (
        c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.vocab_size,
        c.max_seq_len, c.rope.theta, c.tie_embeddings,
    )  # fmt: skip
    assert found == PUBLISHED[name]
    assert c.qk_norm == name.startswith("qwen3")
    assert c.sliding_window == (4096 if name == "mistral-7b" else None)
    assert c.norm_eps == (1e-6 if name.startswith("qwen3") else 1e-5)


def test_llama_32_stretches_its_context():
    assert config.get("llama-3.2-1b").rope == RopeConfig(5e5, "llama3", 32.0, 8192)


def test_deepseek_v3_has_latent_attention_and_experts():
    c = config.get("deepseek-v3")
    assert (c.num_layers, c.hidden_size, c.num_heads, c.vocab_size) == (61, 7168, 128, 129280)
    assert (c.mla.kv_lora_rank, c.mla.qk_rope_head_dim, c.mla.q_lora_rank) == (512, 64, 1536)
    assert (c.mla.qk_nope_head_dim, c.mla.v_head_dim) == (128, 128)
    assert (c.moe.num_experts, c.moe.num_experts_per_token, c.moe.num_shared_experts) == (256, 8, 1)
    assert (c.moe.intermediate_size, c.moe.num_dense_layers) == (2048, 3)


def test_shipped_models():
    target, draft = config.get("stdlib-7m"), config.get("stdlib-1m")
    assert (target.num_layers, target.hidden_size, target.num_heads, target.num_kv_heads) == (8, 256, 4, 2)
    assert (draft.num_layers, draft.hidden_size) == (2, 128)
    assert target.vocab_size == draft.vocab_size == 4096
    assert target.head_dim == 64
    assert target.max_seq_len == 4096


def test_get_lists_what_it_knows():
    assert all(config.get(name).name == name for name in config.MODELS)
    with pytest.raises(ValueError, match=r"gpt-5.*llama-3-8b"):
        config.get("gpt-5")


def test_a_configuration_cannot_change():
    with pytest.raises(FrozenInstanceError):
        SMALL.num_layers = 3
    assert hash(SMALL) == hash(replace(SMALL))


@pytest.mark.parametrize(
    "field",
    "num_layers hidden_size num_heads num_kv_heads head_dim intermediate_size vocab_size max_seq_len".split(),  # noqa: SIM905
)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_sizes_are_positive_integers(field, value):
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})


def test_heads_must_divide():
    with pytest.raises(ValueError, match="num_kv_heads"):
        replace(SMALL, num_kv_heads=3)
    assert replace(SMALL, num_heads=10, num_kv_heads=2).group_size == 5


def test_window_counts_the_query_itself():
    windowed = replace(SMALL, sliding_window=5)
    assert [windowed.window_size(i) for i in range(2)] == [(4, 0), (4, 0)]
    assert [replace(windowed, sliding_layers=(1,)).window_size(i) for i in range(2)] == [(-1, -1), (4, 0)]
    assert SMALL.window_size(0) == (-1, -1)
    with pytest.raises(ValueError, match="sliding_window"):
        replace(SMALL, sliding_window=0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "longrope"}, "longrope"),
        *(
            ({name: bad}, name)
            for name in (*ROPE_NUMBERS, "attention_factor")
            for bad in (0, -1.0, NAN, INF, 10**400, "2", True)
        ),
        *(({name: bad}, name) for name in ("mscale", "mscale_all_dim") for bad in (-1.0, NAN, "2")),
        *(({"original_max_seq_len": bad}, "original_max_seq_len") for bad in (0, 2.5, NAN, True)),
        ({"factor": 0.5}, "factor"),
        ({"truncate": 1}, "truncate"),
        ({"kind": "yarn", "theta": 1.0}, "theta"),
        ({"kind": "llama3", "low_freq_factor": 4.0}, "low_freq_factor"),
    ],
)  # fmt: skip
def test_rope_refuses(fields, named):
    with pytest.raises(ValueError, match=named):
        RopeConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({"norm_eps": bad}, "norm_eps") for bad in (0, -1e-5, NAN, INF, "1e-5", None, True)),
        *(({"sliding_window": bad}, "sliding_window") for bad in (NAN, 2.5, True, -1, "8")),
        *(({"sliding_layers": bad}, "sliding_layers") for bad in (5, (99,), (-1,), (True,), (0.0,), [0], "0")),
        *(({"rope": bad}, "rope") for bad in (None, 1e4, {})),
        *(({name: bad}, name) for name in ("mla", "moe") for bad in (5, False, {}, RopeConfig())),
        *(
            ({name: bad}, name)
            for name in "tie_embeddings attention_bias attention_out_bias mlp_bias qk_norm".split()  # noqa: SIM905
            for bad in (None, 2, "no")
        ),
        ({"rope": RopeConfig(kind="dynamic"), "head_dim": 2}, "head_dim"),
        ({"moe": MoEConfig(2, 1, 0, 16, 3)}, "num_dense_layers"),
    ],
)  # fmt: skip
def test_a_configuration_refuses(fields, named):
    with pytest.raises(ValueError, match=named):
        replace(SMALL, **fields)


MLA, MOE = MLAConfig(12, 20, 10, 4, 8), MoEConfig(4, 2, 0, 16, 0)


@pytest.mark.parametrize(
    ("part", "name", "bad"),
    [
        *((MLA, name, bad) for name in vars(MLA) for bad in (0, -4, 2.0, True, None)),
        *((MOE, name, bad) for name in vars(MOE) for bad in (-1, 2.0, True, None)),
        *((MOE, name, 0) for name in ("num_experts", "num_experts_per_token", "intermediate_size")),
        (MOE, "num_experts_per_token", 5),
    ],
)
def test_latent_attention_and_experts_refuse(part, name, bad):
    with pytest.raises(ValueError, match=name):
        replace(part, **{name: bad})


def test_what_a_configuration_may_leave_out():
    assert RopeConfig(kind="yarn", mscale=0.0).mscale == 0
    assert replace(SMALL, mla=MLA, moe=MOE, sliding_layers=()).moe is MOE
    with pytest.raises(ValueError, match="known"):
        config.get(["llama-3-8b"])
