"""Fused pointwise operations against the plain ones, and merged projections."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kvlab import checkpoint, fused, model, rope, runtime, testing
from kvlab.batch import Batch
from kvlab.cache import NoCache
from kvlab.config import ModelConfig
from kvlab.model import Decoder

ON = runtime.device()
launched = pytest.mark.skipif(not runtime.can_launch(ON), reason="kernels cannot be launched here")
KINDS = [torch.float32, torch.float16] + ([torch.bfloat16] if ON.type == "cuda" else [])
SMALL = ModelConfig(
    name="small", hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=40,
    vocab_size=50, max_seq_len=64,
)  # fmt: skip


def counting(name):
    before = runtime.launches[name]

    def check():
        assert runtime.launches[name] == before + 1

    return check


@launched
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 7, 80), (1, 1), (2, 4100)], ids=str)
def test_rms_norm(shape, dtype):
    x = (3 * torch.randn(shape, device=ON)).to(dtype)
    weight = torch.randn(shape[-1:], device=ON).to(dtype)
    check = counting("rms_norm_kernel")
    out = fused.rms_norm(x, weight, 1e-5, impl="triton")
    check()
    wide = x.double()
    want = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert out.dtype == dtype
    testing.assert_close(out, want, model.rms_norm(x, weight, 1e-5))


@launched
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("total", "heads", "size"), [(1, 1, 2), (3, 8, 64), (7, 5, 80), (2, 33, 128)])
def test_rotate(total, heads, size, dtype):
    x = torch.randn(total, heads, size, device=ON).to(dtype)
    angles = 100 * torch.rand(total, size, device=ON)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    check = counting("rotate_kernel")
    out = fused.rotate(x, cos, sin, impl="triton")
    check()
    testing.assert_close(out, rope.rotate(x.double(), cos.double(), sin.double()), rope.rotate(x, cos, sin))


@launched
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 1030), (2, 3, 7)], ids=str)
def test_swiglu(shape, dtype):
    gate, up = (5 * torch.randn(shape, device=ON)).to(dtype), torch.randn(shape, device=ON).to(dtype)
    check = counting("swiglu_kernel")
    out = fused.swiglu(gate, up, impl="triton")
    check()
    wide = gate.double()
    testing.assert_close(out, wide / (1 + (-wide).exp()) * up.double(), model.swiglu(gate, up))


@launched
def test_operands_that_are_parts_of_a_merged_projection():
    """Rows apart from each other, as the split of one product leaves them; and extremes of the exponential."""
    whole = torch.randn(4, 3 * 64, device=ON)
    whole[0, :3] = torch.tensor([-1e4, 1e4, 0.0], device=ON)
    gate, up = whole[:, :64], whole[:, 64:128]
    torch.testing.assert_close(fused.swiglu(gate, up, impl="triton"), model.swiglu(gate, up))
    x = whole[:, 64:].unflatten(1, (8, 16))
    cos, sin = torch.randn(2, 4, 16, device=ON)
    torch.testing.assert_close(fused.rotate(x, cos, sin, impl="triton"), rope.rotate(x, cos, sin))
    weight = torch.randn(16, device=ON)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5, impl="triton"), model.rms_norm(x, weight, 1e-5))
    turned = torch.randn(16, 8, 4, device=ON).permute(2, 1, 0)
    torch.testing.assert_close(fused.rotate(turned, cos, sin, impl="triton"), rope.rotate(turned, cos, sin))


@launched
def test_nothing_is_nothing():
    none = torch.empty(0, 16, device=ON)
    assert fused.rms_norm(none, torch.ones(16, device=ON), 1e-5, impl="triton").shape == (0, 16)
    assert fused.swiglu(none, none, impl="triton").shape == (0, 16)
    assert fused.rotate(none.view(0, 1, 16), none, none, impl="triton").shape == (0, 1, 16)
    assert fused.rms_norm(torch.empty(3, 0, device=ON), torch.empty(0, device=ON), 1e-5, impl="triton").shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fused.rms_norm(x, torch.ones(5, device=ON), 1e-5), "weight is of shape"),
        (lambda x: fused.rms_norm(x, torch.ones(4, device=ON).double(), 1e-5), "weight is torch.float64"),
        (lambda x: fused.rms_norm(x.int(), torch.ones(4, device=ON), 1e-5), "x is torch.int32"),
        (lambda x: fused.rms_norm([1.0], torch.ones(4, device=ON), 1e-5), "x is a list"),
        (lambda x: fused.rotate(x, x, x), "x is of shape"),
        (lambda x: fused.rotate(torch.ones(2, 1, 3, device=ON), x, x), "an even D"),
        (lambda x: fused.rotate(x.view(2, 1, 4), x[:1], x), "cos is of shape"),
        (lambda x: fused.swiglu(x, x[:1]), "up is of shape"),
        (lambda x: fused.swiglu(x, x.half()), "up is torch.float16"),
        (lambda x: fused.swiglu(x, x, impl="cuda"), "impl is 'cuda'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4, device=ON))


@launched
def test_gradients_are_refused_by_the_kernels_alone():
    x = torch.ones(2, 4, device=ON, requires_grad=True)
    with pytest.raises(ValueError, match="requires grad"):
        fused.swiglu(x, x, impl="triton")
    fused.swiglu(x, x, impl="torch").sum().backward()
    assert x.grad is not None


BUGS = {
    "rms_norm": {
        "sum and no mean": ("/ size + eps", "+ eps"),
        "the width and not the size": ("0) / size", "0) / WIDTH"),
        "no eps": ("/ size + eps)", "/ size)"),
        "no weight": ("unit * load_rows(weight_ptr, i, i < size).to(tl.float32)", "unit"),
        "the first row for all": ("row * x_row + i", "i"),
    },
    "rotate": {
        "turned the other way": ("first * cos - second * sin", "first * cos + second * sin"),
        "the first half's angles for both": ("second * cos_2 + first * sin_2", "second * cos + first * sin"),
        "the first token's angles": ("angle = token * 2 * HALF + i", "angle = i"),
        "neighbours turned": ("load_rows(x_ptr, at + HALF, there)", "load_rows(x_ptr, at + 1, there)"),
    },
    "swiglu": {
        "a sigmoid": ("gate * sigmoid", "sigmoid"),
        "the sign": ("gate < 0", "gate > 0"),
        "no up": ("sigmoid * up", "sigmoid"),
        "one row's step for both": ("row * up_row", "row * gate_row"),
    },
}  # fmt: skip


def holds_rms_norm(rms_norm):
    x, weight = torch.randn(3, 40, device=ON), torch.randn(40, device=ON)
    x[1] *= 1e-3
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, impl="triton"), model.rms_norm(x, weight, 1e-5))


def holds_rotate(rotate):
    x, (cos, sin) = torch.randn(3, 5, 16, device=ON), torch.randn(2, 3, 16, device=ON)
    torch.testing.assert_close(rotate(x, cos, sin, impl="triton"), rope.rotate(x, cos, sin))


def holds_swiglu(swiglu):
    whole = torch.randn(3, 100, device=ON)
    gate, up = whole[:, :40].contiguous(), whole[:, 40:80]  # the wrong step stays inside
    torch.testing.assert_close(swiglu(gate, up, impl="triton"), model.swiglu(gate, up))


@launched
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name):
    check = {"rms_norm": holds_rms_norm, "rotate": holds_rotate, "swiglu": holds_swiglu}[name]
    testing.assert_caught(check, getattr(fused, f"{name}_kernel"), BUGS[name], give=name)


# --- in the decoder --------------------------------------------------------------------------------------------------


def small(**options):
    torch.manual_seed(0)
    decoder = Decoder(replace(SMALL, **options), fused.OPS, device=ON)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return decoder


def logits(decoder):
    batch = Batch.build([0, 1], [[1, 2, 3], [4]], [0, 0], device=decoder.device, all_logits=True)
    return decoder(batch, NoCache(decoder.config))


BIASED = {"attention_bias": True, "mlp_bias": True, "qk_norm": True}


@pytest.mark.parametrize("options", [{}, BIASED], ids=["plain", "biases and norms"])
def test_a_decoder_with_fused_operations_and_merged_projections_gives_the_same(options):
    plain = Decoder(replace(SMALL, **options), device=ON)
    decoder = small(**options)
    plain.load_state_dict(decoder.state_dict())
    with torch.inference_mode():
        want = logits(plain)
        torch.testing.assert_close(logits(decoder), want)
        assert decoder.merge_projections() is decoder
        torch.testing.assert_close(logits(decoder), want)
    assert decoder.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("options", [{}, BIASED], ids=["plain", "biases and norms"])
def test_merged_projections_are_one_product(options, monkeypatch):
    decoder, shapes = small(**options).merge_projections(), []
    linear = torch.nn.functional.linear

    def watched(x, weight, bias=None):
        shapes.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    with torch.inference_mode():
        logits(decoder)
    assert shapes.count((80, 48)) == 2 * 2, "q, k and v, or gate and up, are not one product"
    assert shapes.count((48, 48)) == 2, "the output's projection alone"


def test_a_replaced_projection_is_asked():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    decoder = small().merge_projections()
    attention = decoder.layers[0].self_attn
    doubled = Doubled(48, 16, bias=False, device=ON)
    doubled.weight = attention.v_proj.weight  # it lies where it lay
    attention.v_proj = doubled
    x = torch.randn(3, 48, device=ON)
    with torch.inference_mode():
        _, _, v = model.project(x, attention.q_proj, attention.k_proj, attention.v_proj)
        torch.testing.assert_close(v, 2 * torch.nn.functional.linear(x, doubled.weight))


def test_merged_projections_train_load_and_save_as_before(tmp_path):
    torch.manual_seed(0)
    plain, decoder = Decoder(SMALL, device=ON), Decoder(SMALL, device=ON).merge_projections()
    other = {name: torch.randn_like(x) for name, x in plain.state_dict().items()}
    for each in (plain, decoder):
        each.load_state_dict(other)
        logits(each).square().mean().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for (name, x), y in zip(plain.named_parameters(), decoder.parameters(), strict=True):
        torch.testing.assert_close(y.grad, x.grad, msg=name)
    with torch.inference_mode():
        want = logits(plain)
        torch.testing.assert_close(logits(decoder), want)
        torch.testing.assert_close(logits(copy.deepcopy(decoder)), want)
        torch.testing.assert_close(logits(decoder.double().float()), want)
    decoder.merge_projections()
    checkpoint.save(decoder, tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(logits(checkpoint.load(tmp_path, device=ON)), want)
