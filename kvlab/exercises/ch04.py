"""Checkers of chapter 04: splits, merges and poisoned memory, drawn by one seed; no stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab import reference
from kvlab.exercises import (
    SEED,
    ExerciseError,
    Tried,
    checker,
    close,
    faults_found,
    integer,
    launching,
    near,
    number,
    parts_of,
    where_to_launch,
)
from kvlab.exercises.ch03 import _UNWRITTEN, _hint, _only_rows_of_out, _Rows, _watched

INF, NAN = float("inf"), float("nan")

# --- predict the bytes ---------------------------------------------------------------------------------------------


def _kv(lengths: list[int], splits: int, H: int, H_kv: int, D: int, q_len: int) -> int:
    return sum(lengths) * H_kv * 2 * D * 2


def _partial(
    lengths: list[int], splits: int, H: int, H_kv: int, D: int, q_len: int, *,
    each: int = 8, beside: int = 2, cap: bool = True, alone: bool = False,
) -> int:  # fmt: skip
    parts = [min(splits, n) if cap else splits for n in lengths]
    return sum(p for p in parts if p > 1 or alone) * H * q_len * (D + beside) * each


_BYTES: dict[str, dict[str, Callable[..., float]]] = {
    "keys and values": {
        "query heads that share a KV head share its keys and values": lambda n, s, H, H_kv, D, q: _kv(n, s, H, H, D, q),
        "that is twice too much; bf16 has 2 bytes, and K and V are read once": lambda *c: 2 * _kv(*c),
        "that is half: keys and values, 2 bytes a number": lambda *c: _kv(*c) / 2,
        "a key is read once for all new tokens": lambda *c: _kv(*c) * c[5],
        "a key is read once, in one split": lambda *c: _kv(*c) * c[1],
    },
    "partial results": {
        "they are written and read": lambda *c: _partial(*c, each=4),
        "they are float32, 4 bytes a number": lambda *c: _partial(*c, each=4) / 2,
        "each row has a peak and a total beside its sums": lambda *c: _partial(*c, beside=0),
        "each row has a peak and a total, two numbers": lambda *c: _partial(*c, beside=1),
        "a sequence is cut into no more parts than it has keys": lambda *c: _partial(*c, cap=False),
        "a sequence of one part leaves none": lambda *c: _partial(*c, alone=True),
        "each query head has sums of its own": lambda n, s, H, H_kv, D, q: _partial(n, s, H_kv, H_kv, D, q),
        "each new token has sums of its own": lambda n, s, H, H_kv, D, q: _partial(n, s, H, H_kv, D, 1),
    },
}


@checker("04.1")
def decode_bytes(function: Callable[..., Any]) -> None:
    """Bytes of K and V, and of partial results: lengths, splits, H, H_kv, D, q_len. Raises: ExerciseError.

    Source: chapter 04.
    """
    rng = random.Random(SEED)
    cases: list[tuple[Any, ...]] = [
        ([131072], 33, 32, 8, 128, 1), ([5, 1, 0], 4, 8, 2, 64, 1), ([4096] * 3, 1, 32, 8, 128, 1),
        ([], 8, 8, 8, 64, 1), ([300], 8, 32, 4, 64, 5),
    ]  # fmt: skip
    for _ in range(20):
        H_kv = rng.choice([1, 2, 8])
        lengths = [rng.randint(0, rng.choice([3, 50, 100_000])) for _ in range(rng.randint(1, 6))]
        heads, size = H_kv * rng.choice([2, 4, 7]), rng.choice([64, 96, 128])
        cases.append((lengths, rng.randint(2, 64), heads, H_kv, size, rng.randint(2, 5)))
    answers: dict[str, list[Any]] = {name: [] for name in _BYTES}
    shown = ["decode_bytes({}, {}, {}, {}, {}, {})".format(*case) for case in cases]
    for case, what in zip(cases, shown, strict=True):
        parts = parts_of(function(list(case[0]), *case[1:]), ", ".join(_BYTES), what)
        for (name, got), part in zip(answers.items(), parts, strict=True):
            got.append(number(part, f"{what}: {name}"))
    for name, right in (("keys and values", _kv), ("partial results", _partial)):
        hint = _hint(cases, answers[name], _BYTES[name])
        for case, what, value in zip(cases, shown, answers[name], strict=True):
            if hint and value != right(*case):
                raise ExerciseError(f"{what}: {name} are {value:,}: {hint}")
            near(value, right(*case), 1e-9, f"{what}: {name}")


# --- merge ---------------------------------------------------------------------------------------------------------


def _states(rng: random.Random, splits: int, rows: int, size: int, kind: str) -> tuple[Tensor, Tensor]:
    """outs [S, R, D] and lses [S, R] of one kind; where a part saw no key its output is NaN."""
    outs, lses = torch.randn(splits, rows, size), 3 * torch.randn(splits, rows)
    if kind in ("far down", "far up"):
        lses += 6e4 if kind == "far up" else -6e4
    if kind == "rising":
        lses = torch.linspace(-6e4, 6e4, splits)[:, None] + lses
    if kind == "falling":
        lses = torch.linspace(6e4, -6e4, splits)[:, None] + lses
    if kind in ("parts without keys", "far down", "nothing first"):
        hidden = torch.rand(splits, rows) < 0.4
        if kind == "nothing first":
            hidden[0] = True
        none, some = rng.sample(range(rows), 2)  # rows seen by no part, and by all but one
        hidden[:, none], hidden[:, some], hidden[0, some] = True, False, True
        lses[hidden], outs[hidden] = -INF, NAN
    return outs, lses


_KINDS = ("plain", "far down", "far up", "rising", "falling", "parts without keys", "nothing first")


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """out [R, D] and lse [R] in float64."""
    wide = lses.double()
    lse = wide.logsumexp(0)
    weights = torch.exp(wide - torch.where(lse == -INF, 0.0, lse))
    return (weights[..., None] * outs.double().masked_fill((wide == -INF)[..., None], 0.0)).sum(0), lse


def _judge_merge(got: Tensor, outs: Tensor, lses: Tensor, what: str, limit: float = 1e-4) -> None:
    """Hold an answer's out [R, D] to the right one, and say what is wrong where that can be told."""
    expected, lse = _merged(outs, lses)
    if isinstance(got, Tensor) and got.shape == expected.shape and got.is_floating_point():
        bad, empty = got.isnan().any(1).cpu(), lse == -INF
        if bool((bad & ~empty).any()):
            at = int((bad & ~empty).nonzero()[0])
            unseen = bool((lses[:, at] == -INF).any())
            why = "a part that saw no key may hold NaN, and 0 times NaN is NaN" if unseen else "an overflow"
            raise ExerciseError(f"{what}: row {at} is NaN: {why}")
        if bool(bad.any()):
            raise ExerciseError(f"{what}: a row that no part saw is NaN; it must be 0")
        alike = outs.double().nan_to_num(0.0).sum(0) / (lses > -INF).sum(0).clamp(min=1)[:, None]
        if _near(got, alike) and not _near(got, expected):
            raise ExerciseError(f"{what}: every part counts alike; weigh each by its share of the denominator")
        base = torch.where(lses == -INF, 0.0, torch.exp2(lses.double() - lses.double().amax(0).nan_to_num(neginf=0.0)))
        base = (base[..., None] * outs.double().nan_to_num(0.0)).sum(0) / base.sum(0).clamp(min=1e-300)[:, None]
        if _near(got, base) and not _near(got, expected):
            raise ExerciseError(f"{what}: these are weights in base 2; the log-sum-exps are natural logarithms")
    close(got, expected, rel=limit, what=f"{what}: out")


def _near(got: Tensor, expected: Tensor) -> bool:
    return float((got.double().cpu() - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))


@checker("04.2")
def merge_parts(function: Callable[..., Any]) -> None:
    """(out [R, D], lse [R]) of all parts, from outs [S, R, D] and lses [S, R]. Raises: ExerciseError.

    Source: chapter 04.
    """
    rng = random.Random(SEED)
    for kind in (*_KINDS, *_KINDS):
        splits = 1 if kind == "plain" and rng.random() < 0.5 else rng.randint(2, 9)
        outs, lses = _states(rng, splits, rng.randint(2, 6), rng.randint(1, 5), kind)
        what = f"merge of {splits} parts ({kind})"
        out, lse = parts_of(function(outs.clone(), lses.clone()), "out, lse", what)
        _judge_merge(out, outs, lses, what)
        close(lse, _merged(outs, lses)[1], rel=1e-5, what=f"{what}: lse")


# --- deal fairly ---------------------------------------------------------------------------------------------------


@checker("04.3")
def deal_fairly(function: Callable[..., Any]) -> None:
    """[(sequence, first key, one past its last)], from lengths, programs and N. Raises: ExerciseError.

    Held to what a deal must be, not to one deal. Source: chapter 04.
    """
    rng = random.Random(SEED)
    cases = [([10], 3, 2), ([7], 1, 4), ([64, 1, 1], 4, 4), ([0], 2, 4), ([], 2, 4), ([99, 0, 3], 7, 16), ([9], 50, 2)]
    for _ in range(60):
        lengths = [rng.randint(0, rng.choice([5, 40, 1000])) for _ in range(rng.randint(1, 12))]
        cases.append((lengths, rng.randint(1, 40), rng.choice([1, 2, 7, 16, 64])))
    for lengths, programs, N in cases:
        what = f"deal_fairly({lengths}, {programs}, {N})"
        given = function(list(lengths), programs, N)
        if not isinstance(given, list | tuple):
            raise ExerciseError(f"{what} gave a {type(given).__name__}; it must give a list of chunks")
        chunks = []
        for chunk in given:
            parts = parts_of(chunk, "sequence, first key, one past its last", f"{what}: a chunk")
            chunks.append(tuple(integer(x, f"{what}: chunk {tuple(parts)}") for x in parts))
        _judge_deal(chunks, lengths, programs, N, what)


def _judge_deal(chunks: list[tuple[int, ...]], lengths: list[int], programs: int, N: int, what: str) -> None:
    tiles = sum(-(-n // N) for n in lengths)
    longest = N * -(-tiles // programs)
    reached = [0] * len(lengths)
    for seq, first, end in sorted(chunks):
        chunk = f"{what}: chunk {(seq, first, end)}"
        if not 0 <= seq < len(lengths):
            raise ExerciseError(f"{chunk} is of a sequence that is not there; there are {len(lengths)}")
        if first >= end:
            raise ExerciseError(f"{chunk} is empty")
        if end > lengths[seq]:
            raise ExerciseError(f"{chunk} ends past the sequence's {lengths[seq]} keys")
        if first != reached[seq]:
            state = "are in two chunks" if first < reached[seq] else "are in none"
            raise ExerciseError(f"{chunk}: keys from {min(first, reached[seq])} to {max(first, reached[seq])} {state}")
        if first % N:
            raise ExerciseError(f"{chunk} begins within a tile of {N} keys")
        if end - first > longest:
            raise ExerciseError(f"{chunk} has {end - first} keys; the longest may have {longest}")
        reached[seq] = end
    for seq, (got, n) in enumerate(zip(reached, lengths, strict=True)):
        if got != n:
            raise ExerciseError(f"{what}: keys from {got} on of sequence {seq} are in no chunk; it has {n}")
    if len(chunks) > programs + len(lengths):
        raise ExerciseError(f"{what}: {len(chunks)} chunks; there may be {programs} + {len(lengths)}")


# --- the kernel ----------------------------------------------------------------------------------------------------


@checker("04.4")
def merge_kernel(kernel: Any) -> None:
    """Merge rows of all splits: a Triton kernel, or a torch function where no kernel can be launched.

    Raises: ExerciseError.  Source: chapter 04.
    """
    on, rng = where_to_launch("04.4", kernel), random.Random(SEED)
    cases = [(1, 1, 16, 1, "plain"), (2, 4, 16, 4, "plain"), (3, 5, 16, 4, "plain"), (5, 3, 32, 8, "nothing first")]
    for kind in _KINDS:
        cases.append((rng.randint(2, 9), rng.randint(2, 20), rng.choice([16, 32]), rng.choice([2, 4, 16]), kind))
    for splits, rows, size, R, kind in cases:
        outs, lses = _states(rng, splits, rows, size, kind)
        what = f"splits {splits}, rows {rows}, D {size}, R {R} ({kind})"
        if on is not None:
            got = _launched(kernel, outs.to(on), lses.to(on), R, what)
        else:
            got = kernel(outs.clone(), lses.clone())
        _judge_merge(got, outs, lses, what)


def _launched(kernel: Any, outs: Tensor, lses: Tensor, R: int, what: str) -> Tensor:
    """One launch amid poison; gives out [R, D]."""
    splits, rows, size = outs.shape
    tensors = {"part": _Rows(outs.flatten(0, 1), NAN), "lse": _Rows(lses.view(-1, 1), NAN)}
    tensors["out"] = _Rows(torch.full((rows, size), _UNWRITTEN, device=outs.device), _UNWRITTEN)
    with launching(what), _watched(tensors), np.errstate(all="ignore"):  # a right kernel may choose another value later
        kernel[(-(-rows // R),)](*(t.pointer for t in tensors.values()), splits, rows, D=size, R=R)
        if outs.is_cuda:
            torch.cuda.synchronize(outs.device)
    _only_rows_of_out(tensors, what)
    got = tensors["out"].inside
    missing = (got == _UNWRITTEN).any(1)
    if bool(missing.any()):
        raise ExerciseError(f"{what}: row {int(missing.nonzero()[0])} of out was not written; every row is")
    return got.clone()


# --- find the planted bugs -----------------------------------------------------------------------------------------


def attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [D] and lse of one query q [D] over keys k and values v [n, D]; no keys give 0 and -inf.

    Source: exercise 04.5
    """
    scores = k @ q * len(q) ** -0.5
    lse = scores.logsumexp(0)
    return (scores - lse).exp() @ v, lse


def decode_one(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """One of three versions, of which one is right: q [D], k and v [L, D]; gives [D]. Source: exercise 04.5"""
    size = max(1, len(k) // S)
    parts = [attend_part(q, k[i : i + size], v[i : i + size]) for i in range(0, S * size, size)]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])
    weights = torch.exp(lses - lses.max())
    return weights @ outs / weights.sum()


def decode_two(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """One of three versions, of which one is right: q [D], k and v [L, D]; gives [D]. Source: exercise 04.5"""
    parts = [attend_part(q, *kv) for kv in zip(k.tensor_split(S), v.tensor_split(S), strict=True)]
    base = parts[0][1]
    total, out = torch.zeros_like(base), torch.zeros_like(q)
    for o, lse in parts:
        weight = torch.exp(lse - base)
        total, out = total + weight, out + weight * o
    return out / total


def decode_three(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """One of three versions, of which one is right: q [D], k and v [L, D]; gives [D]. Source: exercise 04.5"""
    (out, lse), *others = [attend_part(q, *kv) for kv in zip(k.tensor_split(S), v.tensor_split(S), strict=True)]
    for o, other in reversed(others):
        out = out + torch.sigmoid(other - lse) * (o - out)
        lse = torch.logaddexp(lse, other)
    return out


_VERSIONS = {"one": decode_one, "two": decode_two, "three": decode_three}
_FAULTS = {"one": "tail", "two": "base"}
_WORDS = ("tail", "twice", "empty", "alike", "base")


@checker("04.5")
def planted_bugs(answer: Any) -> None:
    """{version: (fault, (q [D], k [L, D], v [L, D], S))}: inputs that show what is wrong.

    Raises: ExerciseError.  Source: chapter 04.
    """
    faults_found(answer, _VERSIONS, _FAULTS, _WORDS, _tried)


def _tried(given: Any, what: str) -> Tried:
    q, k, v, S = _input(given, what)
    sizes = f"your input for {what} (L {len(k)}, D {len(q)}, S {S})"
    expected = reference.attend_one(q[None, None], k[:, None], v[:, None])[0][0, 0]
    largest = float((k.abs().double() @ q.abs().double()).max()) * len(q) ** -0.5
    scale = float(v.abs().max())
    limit = (1e-5 + 3 * len(q) ** 0.5 * torch.finfo(q.dtype).eps * largest) * scale  # what rounding scores can do
    off = {}
    for name, function in _VERSIONS.items():
        off[name] = float((function(q, k, v, S).double() - expected).abs().nan_to_num(nan=INF).max())
    return Tried(sizes, off, limit if scale else INF, largest)


def _input(given: Any, what: str) -> tuple[Tensor, Tensor, Tensor, int]:
    q, k, v, S = parts_of(given, "q, k, v, S", f"{what}: the input")
    for name, x, dims in (("q", q, 1), ("k", k, 2), ("v", v, 2)):
        if not isinstance(x, Tensor) or x.ndim != dims or x.dtype not in (torch.float32, torch.float64):
            shown = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            form = "[D]" if dims == 1 else "[L, D]"
            raise ExerciseError(f"{what}: {name} is {shown}; it must be a tensor {form} of float32 or float64")
        if not bool(x.isfinite().all()):
            raise ExerciseError(f"{what}: {name} holds {x[~x.isfinite()][0].item()}; all numbers must be finite")
    if k.shape != v.shape or k.shape[1] != len(q) or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in (q, k, v))
        raise ExerciseError(f"{what}: q, k and v are {shapes}; they must be [D], [L, D] and [L, D] of one dtype")
    S = integer(S, f"{what}: S")
    if min(S, *k.shape) < 1 or max(S, *k.shape) > 512:
        raise ExerciseError(f"{what}: S is {S}, L {len(k)} and D {len(q)}; each must be 1 to 512")
    return q.detach().cpu(), k.detach().cpu(), v.detach().cpu(), S
