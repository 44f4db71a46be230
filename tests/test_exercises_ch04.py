"""Chapter 04's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import functools
from collections import namedtuple

import exercising
import numpy as np
import pytest
import torch
from faulty import Faulty

from kvlab import exercises, reference, runtime
from kvlab.exercises import ExerciseError, ch04
from kvlab.flash_decoding import merge_states
from kvlab.runtime import tl, triton

INF = float("inf")
IDS = ["04.1", "04.2", "04.3", "04.4", "04.5"]
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


# --- 04.1 ---


def decode_bytes(lengths, splits, H, H_kv, D, q_len):
    left = sum(min(splits, n) for n in lengths if min(splits, n) > 1)
    return 4 * sum(lengths) * H_kv * D, 8 * left * H * q_len * (D + 2)


def bytes_sequence_by_sequence(lengths, splits, H, H_kv, D, q_len):
    """Each tensor by itself, in floats."""
    kv = partial = 0.0
    for n in lengths:
        kv += 2 * n * H_kv * D * 2
        parts = splits if splits < n else n
        sums, stats = parts * H * q_len * D * 4, 2 * parts * H * q_len * 4
        partial += 2 * (sums + stats) if parts >= 2 else 0
    return [np.float64(kv), torch.tensor(partial, dtype=torch.float64)]


def bytes_off(**options):
    return lambda *case: (ch04._kv(*case), ch04._partial(*case, **options))


# --- 04.2 ---


def merge_parts(outs, lses):
    return merge_states(outs, lses, impl="torch")


Merged = namedtuple("Merged", "out lse")


def merge_one_by_one(outs, lses):
    """Another way to write it: row by row in NumPy, two states at a time from the last."""
    rows, size = outs.shape[1:]
    out, total = np.zeros((rows, size)), np.full(rows, -np.inf)
    for r in range(rows):
        for s in reversed(range(len(outs))):
            lse = float(lses[s, r])
            if lse == -np.inf:
                continue
            both = np.logaddexp(total[r], lse)
            out[r] = out[r] * np.exp(total[r] - both) + outs[s, r].double().numpy() * np.exp(lse - both)
            total[r] = both
    return Merged(torch.from_numpy(out).float(), torch.from_numpy(total).float())


def faulty_merge(fault):
    def merge(outs, lses):
        peak = lses.amax(0)
        safe = torch.where(peak == -INF, 0.0, peak) if fault != "NaN in empty rows" else peak
        if fault == "no maximum":
            safe = torch.zeros_like(peak)
        if fault == "first as base":
            safe = torch.where(lses[0] == -INF, 0.0, lses[0])
        exp = torch.exp2 if fault == "base 2" else torch.exp
        weights = exp(lses - safe)
        if fault == "alike":
            weights = (lses > -INF).float()
        if fault == "by lse":
            weights = (lses - safe).clamp(min=-50) + 51
        total = weights.sum(0)
        if fault != "lets NaN through":
            outs = outs.masked_fill((lses == -INF)[..., None], 0.0)
        out = (weights[..., None] * outs).sum(0)
        if fault != "no division":
            out = out / (total if fault == "divides by 0" else torch.where(total == 0, 1.0, total))[:, None]
        lse = safe + (total.log2() if fault == "lse in base 2" else total.log())
        if fault == "lse of empty rows":
            lse = lse.nan_to_num(neginf=0.0)
        if fault == "lse is the peak":
            lse = peak
        return (out, lse) if fault != "lse first" else (lse, out)

    merge.__name__ = fault
    return merge


MERGE_FAULTS = [
    "NaN in empty rows", "no maximum", "first as base", "base 2", "alike", "by lse", "lets NaN through", "no division",
    "divides by 0", "lse in base 2", "lse of empty rows", "lse is the peak", "lse first",
]  # fmt: skip


# --- 04.3 ---


def deal_fairly(lengths, programs, N):
    chunk = max(1, -(-sum(-(-n // N) for n in lengths) // programs)) * N
    return [(s, a, min(a + chunk, n)) for s, n in enumerate(lengths) for a in range(0, n, chunk)]


def deal_evenly(lengths, programs, N):
    """Another way: as many chunks, of tiles shared as evenly as they can be, the last sequence first."""
    tiles = [-(-n // N) for n in lengths]
    chunk, found = max(1, -(-sum(tiles) // programs)), []
    for s in reversed(range(len(lengths))):
        count = -(-tiles[s] // chunk)
        cuts = [tiles[s] * i // count * N for i in range(count)] if count else []
        found += [[s, np.int64(a), min(b, lengths[s])] for a, b in zip(cuts, [*cuts[1:], lengths[s]], strict=False)]
    return found


def dealt_with(change):
    def deal(lengths, programs, N):
        return change(deal_fairly(lengths, programs, N), lengths, programs, N)

    return deal


def key_by_key(lengths, programs, N):
    return [(s, i, i + 1) for s, n in enumerate(lengths) for i in range(n)]


def tile_by_tile(lengths, programs, N):
    return [(s, a, min(a + N, n)) for s, n in enumerate(lengths) for a in range(0, n, N)]


def equal_splits(lengths, programs, N):
    """The same number of splits for every sequence."""
    each = max(1, programs // max(1, len(lengths)))
    found = []
    for s, n in enumerate(lengths):
        tiles = -(-n // N)
        size = max(1, -(-tiles // each)) * N
        found += [(s, a, min(a + size, n)) for a in range(0, n, size)]
    return found


# --- 04.4 ---


@triton.jit
def merge_kernel(part_ptr, lse_ptr, out_ptr, splits, rows, D: tl.constexpr, R: tl.constexpr):
    row, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    live = row < rows
    m, l, acc = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, D], tl.float32)
    for s in range(0, splits):
        lse = tl.load(lse_ptr + s * rows + row, mask=live, other=float("-inf"))
        part = tl.load(part_ptr + (s * rows + row)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        part = tl.where((lse == float("-inf"))[:, None], 0.0, part)
        new = tl.maximum(m, lse)
        safe = tl.where(new == float("-inf"), 0.0, new)
        acc = acc * tl.exp(m - safe)[:, None] + part * tl.exp(lse - safe)[:, None]
        l = l * tl.exp(m - safe) + tl.exp(lse - safe)
        m = new
    tl.store(out_ptr + row[:, None] * D + d[None, :], acc / tl.where(l == 0.0, 1.0, l)[:, None], mask=live[:, None])


@triton.jit
def two_pass_kernel(part_ptr, lse_ptr, out_ptr, splits, rows, D: tl.constexpr, R: tl.constexpr):
    """Another way to write it: the maximum first, then the sums, from the last split to the first, row by row of R."""
    for i in range(0, R):
        row, d = tl.program_id(0) * R + i, tl.arange(0, D)
        if row < rows:
            m, l, acc = float("-inf"), 0.0, tl.zeros([D], tl.float32)
            for s in range(0, splits):
                m = tl.maximum(m, tl.load(lse_ptr + s * rows + row))
            for s in range(0, splits):
                at = (splits - 1 - s) * rows + row
                lse = tl.load(lse_ptr + at)
                if lse > float("-inf"):
                    w = tl.exp(lse - m)
                    l += w
                    acc += w * tl.load(part_ptr + at * D + d)
            if l > 0.0:
                acc = acc / l
            tl.store(out_ptr + row * D + d, acc)


@triton.jit
def faulty_kernel(
    part_ptr, lse_ptr, out_ptr, splits, rows, D: tl.constexpr, R: tl.constexpr, FAULT: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    live = row < rows
    if FAULT == "reads past the end":
        live = row < rows + 1
    m, l, acc = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, D], tl.float32)
    if FAULT == "floor":
        m = tl.full([R], -1e4, tl.float32)
    first = 0
    if FAULT == "first split left out":
        first = 1
    for s in range(first, splits):
        lse = tl.load(lse_ptr + s * rows + row, mask=live, other=float("-inf"))
        part = tl.load(part_ptr + (s * rows + row)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        if FAULT != "lets NaN through":
            part = tl.where((lse == float("-inf"))[:, None], 0.0, part)
        new = tl.maximum(m, lse)
        safe = tl.where(new == float("-inf"), 0.0, new)
        if FAULT == "NaN in empty rows":
            safe = new
        if FAULT == "no maximum":
            safe = tl.zeros([R], tl.float32)
        weight, shrink = tl.exp(lse - safe), tl.exp(m - safe)
        if FAULT == "base 2":
            weight, shrink = tl.exp2(lse - safe), tl.exp2(m - safe)
        if FAULT == "alike":
            weight, shrink = tl.where(lse == float("-inf"), 0.0, 1.0), tl.full([R], 1.0, tl.float32)
        if FAULT == "acc not rescaled":
            acc = acc + part * weight[:, None]
        else:
            acc = acc * shrink[:, None] + part * weight[:, None]
        if FAULT == "l not rescaled":
            l = l + weight
        else:
            l = l * shrink + weight
        m = new
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if FAULT == "divides by 0":
        out = acc / l[:, None]
    if FAULT == "no division":
        out = acc
    store = (row < rows)[:, None]
    if FAULT == "writes past the end":
        store = (row < rows + 1)[:, None]
    if FAULT == "skips empty rows":
        store = store & (l > 0.0)[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=store)
    if FAULT == "writes to part":
        tl.store(part_ptr + row[:, None] * D + d[None, :], out, mask=(row < rows)[:, None])


@triton.jit
def stub_kernel(part_ptr, lse_ptr, out_ptr, splits, rows, D: tl.constexpr, R: tl.constexpr):
    return


@triton.jit
def kernel_of_other_arguments(part_ptr, out_ptr, D: tl.constexpr):
    tl.store(out_ptr, tl.load(part_ptr))


faulty = functools.partial(Faulty, faulty_kernel)
FAULTS = [
    "reads past the end", "floor", "first split left out", "lets NaN through", "NaN in empty rows", "no maximum",
    "base 2", "alike", "acc not rescaled", "l not rescaled", "divides by 0", "no division", "writes past the end",
    "skips empty rows", "writes to part",
]  # fmt: skip


def only_out(merge):
    return lambda outs, lses: merge(outs, lses)[0]


# --- 04.5 ---

RANDOM = torch.randn(4), torch.randn(7, 4), torch.randn(7, 4)
EVEN = *(x[:6] if x.ndim > 1 else x for x in RANDOM), 3
TAIL = *RANDOM, 2
STEEP = torch.ones(4), torch.linspace(-400, 400, 8)[:, None] * torch.ones(4), torch.randn(8, 4), 4
WIDE = torch.ones(1).double(), torch.tensor([[0.0], [2e3]]).double(), torch.randn(2, 1).double(), 2
LONG = torch.randn(3).double(), torch.randn(100, 3).double(), torch.randn(100, 3).double(), 7
BOTH = torch.ones(4), torch.linspace(-400, 400, 9)[:, None] * torch.ones(4), torch.randn(9, 4), 4
FOUND = {"one": ("tail", TAIL), "two": ("base", STEEP)}

RIGHT = {
    "04.1": [decode_bytes, bytes_sequence_by_sequence],
    "04.2": [merge_parts, merge_one_by_one],
    "04.3": [deal_fairly, deal_evenly],
    "04.4": [merge_kernel, two_pass_kernel],
    "04.5": [FOUND, {"two": ["base", WIDE], "one": ("tail", LONG)}],
}
WRONG = {
    "04.1": [
        bytes_off(each=4), bytes_off(beside=0), bytes_off(beside=1), bytes_off(cap=False), bytes_off(alone=True),
        lambda n, s, H, H_kv, D, q: decode_bytes(n, s, H, H, D, q), lambda *c: [2 * x for x in decode_bytes(*c)],
        lambda n, s, H, H_kv, D, q: decode_bytes(n, s, H_kv, H_kv, D, q), lambda *c: [x / 2 for x in decode_bytes(*c)],
        lambda n, s, H, H_kv, D, q: decode_bytes(n, s, H, H_kv, D, 1), lambda *c: decode_bytes(*c)[::-1],
        lambda *c: decode_bytes(*c)[0], lambda *_: None, lambda *_: 1 / 0, lambda *_: (float("nan"), 0),
    ],
    "04.2": [*map(faulty_merge, MERGE_FAULTS), lambda *_: None, lambda *_: 1 / 0, lambda outs, lses: (outs, lses)],
    "04.3": [
        equal_splits, dealt_with(lambda found, *_: found[:-1]), dealt_with(lambda found, *_: found + found[:1]),
        dealt_with(lambda found, lengths, *_: [(s, 0, n) for s, n in enumerate(lengths)]),
        dealt_with(lambda found, lengths, *_: [(s, 0, n) for s, n in enumerate(lengths) if n]),
        key_by_key, tile_by_tile,
        dealt_with(lambda found, *_: [(s, a + (a > 0), b) for s, a, b in found]),
        dealt_with(lambda found, *_: [(s, float(a), b) for s, a, b in found]),
        dealt_with(lambda found, *_: [(s, a) for s, a, _ in found]), dealt_with(lambda found, *_: len(found)),
        dealt_with(lambda found, *_: [(s + 1, a, b) for s, a, b in found]), lambda *_: None, lambda *_: 1 / 0,
    ],
    "04.4": [*map(faulty, FAULTS), stub_kernel, kernel_of_other_arguments, stub_kernel.fn, only_out(merge_parts)],
    "04.5": [
        {}, {"one": FOUND["one"]}, {"two": FOUND["two"]}, {**FOUND, "three": ("alike", TAIL)},
        {**FOUND, "four": ("tail", TAIL)}, {"one": ("twice", TAIL), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("empty", STEEP)}, {"one": ("tail", EVEN), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("base", EVEN)}, {"one": ("something", TAIL), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("base", BOTH)}, {"one": TAIL, "two": STEEP},
        {"one": ("tail", TAIL[:3]), "two": FOUND["two"]}, {"one": ("tail", (*RANDOM, 0)), "two": FOUND["two"]},
        {"one": ("tail", (*RANDOM, 2.0)), "two": FOUND["two"]},
        {"one": ("tail", (RANDOM[0].half(), *RANDOM[1:], 2)), "two": FOUND["two"]},
        {"one": ("tail", (RANDOM[0][:3], *RANDOM[1:], 2)), "two": FOUND["two"]},
        {"one": ("tail", (RANDOM[0], RANDOM[1].log(), RANDOM[2], 2)), "two": FOUND["two"]},
        {"one": ("tail", (*RANDOM[:2], torch.zeros(7, 4), 2)), "two": FOUND["two"]},
        {"one": ("tail", (1e8 * RANDOM[0], *RANDOM[1:], 2)), "two": FOUND["two"]},
    ],
}  # fmt: skip


class TestAnswers(exercising.Answers):
    RIGHT, WRONG = RIGHT, WRONG
    KERNEL, UNTRACED = "04.4", FAULTS.index("reads past the end")


@pytest.mark.parametrize("name", ["04.1", "04.2", "04.3"])
def test_a_function_that_is_a_stub_is_no_error(name: str) -> None:
    assert exercises.outcome(name, lambda *_: ...) == "not yet"


def test_an_answer_with_a_stub_in_it_is_no_error() -> None:
    assert exercises.outcome("04.5", {"one": ("tail", ...)}) == "not yet"


def test_where_nothing_can_be_launched_a_torch_function_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: False)
    assert exercises.outcome("04.4", merge_kernel) == "not yet"
    assert "04.4: skipped" in capsys.readouterr().out
    assert exercises.outcome("04.4", lambda *_: ...) == "not yet"
    assert exercises.outcome("04.4", only_out(merge_parts)) == "right"
    assert exercises.outcome("04.4", only_out(merge_one_by_one)) == "right"
    of_out = [f for f in MERGE_FAULTS if not f.startswith("lse")]
    exercises.assert_refuses(
        "04.4", [*(only_out(faulty_merge(f)) for f in of_out), merge_parts, *exercising.NOT_ANSWERS]
    )


def test_the_versions_fail_only_where_the_exercise_says_so() -> None:
    """Two faults that random numbers in equal parts do not show, and a version that only looks wrong."""
    for length, S in [(8, 1), (8, 4), (9, 3), (64, 16), (5, 5), (3, 7), (1, 9)]:
        q, k, v = torch.randn(4), torch.randn(length, 4), torch.randn(length, 4)
        expected = reference.attend_one(q[None, None], k[:, None], v[:, None])[0][0, 0]
        for name, version in ch04._VERSIONS.items():
            assert torch.allclose(version(q, k, v, S).double(), expected, atol=1e-5), name
    for _ in range(200):
        length, S, size = (int(torch.randint(1, 20, ())) for _ in range(3))
        far = float(10 ** torch.empty(()).uniform_(-1, 2.2))
        q, k, v = far * torch.randn(size).double(), far * torch.randn(length, size).double(), torch.randn(length, size)
        expected = reference.attend_one(q[None, None], k[:, None], v.double()[:, None])[0][0, 0]
        assert torch.allclose(ch04.decode_three(q, k, v.double(), S), expected, atol=1e-8)


@needs_triton
def test_a_wrong_kernel_is_caught_where_accesses_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. The tensors stand within larger ones, so that what is read beside them is wrong and harmless."""
    from kvlab.exercises import ch03

    monkeypatch.setattr(ch03, "_builder", lambda: None)
    assert exercises.outcome("04.4", merge_kernel) == "right"
    for fault in FAULTS:
        if fault != "reads past the end":  # those rows are not stored, so nothing shows
            with pytest.raises(ExerciseError):
                exercises.check("04.4", faulty(fault))


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    for name, wrong, match in [
        ("04.1", bytes_off(each=4), "written and read"),
        ("04.1", bytes_off(beside=0), "peak and a total"),
        ("04.1", bytes_off(cap=False), "no more parts than it has keys"),
        ("04.1", bytes_off(alone=True), "one part leaves none"),
        ("04.1", WRONG["04.1"][5], "share its keys"),
        ("04.1", WRONG["04.1"][9], "each new token"),
        ("04.2", faulty_merge("lets NaN through"), "0 times NaN"),
        ("04.2", faulty_merge("NaN in empty rows"), "no part saw is NaN"),
        ("04.2", faulty_merge("alike"), "counts alike"),
        ("04.2", faulty_merge("base 2"), "base 2"),
        ("04.3", equal_splits, "the longest may have"),
        ("04.3", WRONG["04.3"][1], "in no chunk"),
        ("04.3", dealt_with(lambda found, *_: [(0, 0, 0), *found]), "is empty"),
        ("04.3", WRONG["04.3"][7], "are in none"),
        ("04.5", {"three": ("alike", TAIL)}, "'three' is right"),
        ("04.5", {"two": ("base", BOTH)}, "'one' is wrong too"),
        ("04.5", {"one": ("empty", TAIL)}, "not 'empty'"),
        ("04.5", {"one": FOUND["one"]}, "1 of the 3 versions"),
        ("04.5", {"one": ("tail", (1e8 * RANDOM[0], *RANDOM[1:], 2))}, "too coarsely"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)


@needs_triton
@pytest.mark.skipif(not runtime.INTERPRET, reason="accesses are watched in the interpreter")
def test_a_wrong_kernel_is_told_what_is_wrong() -> None:
    for fault, match in {
        "reads past the end": "reads row .* of",
        "writes past the end": "writes to row .* of out",
        "writes to part": "only out is its to write",
        "skips empty rows": "not written",
        "divides by 0": "must be 0",
        "lets NaN through": "0 times NaN",
    }.items():
        with pytest.raises(ExerciseError, match=match):
            exercises.check("04.4", faulty(fault))
    with pytest.raises(ExerciseError, match="not written"):
        exercises.check("04.4", stub_kernel)
    with pytest.raises(ExerciseError, match=r"@triton\.jit"):
        exercises.check("04.4", only_out(merge_parts))
