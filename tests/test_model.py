"""model: ragged batches equal single runs, a failed pass leaves nothing behind, and gradients flow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab import config
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig, RopeConfig
from kvlab.model import Decoder, Ops, RMSNorm, rms_norm, swiglu
from kvlab.naive import NaiveCache
from kvlab.rope import rotate

SMALL = ModelConfig("small", 2, 32, 4, 2, 8, 48, 64, 64)
VARIANTS = {
    "plain": SMALL,
    "biased": replace(SMALL, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "qk-norm": replace(SMALL, qk_norm=True, head_dim=12),
    "window": replace(SMALL, sliding_window=3, sliding_layers=(1,)),
    "tied-mqa": replace(SMALL, tie_embeddings=True, num_kv_heads=1),
    "group-of-5": replace(SMALL, num_heads=10),
    "yarn": replace(SMALL, rope=RopeConfig(kind="yarn", factor=4.0, original_max_seq_len=16)),
    "dynamic": replace(SMALL, rope=RopeConfig(kind="dynamic", factor=4.0, original_max_seq_len=4)),
}


def make(configuration: ModelConfig = SMALL, **options) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(configuration, **options)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return decoder


def texts(*lengths: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (n,), generator=g).tolist() for n in lengths]


@torch.inference_mode()
def run(decoder, cache, ids, new, past, **options):
    return decoder(Batch.build(ids, new, past, **options), cache)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_ragged_batch_equals_the_single_runs(name, cached):
    decoder = make(VARIANTS[name])
    prompts = texts(3, 5, 1, 9)

    def cache():
        return NaiveCache(decoder.config, 4, 16) if cached else NoCache(decoder.config)

    together = run(decoder, cache(), range(4), prompts, [0] * 4, all_logits=True)
    alone = [run(decoder, cache(), [0], [prompt], [0], all_logits=True) for prompt in prompts]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dynamic"])
def test_prefill_in_two_chunks_equals_one_pass(name):
    """(With dynamic RoPE a key keeps the angle of the length at which it was stored, so chunks do differ.)"""
    decoder = make(VARIANTS[name])
    (prompt,) = texts(5)
    whole = run(decoder, NoCache(decoder.config), [0], [prompt], [0], all_logits=True)
    cache = NaiveCache(decoder.config, 1, 16)
    first = run(decoder, cache, [0], [prompt[:3]], [0], all_logits=True)
    second = run(decoder, cache, [0], [prompt[3:]], [3], all_logits=True)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-5, rtol=1e-5)


def test_logits_only_where_asked():
    decoder = make()
    prompts = texts(3, 5)
    every = run(decoder, NoCache(SMALL), [0, 1], prompts, [0, 0], all_logits=True)
    last = run(decoder, NoCache(SMALL), [0, 1], prompts, [0, 0])
    assert last.shape == (2, 64)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, every[[2, 7]])


def test_hidden_and_logits_are_the_two_halves():
    decoder = make()
    batch, cache = Batch.build([0], texts(4), [0]), NoCache(SMALL)
    cache.prepare(batch)
    hidden = decoder.hidden(batch, cache)
    assert hidden.shape == (4, 32)
    torch.testing.assert_close(decoder.logits(hidden[-1:]), decoder(batch, NoCache(SMALL)))


def test_empty_batch():
    for new in ([], [[]]):
        assert run(make(), NoCache(SMALL), range(len(new)), new, [0] * len(new)).shape == (0, 64)


def test_training_has_a_gradient_everywhere_and_learns():
    decoder = make(replace(SMALL, tie_embeddings=True, qk_norm=True))
    batch = Batch.build(range(4), texts(8, 8, 8, 8), [0] * 4, all_logits=True)
    targets = batch.token_ids.view(4, 8).roll(-1, 1).reshape(-1)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(decoder(batch, NoCache(decoder.config)), targets)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in decoder.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


class Broken(torch.nn.Module):
    def forward(self, *_):
        raise RuntimeError("this layer is broken")


def test_a_failed_pass_is_undone():
    decoder = make()
    cache = NaiveCache(SMALL, 3, 16)
    prompts = texts(4, 3, 2)
    run(decoder, cache, [0, 1], prompts[:2], [0, 0])
    good, decoder.layers[1] = decoder.layers[1], Broken()
    with pytest.raises(RuntimeError, match="broken"):
        run(decoder, cache, [0, 2, 1], [[1, 2], prompts[2], [3]], [4, 0, 3])
    assert [cache.length(i) for i in range(3)] == [4, 3, 0]
    decoder.layers[1] = good
    after = run(decoder, cache, [0, 2, 1], [[1, 2], prompts[2], [3]], [4, 0, 3])
    assert [cache.length(i) for i in range(3)] == [6, 4, 2]
    fresh = run(decoder, NoCache(SMALL), [0, 2, 1], [[*prompts[0], 1, 2], prompts[2], [*prompts[1], 3]], [0, 0, 0])
    torch.testing.assert_close(after, fresh, atol=1e-5, rtol=1e-5)


def test_an_interrupted_pass_is_undone_too():
    decoder = make()
    cache = NaiveCache(SMALL, 1, 16)

    def interrupt(*_):
        raise KeyboardInterrupt

    decoder.layers[0].mlp.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(decoder, cache, [0], [[1, 2]], [0])
    assert cache.length(0) == 0


def test_what_prepare_refuses_changes_nothing():
    decoder = make()
    cache = NaiveCache(SMALL, 1, 16)
    run(decoder, cache, [0], [[1, 2]], [0])
    with pytest.raises(ValueError, match="continues at 1"):
        run(decoder, cache, [0], [[3]], [1])
    assert cache.length(0) == 2


def test_ops_are_used():
    counts = {"norm": 0, "rotate": 0, "swiglu": 0}

    def count(name, fn):
        def counted(*args):
            counts[name] += 1
            return fn(*args)

        return counted

    ops = Ops(count("norm", rms_norm), count("rotate", rotate), count("swiglu", swiglu))
    decoder = make(ops=ops)
    same = make()
    prompt = texts(4)
    assert torch.equal(run(decoder, NoCache(SMALL), [0], prompt, [0]), run(same, NoCache(SMALL), [0], prompt, [0]))
    assert counts == {"norm": 5, "rotate": 4, "swiglu": 2}


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    big = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(RMSNorm(4, 1e-5, Ops()).half()(big), torch.ones(1, 4, dtype=torch.float16))


def test_swiglu_by_hand():
    out = swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
    torch.testing.assert_close(out, torch.tensor([0.0, 2 / (1 + 2.718281828**-1)]))


def test_parameter_names_are_hugging_faces():
    names = set(make(replace(SMALL, num_layers=1)).state_dict())
    assert names == {
        "embed_tokens.weight", "norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight", "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in config.MODELS if name != "deepseek-v3"])
def test_every_published_shape_can_be_built(name):
    decoder = Decoder(config.get(name), device="meta", dtype=torch.bfloat16)
    assert decoder.device.type == "meta"
    assert decoder.dtype == torch.bfloat16
    assert (decoder.lm_head.weight is decoder.embed_tokens.weight) == config.get(name).tie_embeddings


def test_number_of_parameters_of_a_known_model():
    assert sum(p.numel() for p in Decoder(config.get("llama-3-8b"), device="meta").parameters()) == 8_030_261_248


def test_latent_attention_is_refused():
    with pytest.raises(ValueError, match="deepseek-v3"):
        Decoder(config.get("deepseek-v3"), device="meta")


def test_low_precision_stays_close():
    exact, low = make(), make(dtype=torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    prompt = texts(9)
    a, b = run(exact, NoCache(SMALL), [0], prompt, [0]), run(low, NoCache(SMALL), [0], prompt, [0])
    assert b.dtype == torch.float32
    assert 0 < (a - b).abs().max() < 0.05 * a.abs().max()
