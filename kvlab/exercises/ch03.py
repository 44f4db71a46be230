"""Checkers of chapter 03: sizes, scores and poisoned memory, drawn by one seed; no stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab import reference, runtime
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


def _hint(cases: Sequence[tuple[Any, ...]], got: Sequence[Any], slips: Mapping[str, Callable[..., Any]]) -> str:
    """What is wrong with an answer that gives on every case what a known slip gives; nothing where none does."""
    for hint, slip in slips.items():
        if all(value == slip(*case) for value, case in zip(got, cases, strict=True)):
            return hint
    return ""


# --- predict the bytes ---------------------------------------------------------------------------------------------


def _materialised(L: int, H: int, D: int, M: int, *, matrices: int = 4, tensors: int = 4) -> int:
    return 2 * H * (tensors * L * D + matrices * L * L)


def _flash(L: int, H: int, D: int, M: int, *, tiles: float | None = None, own: int = 2, each: int = 2) -> float:
    return 2 * H * L * D * (own + each * (-(-L // M) if tiles is None else tiles))


_BYTES: dict[str, dict[str, Callable[..., float]]] = {
    "materialised": {
        "scores and weights are two matrices; each is written once and read once": lambda *c: _materialised(
            *c, matrices=2
        ),
        "each of the two matrices is written once and read once": lambda *c: _materialised(*c, matrices=3),
        "the scores and the weights pass through HBM too": lambda *c: _materialised(*c, matrices=0),
        "the scores and the weights are in bf16 here, 2 bytes each": lambda *c: _materialised(*c, matrices=8),
        "q, k and v are read and out is written, too": lambda *c: _materialised(*c, tensors=0),
        "q, k and v are read and out is written: four, not three": lambda *c: _materialised(*c, tensors=3),
        "that is twice too much; bf16 has 2 bytes": lambda *c: 2 * _materialised(*c),
        "that is half; bf16 has 2 bytes": lambda *c: _materialised(*c) / 2,
        "that is one head": lambda L, H, D, M: _materialised(L, 1, D, M),
    },
    "flash": {
        "each tile of M queries reads all keys and values anew": lambda *c: _flash(*c, tiles=1),
        "a last tile of fewer than M queries reads all keys, too": lambda L, H, D, M: _flash(L, H, D, M, tiles=L // M),
        "a last tile of fewer than M queries reads them whole": lambda L, H, D, M: _flash(L, H, D, M, tiles=L / M),
        "q is read and out is written, too": lambda *c: _flash(*c, own=0),
        "q is read and out is written: two, not one": lambda *c: _flash(*c, own=1),
        "each tile reads the keys and the values": lambda *c: _flash(*c, each=1),
        "each tile reads its own queries, not all": lambda *c: _flash(*c, own=1, each=3),
        "that is twice too much; bf16 has 2 bytes": lambda *c: 2 * _flash(*c),
        "that is half; bf16 has 2 bytes": lambda *c: _flash(*c) / 2,
        "that is one head": lambda L, H, D, M: _flash(L, 1, D, M),
    },
}


@checker("03.1")
def hbm_bytes(function: Callable[..., Any]) -> None:
    """Bytes that attention moves, materialised and in tiles: L, H, D, M. Raises: ExerciseError.  Source: chapter 03."""
    rng = random.Random(SEED)
    cases = [(4096, 32, 128, 128), (1000, 3, 40, 64), (64, 1, 16, 64), (40, 1, 16, 64), (1, 8, 64, 16), (0, 4, 64, 64)]
    for _ in range(20):
        L = rng.randint(1, 100_000)
        cases.append((L, rng.randint(2, 64), rng.choice([40, 64, 96, 128]), rng.choice([16, 64, 128])))
    answers: dict[str, list[Any]] = {"materialised": [], "flash": []}
    for case in cases:
        what = "hbm_bytes({}, {}, {}, {})".format(*case)
        parts = parts_of(function(*case), "materialised, flash", what)
        for (name, got), part in zip(answers.items(), parts, strict=True):
            got.append(number(part, f"{what}: {name}"))
    rights: dict[str, Callable[..., float]] = {"materialised": _materialised, "flash": _flash}
    for name, got in answers.items():
        right, hint = rights[name], _hint(cases, got, _BYTES[name])
        for case, value in zip(cases, got, strict=True):
            what = "hbm_bytes({}, {}, {}, {})".format(*case)
            if hint and value != right(*case):
                raise ExerciseError(f"{what}: {name} is {value:,}: {hint}")
            near(value, right(*case), 1e-9, f"{what}: {name}")


# --- count the tiles -----------------------------------------------------------------------------------------------


def _seen(q_len: int, kv_len: int, window: int, *, top_left: bool = False) -> Tensor:
    side = max(q_len, kv_len)
    rows, columns = (side, side) if top_left else (q_len, kv_len)
    return reference.visible_keys(rows, columns, window_size=(window, -1))[:q_len, :kv_len]


def _counted(
    q_len: int, kv_len: int, M: int, N: int, window: int, *,
    top_left: bool = False, rows_count: bool = False, short_is_free: bool = False, all_masked: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """(skipped, masked, free) tile pairs, counted from the mask itself; and as known slips count them."""
    seen, counts = _seen(q_len, kv_len, window, top_left=top_left), [0, 0, 0]
    for i in range(0, q_len, M):
        for j in range(0, kv_len, N):
            tile = seen[i : i + M, j : j + N]
            whole = (tile.shape[1] == N or short_is_free) and (tile.shape[0] == M or not rows_count)
            counts[0 if not tile.any() else 2 if whole and tile.all() and not all_masked else 1] += 1
    return tuple(counts)


_COUNTS: dict[str, Callable[..., Any]] = {
    "the last query sees the last key; here the first one sees the first": lambda *c: _counted(*c, top_left=True),
    "a query sees the key `window` places before it, too": lambda q, k, M, N, w: _counted(q, k, M, N, w - (w > 0)),
    "there is a window": lambda q, k, M, N, w: _counted(q, k, M, N, -1),
    "a key tile that ends past the last key needs a mask": lambda *c: _counted(*c, short_is_free=True),
    "rows past the last query are not stored; they need no mask": lambda *c: _counted(*c, rows_count=True),
    "a tile whose keys every query of the tile sees needs no mask": lambda *c: _counted(*c, all_masked=True),
}


@checker("03.2")
def count_tiles(function: Callable[..., Any]) -> None:
    """(skipped, masked, free) pairs of tiles: q_len, kv_len, M, N, window. Raises: ExerciseError.  Source: chapter 03.

    Held against the mask itself, counted tile by tile.
    """
    rng = random.Random(SEED)
    names = ("skipped", "masked", "free")
    cases = [
        (4, 4, 2, 2, -1), (2, 6, 2, 2, -1), (6, 2, 2, 2, -1), (4, 5, 2, 2, -1), (3, 6, 2, 2, -1), (0, 4, 2, 2, -1),
        (4, 0, 2, 2, -1), (0, 0, 4, 4, 0), (1, 9, 4, 2, -1), (1, 9, 4, 2, 0), (8, 8, 2, 2, 0), (8, 8, 2, 2, 3),
        (8, 8, 2, 4, 100),
    ]  # fmt: skip
    for _ in range(60):
        window = rng.choice([-1, -1, 0, rng.randint(1, 12), rng.randint(12, 60)])
        cases.append((rng.randint(0, 50), rng.randint(0, 50), rng.randint(1, 16), rng.randint(1, 16), window))
    cases.sort(key=lambda c: c[0] * c[1])
    answers = []
    for case in cases:
        what = "count_tiles({}, {}, M={}, N={}, window={})".format(*case)
        parts = parts_of(function(*case), ", ".join(names), what)
        answers.append(tuple(integer(n, f"{what}: {name}") for n, name in zip(parts, names, strict=True)))
    for case, got in zip(cases, answers, strict=True):
        what = "count_tiles({}, {}, M={}, N={}, window={})".format(*case)
        expected, pairs = _counted(*case), -(-case[0] // case[2]) * -(-case[1] // case[3])
        if got == expected:
            continue
        wrong = [
            f"{'too many' if g > e else 'too few'} {n}" for n, g, e in zip(names, got, expected, strict=True) if g != e
        ]
        if sum(got) != pairs:
            wrong = [f"these are {sum(got)} pairs in all; there are {pairs}"]
        raise ExerciseError(f"{what} gave {got}: {_hint(cases, answers, _COUNTS) or ', '.join(wrong)}")


# --- one step of the online softmax --------------------------------------------------------------------------------


@checker("03.3")
def online_softmax_step(function: Callable[..., Any]) -> None:
    """(m [M], l [M], acc [M, D]) after one more tile. Raises: ExerciseError.  Source: chapter 03."""
    rng = random.Random(SEED)
    for _ in range(3):
        rows, keys, size = rng.randint(2, 5), rng.randint(8, 14), rng.randint(1, 4)
        scores, values = 3 * torch.randn(rows, keys), torch.randn(keys, size)
        rising = scores.sort(dim=1).values
        order = rng.sample(range(keys), keys)
        _steps(function, rng, rising, values, "the largest scores come last")
        _steps(function, rng, rising.flip(1), values, "the largest scores come first")
        _steps(function, rng, scores[:, order], values[order], "in a random order")
        _steps(function, rng, scores, values, "one key a tile", widest=1)
        hidden = torch.rand(rows, keys) < 0.5
        hidden[0], hidden[-1] = True, True
        hidden[-1, rng.choice([0, keys - 1])] = False
        masked = scores.masked_fill(hidden, float("-inf"))
        _steps(function, rng, masked, values, "row 0 sees no key at all, the last row one")
        _steps(function, rng, masked, values, "row 0 sees no key at all, one key a tile", widest=1)
        for shift in (-6e4, 6e4):
            far = scores + shift
            _steps(function, rng, far, values, f"scores near {shift:g}")
            _steps(function, rng, far.masked_fill(hidden, float("-inf")), values, f"scores near {shift:g}, some masked")
        steep = scores + torch.linspace(-6e4, 6e4, keys)
        _steps(function, rng, steep, values, "scores from -6e4 to 6e4")
        _steps(function, rng, steep.flip(1), values, "scores from 6e4 to -6e4")
        unused = rng.sample(range(keys), 3)
        poisoned = masked.clone()
        poisoned[:, unused] = float("-inf")
        nan = values.clone()
        nan[unused] = float("nan")
        _steps(function, rng, poisoned, nan, "keys masked in every row, whose values are NaN")


def _steps(
    function: Callable[..., Any], rng: random.Random, scores: Tensor, values: Tensor, kind: str, widest: int = 5
) -> None:
    """Feed scores [M, L] and values [L, D] to an answer, tile by tile, and hold each state to its definition."""
    rows, keys = scores.shape
    state = torch.full((rows,), float("-inf")), torch.zeros(rows), torch.zeros(rows, values.shape[1])
    wide, clean = scores.double(), values.double().nan_to_num(0.0)
    plain_l, plain_acc = torch.zeros(rows).double(), torch.zeros(rows, values.shape[1]).double()
    start = 0
    while start < keys:
        stop = min(keys, start + rng.randint(1, widest))
        what = f"online_softmax_step ({kind}), after keys {start} to {stop - 1} of {keys}"
        given = tuple(t.clone() for t in state), scores[:, start:stop].clone(), values[start:stop].clone()
        parts = parts_of(function(*given), "m, l, acc", what)
        m = wide[:, :stop].amax(1)
        shift = m.nan_to_num(neginf=0.0)[:, None]
        weights = torch.exp(wide[:, :stop] - shift)
        l, acc = weights.sum(1), weights @ clean[:stop]
        plain_l = plain_l + weights[:, start:].sum(1)
        plain_acc = plain_acc + weights[:, start:] @ clean[start:stop]
        blind = m == float("-inf")
        for name, value, expected in zip(("m", "l", "acc"), parts, (m, l, acc), strict=True):
            if isinstance(value, Tensor) and value.shape == expected.shape and value.isnan().any():
                at = int(value.isnan().nonzero()[0, 0])
                if bool(values[start:stop].isnan().any()):
                    raise ExerciseError(f"{what}: {name}[{at}] is NaN; a weight of 0 does not cover a value of NaN")
                why = "-inf - (-inf) is NaN" if blind[at] or state[0][at].isinf() else "an exponential overflowed"
                raise ExerciseError(f"{what}: {name}[{at}] is NaN: {why}")
            if name == "l" and isinstance(value, Tensor) and value.shape == l.shape:
                lost = (value == 0) & (l > 0)
                if bool(lost.any()):
                    low = float(wide[:, :stop][lost].amax())
                    raise ExerciseError(
                        f"{what}: l is 0 in a row whose largest score is {low:g}; m must follow it down"
                    )
                if bool((value[blind] != 0).any()):
                    raise ExerciseError(f"{what}: l is {float(value[blind].max()):g} in a row that has seen no key yet")
            plain = {"l": plain_l, "acc": plain_acc}.get(name)
            if plain is not None and _off(value, expected) > 1e-4 > _off(value, plain):
                raise ExerciseError(f"{what}: {name} still counts earlier keys by their old maximum; rescale it")
            close(value, expected, rel=1e-4, what=f"{what}: {name}")
        state = tuple(p.detach().clone() for p in parts)
        start = stop


def _off(value: Any, expected: Tensor) -> float:
    """How far off a tensor is, relative to the largest element expected; infinity where it cannot be compared."""
    if not isinstance(value, Tensor) or value.shape != expected.shape or value.is_complex():
        return float("inf")
    error = (value.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    return float(error.nan_to_num(nan=float("inf")))


# --- the kernel ----------------------------------------------------------------------------------------------------

_MARGIN, _UNWRITTEN = 80, 1234.0  # rows of poison around each tensor; what `out` holds before the launch


def _builder() -> Any:
    """Where the interpreter loads and stores, so that each access can be looked at; None where that cannot be had."""
    if not runtime.INTERPRET:
        return None
    try:
        from triton.runtime.interpreter import interpreter_builder
    except ImportError:
        return None
    names = ("create_masked_load", "create_masked_store")
    return interpreter_builder if all(hasattr(interpreter_builder, name) for name in names) else None


class _Rows:
    """Rows [length, D] in the midst of a larger tensor of poison, so that what is read beside them shows."""

    def __init__(self, rows: Tensor, fill: float) -> None:
        self.length, self.size = rows.shape
        self.arena = torch.full((self.length + 2 * _MARGIN, self.size), fill, dtype=rows.dtype, device=rows.device)
        self.inside.copy_(rows)
        self.before = self.arena.clone()

    @property
    def inside(self) -> Tensor:
        return self.arena[_MARGIN : _MARGIN + self.length]

    @property
    def pointer(self) -> Tensor:
        """A tensor that begins where the rows do, and is not empty where they are."""
        return self.arena[_MARGIN:]

    def element(self, at: Any) -> Any:
        return (at - self.pointer.data_ptr()) // self.arena.element_size()

    def changed(self, *, within: bool) -> bool:
        same = (self.arena == self.before) | (self.arena.isnan() & self.before.isnan())
        if not within:
            same[_MARGIN : _MARGIN + self.length] = True
        return not bool(same.all())


@contextmanager
def _watched(tensors: Mapping[str, _Rows]) -> Iterator[None]:
    """In the interpreter: refuse an access outside the tensors, and a store to another than ``out``."""
    builder = _builder()
    if builder is None:
        yield
        return
    load, store = builder.create_masked_load, builder.create_masked_store

    def look(ptrs: Any, mask: Any, allowed: Mapping[str, _Rows], verb: str) -> None:
        at = np.unique(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].astype(np.int64))
        program = f"program {int(np.asarray(builder.grid_idx[0]).item())}"
        for rows in allowed.values():
            element = rows.element(at)
            at = at[(element < 0) | (element >= rows.length * rows.size)]
        for name in tensors.keys() - allowed.keys():
            element = tensors[name].element(at)
            if ((element >= 0) & (element < tensors[name].length * tensors[name].size)).any():
                raise ExerciseError(f"{program} {verb} {name}; only out is its to write")
        if len(at):
            row = {name: int(rows.element(at[0])) // rows.size for name, rows in allowed.items()}
            name = min(row, key=lambda n: abs(row[n] - allowed[n].length / 2))
            raise ExerciseError(f"{program} {verb} row {row[name]} of {name}, which has {allowed[name].length} rows")

    def watched_load(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        look(ptrs, mask, tensors, "reads")
        return load(ptrs, mask, *args, **kwargs)

    def watched_store(ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        look(ptrs, mask, {"out": tensors["out"]}, "writes to")
        return store(ptrs, value, mask, *args, **kwargs)

    with (
        mock.patch.object(builder, "create_masked_load", watched_load),
        mock.patch.object(builder, "create_masked_store", watched_store),
    ):
        yield


def _launch(kernel: Any, tensors: Mapping[str, _Rows], programs: int, scale: float, M: int, N: int, what: str) -> None:
    with launching(what), _watched(tensors), np.errstate(all="ignore"):  # a right kernel may divide by 0, and drop it
        kernel[(programs,)](
            *(rows.pointer for rows in tensors.values()), tensors["q"].length, tensors["k"].length, scale,
            D=tensors["q"].size, M=M, N=N,
        )  # fmt: skip
        if tensors["out"].arena.is_cuda:
            torch.cuda.synchronize(tensors["out"].arena.device)
    _only_rows_of_out(tensors, what)


def _only_rows_of_out(tensors: Mapping[str, _Rows], what: str) -> None:
    """Refuse a kernel that wrote anything else."""
    for name, rows in tensors.items():
        if rows.changed(within=name != "out"):
            where = "outside of out" if name == "out" else f"to {name}"
            raise ExerciseError(f"{what}: the kernel wrote {where}; it writes the rows of out only")


def _judge(got: Tensor, expected: Tensor, past: int, limit: float, top_left: Tensor | None, what: str) -> None:
    """Hold rows [tokens, D] that an answer made to the oracle's."""
    got, expected = got.double().cpu(), expected.double().cpu()
    bound = limit * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    for row in range(len(expected)):
        where = f"{what}: out[{row}]"
        if (got[row] == _UNWRITTEN).any():
            raise ExerciseError(f"{where} was not written; every row of out is, those that see nothing too")
        blind = past + row < 0
        if got[row].isnan().any():
            why = "a row that sees no key must be 0" if blind else "it must hold numbers"
            raise ExerciseError(f"{where} is NaN; {why}")
        if blind and (got[row] != 0).any():
            raise ExerciseError(f"{where} is {got[row][0].item():g}...; query {row} sees no key, so it must be 0")
        error = float((got[row] - expected[row]).abs().max())
        if error > bound:
            if top_left is not None and float((got - top_left).abs().max()) <= bound:
                raise ExerciseError(f"{where} is off by {error:.3g}: the last query must see the last key")
            raise ExerciseError(f"{where} is off by {error:.3g}; at most {bound:.2g} is rounding")


def _oracle(q: Tensor, k: Tensor, v: Tensor, scale: float, *, top_left: bool = False) -> Tensor:
    """One head's attention of q [Lq, D] over k, v [Lk, D] in float64."""
    if top_left:
        k, v = k[: len(q)], v[: len(q)]
    out, _ = reference.attend_one(q[:, None], k[:, None], v[:, None], softmax_scale=scale)
    return out[:, 0]


@checker("03.4")
def flash_kernel(kernel: Any) -> None:
    """Causal attention of one head in tiles: a Triton kernel, or a torch function where no kernel can be launched.

    Raises: ExerciseError.  Source: chapter 03.
    """
    on = where_to_launch("03.4", kernel)
    if on is None:
        return _flash_in_torch(kernel)
    rng = random.Random(SEED)
    cases = [
        (1, 1, 16, 16, 16), (16, 16, 16, 16, 16), (32, 32, 16, 32, 16), (5, 37, 16, 16, 16), (37, 5, 16, 16, 32),
        (3, 0, 16, 16, 16), (33, 40, 32, 16, 32), (40, 33, 32, 32, 16),
    ]  # fmt: skip
    for _ in range(3):
        D, M, N = rng.choices([16, 32], k=3)
        cases.append((rng.randint(1, 40), rng.randint(1, 50), D, M, N))
    for number_of_case, (q_len, kv_len, D, M, N) in enumerate(cases):
        dtype = torch.float16 if number_of_case % 3 == 2 else torch.float32
        q, k, v = (torch.randn(n, D, device=on).to(dtype) for n in (q_len, kv_len, kv_len))
        _try_kernel(kernel, q, k, v, rng.uniform(0.1, 0.6), M, N)
    for sign, q_len, kv_len in ((-1, 20, 30), (1, 20, 50)):  # every score is -60000, or 60000
        q, k = torch.full((q_len, 16), 100.0, device=on), torch.full((kv_len, 16), sign * 150.0, device=on)
        _try_kernel(kernel, q, k, torch.randn(kv_len, 16, device=on), 0.25, 16, 16, f", every score {sign * 60_000}")
    for q_len, kv_len, M, N in ((48, 48, 16, 16), (64, 90, 16, 32), (70, 30, 32, 16)):
        q, k, v = (torch.randn(n, 16, device=on) for n in (q_len, kv_len, kv_len))
        _try_kernel(kernel, q, k, v, 0.25, M, N, alone=True)


def _try_kernel(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, M: int, N: int, kind: str = "", alone: bool = False
) -> None:
    """One launch among poison. ``alone`` launches the first program only, and poisons the key tiles it cannot see."""
    (q_len, D), kv_len, past = q.shape, len(k), len(k) - len(q)
    what = f"q_len {q_len}, kv_len {kv_len}, D {D}, M {M}, N {N}, {str(q.dtype).removeprefix('torch.')}{kind}"
    expected, other = _oracle(q, k, v, scale), _oracle(q, k, v, scale, top_left=True)
    programs = 1 if alone else -(-q_len // M)
    reach = max(0, -(-(past + M) // N)) * N  # the end of the last key tile that program 0 sees
    if alone:
        k[reach:], v[reach:] = float("nan"), float("nan")
        what += ", program 0 alone"
    nan = float("nan")
    tensors = {name: _Rows(rows, nan) for name, rows in (("q", q), ("k", k), ("v", v))}
    tensors["out"] = _Rows(torch.full_like(q, _UNWRITTEN), _UNWRITTEN)
    _launch(kernel, tensors, programs, scale, M, N, what)
    got, rows = tensors["out"].inside, min(q_len, programs * M)
    if alone and got[:rows].isnan().any():
        last = max(0, past + M)
        raise ExerciseError(
            f"{what}: out is NaN. Its queries see the first {last} keys, and the key tiles from key {reach} on, which "
            "none of them sees, hold NaN: end the loop before them"
        )
    limit = 1e-2 if q.is_cuda else 5e-3 if q.dtype == torch.float16 else 1e-4  # a GPU may round float32 to TF32
    _judge(got[:rows], expected[:rows], past, limit, None if past == 0 else other[:rows], what)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would else import its compiler here, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def _flash_in_torch(function: Callable[..., Any]) -> None:
    """The same exercise as a function of (q, k, v, scale, M, N): q [Lq, D], k and v [Lk, D]; gives [Lq, D]."""
    rng = random.Random(SEED)
    cases = [
        (1, 1, 16, 16),
        (32, 32, 8, 8),
        (5, 37, 4, 8),
        (37, 5, 8, 4),
        (3, 0, 4, 4),
        (0, 3, 4, 4),
        (300, 300, 16, 16),
    ]
    cases += [(rng.randint(1, 50), rng.randint(1, 70), rng.randint(1, 20), rng.randint(1, 20)) for _ in range(6)]
    for q_len, kv_len, M, N in cases:
        for shift in (0.0, -100.0, 100.0) if q_len < 300 else (0.0,):
            D, scale = 4, rng.uniform(0.2, 0.8)
            q, k, v = torch.randn(q_len, D), torch.randn(kv_len, D), torch.randn(kv_len, D)
            if shift:
                q, k, scale = torch.full_like(q, 100.0), torch.full_like(k, 1.5 * shift), 1.0  # scores of 60000
            what = f"q_len {q_len}, kv_len {kv_len}, M {M}, N {N}{f', every score {600 * shift:g}' if shift else ''}"
            with _Largest() as watch:
                got = function(q.clone(), k.clone(), v.clone(), scale, M, N)
            expected = _oracle(q, k, v, scale)
            if not isinstance(got, Tensor) or got.shape != expected.shape:
                shown = f"a tensor {list(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"
                raise ExerciseError(f"{what}: the answer gave {shown}; it must give a tensor {list(expected.shape)}")
            _judge(got, expected, kv_len - q_len, 1e-4, _oracle(q, k, v, scale, top_left=True), what)
            room = 2 * max(D * q_len, D * kv_len, M * N, M * D, N * D)
            if watch.elements > room and max(q_len, kv_len) >= 300:
                raise ExerciseError(
                    f"{what}: a tensor of {watch.elements} elements was made; tiles of {M} by {N} and rows of {D} take "
                    f"fewer than {room}"
                )


# --- find the planted bugs -----------------------------------------------------------------------------------------


def flash_one(q: Tensor, k: Tensor, v: Tensor, M: int, N: int) -> Tensor:
    """One of three versions, of which one is right: q [Lq, D], k and v [Lk, D]; gives [Lq, D]. Source: exercise 03.5"""
    out, past = torch.zeros_like(q), len(k) - len(q)
    for i in range(0, len(q), M):
        queries = q[i : i + M]
        position = past + i + torch.arange(len(queries))
        m, l, acc = q.new_full([len(queries)], -1e4), q.new_zeros(len(queries)), torch.zeros_like(queries)
        for j in range(0, past + i + len(queries), N):
            scores = queries @ k[j : j + N].T * q.shape[1] ** -0.5
            key = j + torch.arange(scores.shape[1])
            scores = scores.masked_fill(key > position[:, None], float("-inf"))
            new = torch.maximum(m, scores.amax(1))
            p, alpha = torch.exp(scores - new[:, None]), torch.exp(m - new)
            m, l, acc = new, l * alpha + p.sum(1), acc * alpha[:, None] + p @ v[j : j + N]
        out[i : i + M] = acc / l.where(l > 0, 1)[:, None]
    return out


def flash_two(q: Tensor, k: Tensor, v: Tensor, M: int, N: int) -> Tensor:
    """One of three versions, of which one is right: q [Lq, D], k and v [Lk, D]; gives [Lq, D]. Source: exercise 03.5"""
    out, past = torch.zeros_like(q), len(k) - len(q)
    for i in range(0, len(q), M):
        queries = q[i : i + M]
        position = past + i + torch.arange(len(queries))
        m, l, acc = q.new_full([len(queries)], -torch.inf), q.new_zeros(len(queries)), torch.zeros_like(queries)
        for j in range(0, past + i + len(queries), N):
            scores = queries @ k[j : j + N].T * q.shape[1] ** -0.5
            if j + N >= past + i + len(queries):  # the tile reaches the diagonal: mask it
                key = j + torch.arange(scores.shape[1])
                scores = scores.masked_fill(key > position[:, None], float("-inf"))
            new = torch.maximum(m, scores.amax(1))
            safe = new.where(new > -torch.inf, 0)
            p, alpha = torch.exp(scores - safe[:, None]), torch.exp(m - safe)
            m, l, acc = new, l * alpha + p.sum(1), acc * alpha[:, None] + p @ v[j : j + N]
        out[i : i + M] = acc / l.where(l > 0, 1)[:, None]
    return out


def flash_three(q: Tensor, k: Tensor, v: Tensor, M: int, N: int) -> Tensor:
    """One of three versions, of which one is right: q [Lq, D], k and v [Lk, D]; gives [Lq, D]. Source: exercise 03.5"""
    out, past = torch.zeros_like(q), len(k) - len(q)
    for i in range(0, len(q), M):
        queries = q[i : i + M]
        position = past + i + torch.arange(len(queries))
        m, l, acc = q.new_full([len(queries)], -torch.inf), q.new_zeros(len(queries)), torch.zeros_like(queries)
        for j in reversed(range(0, past + i + len(queries), N)):
            scores = queries @ k[j : j + N].T * q.shape[1] ** -0.5
            key = j + torch.arange(scores.shape[1])
            scores = scores.masked_fill(key > position[:, None], float("-inf"))
            new = torch.maximum(m, scores.amax(1))
            p = torch.exp(scores - new[:, None]).nan_to_num(0.0)
            alpha = torch.exp(m - new).nan_to_num(0.0)
            m, l, acc = new, l * alpha + p.sum(1), acc * alpha[:, None] + p @ v[j : j + N]
        out[i : i + M] = acc / l.clamp(min=1)[:, None]
    return out


_VERSIONS = {"one": flash_one, "two": flash_two, "three": flash_three}
_FAULTS = {"one": "floor", "two": "mask"}
_WORDS = ("rescale", "floor", "mask", "skip", "empty", "corner")


@checker("03.5")
def planted_bugs(answer: Any) -> None:
    """{version: (fault, (q [Lq, D], k [Lk, D], v [Lk, D], M, N))}: inputs that show what is wrong.

    Raises: ExerciseError.  Source: chapter 03.
    """
    faults_found(answer, _VERSIONS, _FAULTS, _WORDS, _tried)


def _tried(given: Any, what: str) -> Tried:
    q, k, v, M, N = _input(given, what)
    sizes = f"your input for {what} (q_len {len(q)}, kv_len {len(k)}, M {M}, N {N})"
    expected = reference.attend_one(q[:, None], k[:, None], v[:, None])[0][:, 0]
    some = bool(len(q) and len(k))
    largest = float((q.abs().double() @ k.abs().double().T).max()) * q.shape[1] ** -0.5 if some else 0.0
    scale = float(v.abs().max()) if len(k) else 1.0
    limit = (1e-5 + 3 * q.shape[1] ** 0.5 * torch.finfo(q.dtype).eps * largest) * scale  # what rounding scores can do
    off = {}
    for name, function in _VERSIONS.items():
        error = (function(q, k, v, M, N).double() - expected).abs().nan_to_num(nan=float("inf"))
        off[name] = float(error.max()) if error.numel() else 0.0
    return Tried(sizes, off, limit if scale else float("inf"), largest)


def _input(given: Any, what: str) -> tuple[Tensor, Tensor, Tensor, int, int]:
    q, k, v, M, N = parts_of(given, "q, k, v, M, N", f"{what}: the input")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 2 or x.dtype not in (torch.float32, torch.float64):
            shown = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ExerciseError(f"{what}: {name} is {shown}; it must be a tensor [length, D] of float32 or float64")
        if not bool(x.isfinite().all()):
            raise ExerciseError(f"{what}: {name} holds {x[~x.isfinite()][0].item()}; all numbers must be finite")
    if q.shape[1] != k.shape[1] or k.shape != v.shape or q.shape[1] == 0 or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in (q, k, v))
        raise ExerciseError(f"{what}: q, k and v are {shapes}; they must be [Lq, D], [Lk, D] and [Lk, D] of one dtype")
    M, N = integer(M, f"{what}: M"), integer(N, f"{what}: N")
    if min(M, N) < 1 or max(len(q), len(k)) > 512 or q.shape[1] > 512:
        raise ExerciseError(f"{what}: M is {M}, N {N}, the lengths {len(q)} and {len(k)}; 1 or more, and 512 at most")
    return q.detach().cpu(), k.detach().cpu(), v.detach().cpu(), M, N
