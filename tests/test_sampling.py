"""Sampling: the distribution is the one asked for, and a draw depends on (seed, position, purpose) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvlab.sampling import SamplingParams, check_logits, draw, processed_probs, sample, uniform

LAST_UNIFORM = 1 - 2.0**-53


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def transformers_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    from transformers import LogitsProcessorList, generation

    warpers = LogitsProcessorList([generation.TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(generation.MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(logits.shape[0], 1, dtype=torch.long), logits.clone()).softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.5),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=0.7, top_k=7),
        SamplingParams(temperature=0.7, top_k=10_000),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.35),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.8),
        SamplingParams(temperature=1.2, top_k=50, top_p=0.9, min_p=0.05),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_the_distribution_is_that_of_transformers(params):
    logits = random_logits(64, 499)
    ours, theirs = processed_probs(logits, params), transformers_probs(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)


def test_rows_of_a_batch_may_differ_in_every_parameter():
    logits = random_logits(5, 101)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
    ]
    together = processed_probs(logits, params)
    for row, p in enumerate(params):
        torch.testing.assert_close(together[row : row + 1], processed_probs(logits[row : row + 1], p))
    torch.testing.assert_close(together.sum(1), torch.ones(5))


def test_ties_by_hand():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert sample(logits, SamplingParams(), [4]) == [1]  # greedy: the lowest id among equals
    kept = processed_probs(logits, SamplingParams(temperature=1.0, top_k=2))[0]
    torch.testing.assert_close(kept, torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3, 0.0]))  # tied with the second: all stay
    reached = processed_probs(torch.zeros(1, 4), SamplingParams(temperature=1.0, top_p=0.5))[0]
    assert reached.tolist() == [0.5, 0.5, 0.0, 0.0]  # two quarters reach one half: no third
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    nucleus = processed_probs(probs.log(), SamplingParams(temperature=1.0, top_p=0.79))[0]
    torch.testing.assert_close(nucleus, torch.tensor([0.625, 0.375, 0.0]))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45, 5e-324, 1e30, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    logits = random_logits(8, 50, scale=30.0)
    probs = processed_probs(logits, SamplingParams(temperature=temperature))
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(8))
    if temperature <= 1e-6:
        assert torch.equal(probs.argmax(1), logits.argmax(1))


def test_masked_tokens_and_huge_logits():
    logits = torch.tensor([[float("-inf"), 1e38, 1e38, float("-inf")], [-3e38, -3e38, float("-inf"), -3e38]])
    probs = processed_probs(logits, SamplingParams(temperature=1.0))
    torch.testing.assert_close(probs[0], torch.tensor([0.0, 0.5, 0.5, 0.0]))
    torch.testing.assert_close(probs[1], torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The statistic as a number of standard deviations above its mean (Wilson and Hilferty's cube root)."""
    used = probs > 0
    assert counts[~used].sum() == 0
    expected = probs[used] * counts.sum()
    assert expected.min() >= 5
    degrees = int(used.sum()) - 1
    statistic = ((counts[used] - expected) ** 2 / expected).sum().item()
    cube_root, mean = (statistic / degrees) ** (1 / 3), 1 - 2 / (9 * degrees)
    return (cube_root - mean) / math.sqrt(2 / (9 * degrees))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 123456789])
def test_draws_follow_the_distribution(seed):
    count = 20_000
    params = SamplingParams(temperature=1.0, top_k=12, top_p=0.97, seed=seed)
    logits = random_logits(1, 40, seed=3, scale=1.0)
    probs = processed_probs(logits, params)[0].double()
    tokens = torch.tensor(sample(logits.expand(count, -1), params, range(count)))
    assert abs(chi_square(torch.bincount(tokens, minlength=40).double(), probs)) < 4.5


def test_the_statistic_notices_a_small_bias():
    count, probs = 20_000, torch.full((8,), 1 / 8, dtype=torch.float64)
    biased = probs + torch.tensor([0.01, -0.01] * 4)
    tokens = draw(biased[None].expand(count, -1), torch.tensor([uniform(0, p) for p in range(count)]))
    assert chi_square(torch.bincount(tokens, minlength=8).double(), probs) > 4.5


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, LAST_UNIFORM])
def test_the_ends_of_the_unit_interval_give_no_impossible_token(u):
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(400, 37, generator=generator)
    probs[torch.rand(400, 37, generator=generator) < 0.7] = 0.0
    probs[torch.arange(400), torch.randint(37, (400,), generator=generator)] = 1e-12
    probs = probs / probs.sum(1, keepdim=True)
    tokens = draw(probs, torch.full((400,), u, dtype=torch.float64))
    assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    expected = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, LAST_UNIFORM: 4}
    assert {u: draw(probs, torch.tensor([u])).item() for u in expected if u != LAST_UNIFORM} == {
        u: t for u, t in expected.items() if u != LAST_UNIFORM
    }
    assert draw(probs, torch.tensor([LAST_UNIFORM], dtype=torch.float64)).item() == 4


def test_a_request_draws_the_same_alone_and_in_any_batch():
    logits = random_logits(40, 300, seed=5)
    params = [SamplingParams(temperature=0.5 + i / 20, top_p=0.95, top_k=40 + i, seed=i % 3) for i in range(40)]
    positions = [7 * i for i in range(40)]
    together = sample(logits, params, positions)
    alone = [sample(logits[i : i + 1], params[i], [positions[i]])[0] for i in range(40)]
    order = list(reversed(range(40)))
    backwards = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert together == alone == backwards[::-1]
    assert together == sample(logits, params, positions)  # nothing was consumed
    assert torch.equal(logits, random_logits(40, 300, seed=5))  # nothing was changed


def test_seed_position_and_purpose_each_matter():
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0, seed=1)
    base = sample(logits, params, [10])
    assert sample(logits, params, [11]) != base
    assert sample(logits, SamplingParams(temperature=1.0, seed=2), [10]) != base
    assert sample(logits, params, [10], purpose="accept") != base


def test_uniform_is_a_hash_with_known_range_and_resolution():
    values = [uniform(s, p) for s in (0, 1, -1, 2**64 - 1) for p in range(500)]
    assert all(0 <= v < 1 and (v * 2**53).is_integer() for v in values)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)  # a seed is 64 bits
    assert uniform(5, 3) == uniform(5, 3, "sample")


def test_uniform_is_uniform():
    for seed in range(3):
        values = torch.tensor([uniform(seed, p) for p in range(20_000)], dtype=torch.float64)
        counts = torch.histc(values, bins=50, min=0, max=1)
        assert abs(chi_square(counts, torch.full((50,), 1 / 50, dtype=torch.float64))) < 4.5
        low = (values * 2**53).long() % 64  # the low bits too
        assert abs(chi_square(torch.bincount(low, minlength=64).double(), torch.full((64,), 1 / 64).double())) < 4.5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda p: uniform(0, p, "sample"), lambda p: uniform(0, p, "accept")),
        (lambda p: uniform(0, p), lambda p: uniform(1, p)),
        (lambda p: uniform(0, p), lambda p: uniform(0, p + 1)),
        (lambda p: uniform(p, 0), lambda p: uniform(p, 1)),
        (lambda p: uniform(p, p), lambda p: uniform(p + 1, p)),
    ],
    ids=["purposes", "seeds", "neighbours", "seeds at two positions", "diagonal"],
)
def test_draws_for_different_ends_are_independent(first, second):
    count = 20_000
    pairs = [int(first(p) * 8) * 8 + int(second(p) * 8) for p in range(count)]
    counts = torch.bincount(torch.tensor(pairs), minlength=64).double()
    assert abs(chi_square(counts, torch.full((64,), 1 / 64, dtype=torch.float64))) < 4.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused_and_located(bad, temperature):
    logits = random_logits(3, 20)
    logits[1, 7] = bad
    with pytest.raises(ValueError, match="row 1, position 22"):
        sample(logits, SamplingParams(temperature=temperature), [21, 22, 23])
    with pytest.raises(ValueError, match="request b"):
        check_logits(logits, ["request a", "request b", "request c"])


def test_a_row_that_allows_no_token_is_refused():
    logits = torch.zeros(2, 4)
    logits[0] = float("-inf")
    with pytest.raises(ValueError, match="row 0"):
        sample(logits, SamplingParams(temperature=1.0), [0, 0])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), "1", True, None]),
        ("top_k", [-1, 2.5, True]),
        ("top_p", [0.0, -1.0, 1.01, float("nan")]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("max_tokens", [-1, 1.5, True]),
        ("seed", [0.5, "a", True, 2**64, -(2**63) - 1]),
        ("stop_token_ids", ["ab", (1.5,), (-1,), 5, None, (True,)]),
    ],
)
def test_parameters_out_of_range_are_named(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


def test_lengths_that_disagree_are_refused():
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="positions has 2"):
        sample(logits, SamplingParams(), [0, 1])
    with pytest.raises(ValueError, match="params has 2"):
        processed_probs(logits, [SamplingParams(temperature=1.0)] * 2)
    with pytest.raises(ValueError, match="params has 2"):
        sample(logits, [SamplingParams()] * 2, [0, 1, 2])
    with pytest.raises(ValueError, match="params has 2"):
        sample(logits, [SamplingParams(temperature=1.0)] * 2, [0, 1, 2])
    with pytest.raises(ValueError, match="labels"):
        sample(logits, SamplingParams(), [0, 1, 2], labels=["a"])
    assert sample(torch.zeros(0, 4), [], []) == []
    with pytest.raises(ValueError, match="positions has 1"):
        sample(torch.zeros(0, 4), SamplingParams(), [3])


def test_integers_of_other_kinds_are_taken():
    params = SamplingParams(top_k=np.int64(3), seed=np.int64(7), max_tokens=np.int64(2), stop_token_ids=np.array([1]))
    assert params == SamplingParams(top_k=3, seed=7, max_tokens=2, stop_token_ids=(1,))
    assert {type(x) for x in (params.top_k, params.seed, params.max_tokens, *params.stop_token_ids)} == {int}
    logits, params = random_logits(6, 50, scale=1.0), SamplingParams(temperature=1.0, seed=7)
    for positions in (torch.arange(6), np.arange(6), list(torch.arange(6))):
        assert sample(logits, params, positions) == sample(logits, params, range(6))
    assert uniform(torch.tensor(7), np.int64(3)) == uniform(7, 3)
    for wrong in (1.5, True):
        with pytest.raises(ValueError, match="position"):
            uniform(0, wrong)
        with pytest.raises(ValueError, match=r"positions\[0\]"):
            sample(logits[:1], params, [wrong])


def test_params_of_another_type_are_refused():
    for wrong in (5, None, [5], "a"):
        with pytest.raises(ValueError, match="params holds"):
            sample(torch.zeros(1, 4), wrong, [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float64_logits_beyond_float32(temperature):
    logits = torch.tensor([[1e39, 0.0], [-1e300, 1e300]], dtype=torch.float64)
    params = SamplingParams(temperature=temperature)
    assert sample(logits, params, [0, 0]) == [0, 1]
    assert processed_probs(logits, params).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("row", [[math.nan, 0.0], [-math.inf] * 2, [math.inf, 0.0]])
def test_no_distribution_of_broken_logits(row):
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(ValueError, match="row 1"):
            processed_probs(torch.tensor([[0.0, 1.0], row]), params)


def test_logits_without_rows_or_tokens():
    assert processed_probs(torch.empty(0, 4), SamplingParams(temperature=1.0)).shape == (0, 4)
    for shape in ((2, 0), (4,)):
        with pytest.raises(ValueError, match="logits have shape"):
            processed_probs(torch.zeros(shape), SamplingParams())
        with pytest.raises(ValueError, match="logits have shape"):
            sample(torch.zeros(shape), SamplingParams(), range(shape[0]))
    for wrong in ([[0.0, 1.0]], torch.tensor(0.0)):
        with pytest.raises(ValueError, match="logits have shape"):
            sample(wrong, SamplingParams(), [0])


@pytest.mark.parametrize("row", [[math.nan, 1.0], [0.0, 0.0], [math.inf, 1.0], [-0.5, 1.5]])
def test_no_draw_from_what_is_no_distribution(row):
    with pytest.raises(ValueError, match=r"probs\[1\]"):
        draw(torch.tensor([[0.5, 0.5], row]), torch.tensor([0.3, 0.3]))


@pytest.mark.parametrize("uniforms", [[0.5], [0.5, 1.0], [0.5, math.nan], [-0.1, 0.5]])
def test_no_draw_with_wrong_uniforms(uniforms):
    with pytest.raises(ValueError, match="uniforms"):
        draw(torch.full((2, 2), 0.5), torch.tensor(uniforms))
