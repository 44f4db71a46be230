"""Traffic: counted as a pencil counts it, on tensors with and without numbers, and in an interpreted kernel."""

from __future__ import annotations

import pytest
import torch

from kvlab import runtime, traffic
from kvlab.runtime import dot, tl, triton


def materialised(q, k, v):
    scores = (q * q.shape[-1] ** -0.5) @ k.T
    return torch.softmax(scores, dim=-1) @ v


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("L", "D"), [(1, 1), (7, 3), (64, 16)])
def test_attention_with_all_scores_in_memory(device, L, D):
    seen = traffic.operators(materialised, *torch.randn(3, L, D, device=device))
    # scaling q; scores from q and k; the softmax of them; the result from weights and v: each reads, and writes
    assert seen.moved == 4 * (2 * L * D + (2 * L * D + L * L) + 2 * L * L + (L * L + 2 * L * D))
    assert seen.peak == 4 * (2 * L * L + L * D)  # scores, weights and the result
    assert seen.alive == 0


def test_views_and_fresh_memory_move_nothing_and_in_place_operators_hold_nothing():
    x = torch.ones(8, 4)
    assert traffic.operators(lambda: x.T[1:].reshape(-1, 8)[:, None]).moved == 0
    fresh = traffic.operators(lambda: (torch.empty(100), torch.empty_like(x)))
    assert (fresh.moved, fresh.peak) == (0, 4 * 132)
    inplace = traffic.operators(lambda: x.mul_(2.0))
    assert (inplace.moved, inplace.peak) == (2 * x.nbytes, 0)
    part = traffic.operators(lambda: x[2:4].add(1.0))
    assert (part.moved, part.peak) == (4 * 4 * 4, 2 * 4 * 4)


def test_an_operator_with_two_results_counts_both():
    x = torch.randn(5, 3)
    seen = traffic.operators(lambda: torch.max(x, dim=1))
    assert (seen.moved, seen.peak) == (15 * 4 + 5 * 4 + 5 * 8, 5 * 4 + 5 * 8)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, rows, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m < rows)[:, None], other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], dot(a, b, tl.zeros([M, N], tl.float32)), mask=(m < rows)[:, None])


@pytest.mark.skipif(not runtime.INTERPRET, reason="kernels are not interpreted here")
def test_a_kernel_is_counted_lane_by_lane():
    a, b, out = torch.randn(5, 16), torch.randn(16, 32), torch.empty(5, 32)
    found = traffic.kernels(lambda: product[(3,)](a, b, out, 5, M=16, K=16, N=32))
    assert found == (3 * 4 * (5 * 16 + 16 * 32), 3 * 2 * 16 * 16 * 32)
    torch.testing.assert_close(out, a @ b)
    assert traffic.kernels(lambda: None) == (0, 0)


def test_compiled_kernels_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", False)
    with pytest.raises(RuntimeError, match="interpreted"):
        traffic.kernels(lambda: None)


def test_a_view_that_repeats_elements_is_read_once():
    x = torch.ones(8, 1, 4)
    repeated = traffic.operators(lambda: x.expand(-1, 5, -1).reshape(40, 4))  # a copy, under a view of another name
    assert (repeated.moved, repeated.peak) == (6 * x.nbytes, 5 * x.nbytes)
    product = traffic.operators(lambda: torch.ones(2, 3, 1, 4, device="meta") @ torch.ones(2, 3, 4, 5, device="meta"))
    assert product.moved == 4 * (24 + 120 + (24 + 120 + 30))
