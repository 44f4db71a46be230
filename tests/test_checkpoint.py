"""checkpoint: small random models made by transformers must give transformers' own logits and text; whatever is not
understood must be refused by name, and before weights are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvlab import checkpoint, runtime  # before transformers: the interpreter is chosen when triton is first imported
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig, RopeConfig
from kvlab.generate import generate
from kvlab.model import Decoder
from kvlab.naive import NaiveCache
from kvlab.sampling import SamplingParams

VOCAB, NEW = 96, 32
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "attn_implementation": "eager",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 1000.0,
    },
    "yarn": {**YARN, "rope_theta": 10_000.0},
    "yarn-mscale": {**YARN, "rope_theta": 1000.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "yarn-factors": {**YARN, "rope_theta": 1000.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
}  # fmt: skip

MODELS = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias-tied": ("Qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 16, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mistral-head-dim": ("Mistral", {"sliding_window": 200, "head_dim": 16}),
}  # fmt: skip


def make(kind: str, **fields):
    """A small model of transformers with every parameter random: biases and gains too, which start at 0 and 1."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **fields})
    generator = torch.Generator().manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def theirs(model, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def ours(decoder: Decoder, texts: list[list[int]]) -> torch.Tensor:
    batch = Batch.build(range(len(texts)), texts, [0] * len(texts), all_logits=True)
    with torch.no_grad():
        return decoder(batch, NoCache(decoder.config))


def their_text(model, prompt: list[int], use_cache: bool = True) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": use_cache}
    ids = torch.tensor([prompt])
    theirs(model, prompt[:1])  # their dynamic RoPE keeps the angles of the longest text until it sees a short one
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def check_same(model, decoder: Decoder, lengths=(29, 1, 13), recomputed: bool = True) -> None:
    """The logits of a ragged batch, and greedy text with a cache and (``recomputed``) without one."""
    texts = prompts(*lengths)
    for text, logits in zip(texts, ours(decoder, texts).split(lengths), strict=True):
        assert (logits - theirs(model, text)).abs().max() < 1e-4
    text = texts[0]
    params = SamplingParams(max_tokens=NEW)
    cached = NaiveCache(decoder.config, 1, 128)
    assert generate(decoder, cached, [text], params)[0].tokens == their_text(model, text)
    if recomputed:
        assert generate(decoder, NoCache(decoder.config), [text], params)[0].tokens == their_text(model, text, False)


def load(path, **options) -> Decoder:
    return checkpoint.load(path, device="cpu", **options)


def edit_config(path, **changes) -> None:
    """Set fields of config.json; None takes one out."""
    hf = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))


# ----------------------------------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("name", MODELS)
def test_architecture(name, tmp_path):
    kind, fields = MODELS[name]
    model = make(kind, **fields)
    model.save_pretrained(tmp_path)
    check_same(model, load(tmp_path))


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope(name, spelling, tmp_path):
    rope = ROPES[name]
    context = 20 if name == "dynamic" else 256  # 29 tokens and their 32 new ones go beyond the trained context
    model = make("Llama", rope_parameters=dict(rope), max_position_embeddings=context)
    model.save_pretrained(tmp_path)
    if spelling != "rope_parameters":
        old = {key: value for key, value in rope.items() if key != "rope_theta"}
        if spelling == "type":
            old["type"] = old.pop("rope_type")
        edit_config(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=rope["rope_theta"])
    decoder = load(tmp_path)
    assert decoder.config.rope.kind == rope["rope_type"]
    check_same(model, decoder, recomputed=spelling == "rope_parameters")
    if name != "default":  # and the kind matters on these inputs: without it the logits are others
        text = prompts(29)
        right = ours(decoder, text)
        plain = Decoder(replace(decoder.config, rope=RopeConfig(rope["rope_theta"])))
        plain.load_state_dict(decoder.state_dict())
        assert (ours(plain, text) - right).abs().max() > 1e-2


def test_dynamic_sequences_do_not_disturb_each_other(tmp_path):
    model = make("Llama", rope_parameters=dict(ROPES["dynamic"]), max_position_embeddings=20)
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert decoder.config.max_seq_len == 80
    short, long = prompts(5, 40)
    both = ours(decoder, [short, long])
    torch.testing.assert_close(both[:5], theirs(model, short), atol=1e-4, rtol=0)
    torch.testing.assert_close(both[5:], theirs(model, long), atol=1e-4, rtol=0)


def test_qwen3_with_yarn(tmp_path):
    model = make("Qwen3", head_dim=16, rope_parameters=dict(ROPES["yarn"]))
    model.save_pretrained(tmp_path)
    check_same(model, load(tmp_path))


def test_shards_give_the_same_weights(tmp_path):
    model = make("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert one.state_dict().keys() == many.state_dict().keys()
    for key, tensor in one.state_dict().items():
        assert torch.equal(tensor, many.state_dict()[key])
    check_same(model, many)


# ------------------------------------------------------------------------------------------------- load and save


SMALL = ModelConfig("small", 2, 32, 4, 2, 8, 48, VOCAB, 64)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    checkpoint.save(Decoder(SMALL), tmp_path)
    return tmp_path


def test_dtype_and_context(folder):
    assert load(folder).dtype == torch.float32
    half = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(p.device.type == "cpu" for p in half.parameters())
    checkpoint.save(half, folder / "half")
    again = load(folder / "half")
    assert again.dtype == torch.bfloat16
    for key, tensor in half.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])
    assert load(folder, max_seq_len=16).config.max_seq_len == 16
    with pytest.raises(ValueError, match="max_seq_len"):
        load(folder, max_seq_len=0)


def test_default_device_is_this_machines(folder):
    assert checkpoint.load(folder).device.type == runtime.device().type


def test_tied_weights_are_one_tensor_in_memory_and_in_the_file(tmp_path):
    decoder = Decoder(replace(SMALL, tie_embeddings=True))
    checkpoint.save(decoder, tmp_path)
    back = load(tmp_path)
    assert back.lm_head.weight is back.embed_tokens.weight
    assert "lm_head.weight" not in tensors(tmp_path)


def test_loaded_weights_can_be_trained_and_saved_over_their_own_file(folder):
    decoder = load(folder)
    ours_before = decoder.embed_tokens.weight.detach().clone()
    loss = decoder(Batch.build([0], [[1, 2, 3]], [0]), NoCache(decoder.config)).sum()
    loss.backward()
    assert all(p.grad is not None for p in decoder.parameters())
    checkpoint.save(decoder, folder)
    assert torch.equal(load(folder).embed_tokens.weight, ours_before)


def test_weights_do_not_follow_the_file(folder):
    decoder = load(folder)
    before = decoder.norm.weight.detach().clone()
    with open(folder / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    assert torch.equal(decoder.norm.weight, before)
    assert all(torch.isfinite(p).all() for p in decoder.parameters())


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"rope": RopeConfig(500.0, "llama3", 4.0, 32, 1.0, 2.0), "max_seq_len": 128}),
        ("LlamaForCausalLM", {"rope": RopeConfig(500.0, "yarn", 4.0, 16, mscale=1.0, mscale_all_dim=0.5)}),
        ("LlamaForCausalLM", {"rope": RopeConfig(500.0, "dynamic", 4.0)}),
        ("LlamaForCausalLM", {"rope": RopeConfig(500.0, "linear", 4.0)}),
        ("MistralForCausalLM", {"sliding_window": 8}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"attention_bias": True, "sliding_window": 8, "sliding_layers": (1,)}),
        ("Qwen3ForCausalLM", {"qk_norm": True, "tie_embeddings": True, "head_dim": 16}),
    ],
)
def test_saved_folder_is_read_by_us_and_by_transformers(architecture, changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    decoder = Decoder(replace(SMALL, **changes))
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.2)
    checkpoint.save(decoder, tmp_path, architecture)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    text = prompts(29)
    right = ours(decoder, text)
    assert torch.equal(ours(load(tmp_path), text), right)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(model).__name__ == architecture
    assert (theirs(model, text[0]) - right).abs().max() < 1e-4


def test_tied_weights_that_differ_are_not_dropped(tmp_path):
    decoder = Decoder(replace(SMALL, tie_embeddings=True))
    decoder.lm_head.weight = torch.nn.Parameter(decoder.embed_tokens.weight.detach().clone())
    checkpoint.save(decoder, tmp_path / "equal")
    with torch.no_grad():
        decoder.lm_head.weight[3, 1] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        checkpoint.save(decoder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["norm", "layers.0.self_attn.q_proj", "lm_head"])
def test_save_refuses_tensors_that_the_configuration_does_not_have(name, tmp_path):
    decoder = Decoder(SMALL)
    part = decoder.get_submodule(name)
    part.bias = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match=rf"{name}\.bias"):
        checkpoint.save(decoder, tmp_path / "new")
    part.bias, part.weight = None, torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=rf"{name}\.weight"):
        checkpoint.save(decoder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("fails", ["json.dumps", "pathlib.Path.write_text", "safetensors.torch.save_file"])
def test_a_save_that_fails_leaves_the_folder_as_it_was(folder, monkeypatch, fails):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(*args, **_):
        if fails.startswith("safetensors"):
            args[1].write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(Decoder(SMALL, dtype=torch.float16), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32", 32])
def test_a_dtype_that_no_decoder_computes_in_is_refused(folder, dtype):
    with pytest.raises(ValueError, match=r"dtype is .*float32"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("LlamaForCausalLM", {"qk_norm": True}, "qk_norm"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "sliding_window"),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_out_bias"),
        ("Qwen2ForCausalLM", {}, "attention_bias"),
        ("Qwen3ForCausalLM", {"qk_norm": True, "mlp_bias": True}, "mlp_bias"),
        ("MistralForCausalLM", {"sliding_window": 8, "sliding_layers": (0,)}, "sliding_layers"),
        ("GPT2LMHeadModel", {}, "GPT2LMHeadModel"),
        (["LlamaForCausalLM"], {}, "architecture is"),
    ],
)
def test_save_refuses_what_an_architecture_cannot_say(architecture, changes, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        checkpoint.save(Decoder(replace(SMALL, **changes)), tmp_path / "new", architecture)
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------- config_from_hf


BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "pretraining_tp": 1, "rope_scaling": None,
}  # fmt: skip


def hf(**changes):
    return {**BASE, **changes}


def test_config_of_a_published_model():
    config = checkpoint.config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
            "vocab_size": 128256,
        },
        "llama-3.2-1b",
    )  # fmt: skip
    from kvlab.config import MODELS

    assert config == MODELS["llama-3.2-1b"]


def test_defaults_of_absent_fields():
    bare = {k: v for k, v in BASE.items() if k not in ("num_key_value_heads", "rope_theta", "architectures")}
    config = checkpoint.config_from_hf(bare)
    assert (config.num_kv_heads, config.head_dim, config.rope, config.tie_embeddings) == (4, 8, RopeConfig(), False)
    mistral = {**bare, "model_type": "mistral"}
    assert checkpoint.config_from_hf(mistral).sliding_window == 4096
    assert checkpoint.config_from_hf({**mistral, "sliding_window": None}).sliding_window is None
    assert checkpoint.config_from_hf({**bare, "model_type": "qwen3"}).head_dim == 128


def test_window_of_qwen_is_off_unless_switched_on():
    qwen = hf(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=8, max_window_layers=1)
    assert checkpoint.config_from_hf(qwen).sliding_window is None
    on = checkpoint.config_from_hf({**qwen, "use_sliding_window": True})
    assert [on.window_size(i) for i in range(2)] == [(-1, -1), (7, 0)]
    every = checkpoint.config_from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 0})
    assert (every.sliding_window, every.sliding_layers) == (8, None)


def test_two_spellings_that_agree_are_one():
    linear = {"rope_type": "linear", "factor": 2.0}
    config = checkpoint.config_from_hf(
        hf(rope_parameters={**linear, "rope_theta": 10000.0}, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert config.rope == RopeConfig(10_000.0, "linear", 2.0, 64)


def test_context_reaches_what_the_factor_does():
    for kind in ("linear", "dynamic"):
        config = checkpoint.config_from_hf(hf(rope_scaling={"rope_type": kind, "factor": 4.0}))
        assert (config.max_seq_len, config.rope.original_max_seq_len) == (256, 64)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert checkpoint.config_from_hf(hf(rope_scaling=llama3)).max_seq_len == 64
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert checkpoint.config_from_hf(hf(rope_scaling=yarn)).max_seq_len == 256
    assert checkpoint.config_from_hf(hf(rope_scaling=yarn, max_position_embeddings=512)).max_seq_len == 512
    implied = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    assert checkpoint.config_from_hf(hf(rope_scaling=implied)).rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": [], "model_type": "llama"}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": [{}]}, "architectures"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "yarn"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        *(({"rope_scaling": {"rope_type": kind, "factor": 1e308}}, "factor") for kind in ("linear", "dynamic", "yarn")),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1}, "theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim"),
        *(({"vocab_size": size}, "vocab_size") for size in (2**43, 2**62, 2**70, 10**400)),
        *(({"max_position_embeddings": size}, "max_position_embeddings") for size in (2**70, 10**400)),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"num_hidden_layers": 2**60}, "parameters"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"model_type": "mistral"}, "model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor",
        ),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_parameters",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"vocab_size": 96.0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
        ({"head_dim": 7}, "head size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "mlp_bias": True}, "mlp_bias"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "use_sliding_window",
        ),
    ],
)  # fmt: skip
def test_config_refuses_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        checkpoint.config_from_hf(hf(**changes))


def test_null_is_as_good_as_absent():
    config = checkpoint.config_from_hf(hf(quantization_config=None, sliding_window=None, some_new_field=None))
    assert config == checkpoint.config_from_hf(BASE)


# --------------------------------------------------------------------------------------------- damaged folders


def tensors(path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}


def write(path, weights, name="model.safetensors") -> None:
    from safetensors.torch import save_file

    save_file(weights, path / name)


@pytest.fixture
def no_weights_read(monkeypatch):
    """The check must come from the headers: whoever reads a weight fails the test."""

    def refuse(*_):
        raise AssertionError("weights were read before everything was checked")

    monkeypatch.setattr(checkpoint._files, "_read", refuse)


@pytest.mark.usefixtures("no_weights_read")
class TestRefusedFromTheHeaders:
    def test_missing_tensor(self, folder):
        weights = tensors(folder)
        del weights["model.layers.1.mlp.up_proj.weight"]
        write(folder, weights)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            load(folder)

    def test_untied_model_without_an_output_layer(self, folder):
        weights = tensors(folder)
        del weights["lm_head.weight"]
        write(folder, weights)
        with pytest.raises(ValueError, match=r"no tensor lm_head\.weight"):
            load(folder)

    def test_names_without_the_prefix(self, folder):
        write(folder, {name.removeprefix("model."): tensor for name, tensor in tensors(folder).items()})
        with pytest.raises(ValueError, match=r"it holds embed_tokens\.weight"):
            load(folder)

    def test_extra_tensor(self, folder):
        write(folder, {**tensors(folder), "model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)})
        with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*has no place"):
            load(folder)

    def test_bias_that_the_configuration_does_not_have(self, folder):
        write(folder, {**tensors(folder), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
        with pytest.raises(ValueError, match=r"q_proj\.bias"):
            load(folder)

    def test_wrong_shape(self, folder):
        write(folder, {**tensors(folder), "model.norm.weight": torch.ones(31)})
        with pytest.raises(ValueError, match=r"model\.norm\.weight is \[31\].*\[32\]"):
            load(folder)

    def test_wrong_vocabulary(self, folder):
        edit_config(folder, vocab_size=97)
        with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is \[96, 32\].*\[97, 32\]"):
            load(folder)

    def test_quantised_tensor(self, folder):
        weights = tensors(folder)
        weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
        write(folder, weights)
        with pytest.raises(ValueError, match=r"up_proj\.weight is stored as I8"):
            load(folder)

    def test_truncated_file(self, folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
            load(folder)

    def test_unsupported_field(self, folder):
        edit_config(folder, quantization_config={"bits": 4})
        with pytest.raises(ValueError, match="quantization_config"):
            load(folder)

    def test_full_gpu(self, folder, monkeypatch):
        free = 1000
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
        with pytest.raises(MemoryError, match=r"parameters, float32\) needs .* at most 250 parameters would fit"):
            checkpoint.load(folder, device="cuda")


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="downloads none"):
        load("meta-llama/Llama-3.2-1B")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\ud800", "[" * 100_000, '{"a": ' + "[" * 900 + "]" * 900 + "}"])
def test_config_that_is_no_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load(folder)


def test_an_index_of_endless_brackets(sharded):
    (sharded[0] / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"index\.json is not valid JSON"):
        load(sharded[0])


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder, name):
    (folder / "model.safetensors").unlink()
    marker = folder / "opened"
    # A pickle that would create a file if anything loaded it.
    (folder / name).write_bytes(f"cpathlib\nPath.touch\n(cpathlib\nPath\n(V{marker}\ntRtR.".encode())
    with pytest.raises(ValueError, match=rf"{name}.*never opens a pickle"):
        load(folder)
    assert not marker.exists()


def test_rotary_buffers_of_old_checkpoints_are_passed_over(folder):
    before = load(folder)
    write(folder, {**tensors(folder), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    text = prompts(9)
    assert torch.equal(ours(load(folder), text), ours(before, text))


def test_tied_model_with_a_copy_of_the_embedding(tmp_path):
    checkpoint.save(Decoder(replace(SMALL, tie_embeddings=True)), tmp_path)
    weights = tensors(tmp_path)
    embedding = weights["model.embed_tokens.weight"]
    write(tmp_path, {**weights, "lm_head.weight": embedding.clone()})
    assert torch.equal(load(tmp_path).lm_head.weight, embedding)
    write(tmp_path, {**weights, "lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load(tmp_path)


@pytest.fixture
def sharded(folder):
    """The same model in two shards."""
    weights = tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in parts.items():
        write(folder, {name: weights[name] for name in held}, file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    set_index(folder, weight_map)
    return folder, weight_map


def set_index(folder, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_two_shards(sharded):
    folder, weight_map = sharded
    assert {f"model.{k}" if not k.startswith("lm_head") else k for k in load(folder).state_dict()} == set(weight_map)


@pytest.mark.parametrize(
    "target", ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..\\a.safetensors", ""]
)
def test_index_may_not_leave_the_folder(sharded, target):
    folder, weight_map = sharded
    set_index(folder, {**weight_map, "lm_head.weight": target})
    with pytest.raises(ValueError, match=r"lm_head\.weight.*folder itself"):
        load(folder)


def test_index_may_not_name_a_pickle(sharded):
    folder, weight_map = sharded
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    set_index(folder, {**weight_map, "lm_head.weight": "pytorch_model.bin"})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*\.safetensors file"):
        load(folder)


def test_missing_shard(sharded):
    folder, _ = sharded
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        load(folder)


def test_index_and_shard_must_agree(sharded):
    folder, weight_map = sharded
    fewer = dict(weight_map)
    del fewer["model.norm.weight"]
    set_index(folder, fewer)
    with pytest.raises(ValueError, match=r"does not list the tensor model\.norm\.weight"):
        load(folder)
    set_index(folder, {**weight_map, "model.norm.bias": "b.safetensors"})
    with pytest.raises(ValueError, match=r"lists the tensor model\.norm\.bias"):
        load(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, []])
def test_index_without_a_map(sharded, index):
    folder, _ = sharded
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="weight_map"):
        load(folder)


# --------------------------------------------------------------------------------------------------- tokenizer


def test_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert checkpoint.load_tokenizer(tmp_path).encode("b a c").ids == [1, 0, 2]


def test_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        checkpoint.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        checkpoint.load_tokenizer(tmp_path)
