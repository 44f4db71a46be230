"""Checkers of chapter 05: distributions, drafts and trees, drawn by one seed; no stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab import speculative
from kvlab.exercises import (
    SEED,
    ExerciseError,
    Tried,
    checker,
    faults_found,
    integer,
    launching,
    near,
    number,
    parts_of,
    where_to_launch,
)
from kvlab.exercises.ch03 import _UNWRITTEN, _only_rows_of_out, _Rows, _watched

NAN = float("nan")

# --- predict the gain ----------------------------------------------------------------------------------------------


def _gain(alpha: float, gamma: int, cost: float) -> tuple[float, float]:
    tokens = speculative.expected_tokens(alpha, gamma)
    return tokens, tokens / (gamma * cost + 1)


_SLIPS: dict[str, dict[str, Callable[[float, int, float], float]]] = {
    "tokens": {
        "a draft counts only if all before it were accepted": lambda a, g, c: 1 + a * g,
        "that is gamma times acceptance; a draft counts only if all before it were accepted, and the target adds one":
            lambda a, g, c: a * g,
        "the target adds a token of its own": lambda a, g, c: speculative.expected_tokens(a, g) - 1,
        "with gamma drafts there are gamma + 1 terms": lambda a, g, c: speculative.expected_tokens(a, max(0, g - 1)),
    },
    "speed-up": {
        "drafting costs time too": lambda a, g, c: _gain(a, g, 0)[0],
        "the draft runs once for each of its tokens": lambda a, g, c: _gain(a, g, c)[0] / (c + 1),
        "the target runs once a step, beside the draft": lambda a, g, c: _gain(a, g, c)[0] / (g * c) if g * c else 0.0,
        "that is its inverse": lambda a, g, c: 1 / _gain(a, g, c)[1],
        "every pass of the draft costs cost_ratio; one verifies": lambda a, g, c: _gain(a, g, c)[0] / ((g + 1) * c + 1),
    },
}  # fmt: skip


@checker("05.1")
def gain(function: Callable[..., Any]) -> None:
    """(tokens a step, speed-up) from acceptance, gamma and the cost ratio. Raises: ExerciseError.

    Source: chapter 05.
    """
    rng = random.Random(SEED)
    cases = [(0.6, 5, 0.1), (0.0, 3, 0.2), (1.0, 4, 0.05), (0.5, 0, 0.3), (0.9, 1, 0.0)]
    cases += [(rng.uniform(0.05, 0.95), rng.randint(1, 12), rng.uniform(0.01, 0.6)) for _ in range(20)]
    shown = [f"gain({a:.3g}, {g}, {c:.3g})" for a, g, c in cases]
    answers: dict[str, list[float]] = {name: [] for name in _SLIPS}
    for case, what in zip(cases, shown, strict=True):
        parts = parts_of(function(*case), ", ".join(_SLIPS), what)
        for (name, got), part in zip(answers.items(), parts, strict=True):
            got.append(number(part, f"{what}: {name}"))
    for i, (name, slips) in enumerate(_SLIPS.items()):
        hint = next(
            (
                hint for hint, slip in slips.items()
                if all(abs(value - slip(*case)) <= 1e-9 for value, case in zip(answers[name], cases, strict=True))
            ),
            "",
        )  # fmt: skip
        for case, what, value in zip(cases, shown, answers[name], strict=True):
            right = _gain(*case)[i]
            if hint and abs(value - right) > 1e-9:
                raise ExerciseError(f"{what}: {name} is {value:.4g}: {hint}")
            near(value, right, 1e-6, f"{what}: {name}")


# --- one step ------------------------------------------------------------------------------------------------------


def _rows(rows: int, vocab: int, sharp: float = 3.0) -> Tensor:
    """Random distributions [rows, vocab] float64, with some zeros where there is room for them."""
    x = torch.rand(rows, vocab, dtype=torch.float64) ** sharp + 1e-3
    if vocab > 3:
        x[torch.rand(rows, vocab) < 0.2] = 0.0
        x[:, int(torch.randint(vocab, ()))] += 0.1
    return x / x.sum(1, keepdim=True)


def _may_be_drawn(token: int, probs: Tensor, uniform: float, slack: float = 1e-5) -> bool:
    """Whether inverting the cumulative sums of ``probs`` [vocab] at ``uniform`` gives the token, but for rounding."""
    ends = probs.double().cumsum(0)
    if not 0 <= token < len(probs) or probs[token] <= 0:
        return False
    goal, end = uniform * float(ends[-1]), float(ends[token])
    return end - float(probs[token]) - slack <= goal <= end + slack


def _say_what_was_drawn(token: int, p: Tensor, q: Tensor, uniform: float, what: str) -> None:
    """Refuse a token that is not what the residual gives, and name the mistake where it can be told."""
    left = speculative.residual(p, q)
    if _may_be_drawn(token, left, uniform):
        return
    positive = (p - q).clamp(min=0).double()
    reasons = {
        "it is drawn from p; what was given to the draft must be taken off": p,
        "it is drawn from q": q,
        "it is drawn from q - p; take the positive part of p - q": (q - p).clamp(min=0),
    }
    for reason, probs in reasons.items():
        if float(probs.sum()) > 0 and _may_be_drawn(token, probs, uniform, 0.0):
            raise ExerciseError(f"{what}: token {token} is wrong: {reason}")
    if float(positive[: token + 1].sum()) >= uniform or token == len(p) - 1:
        raise ExerciseError(f"{what}: token {token} is wrong: the positive part of p - q must be normalised")
    raise ExerciseError(f"{what}: token {token} is wrong")


@checker("05.2")
def speculate(function: Callable[..., Any]) -> None:
    """The tokens that one step emits, from p [n + 1, V], q [n, V], drafts, uniforms to accept and one to draw.

    Raises: ExerciseError.  Source: chapter 05.
    """
    rng = random.Random(SEED)
    for trial in range(300):
        n, vocab = rng.randint(0, 5) if trial else 3, rng.choice([2, 3, 6, 12])
        p, q = _rows(n + 1, vocab), _rows(max(n, 1), vocab)[:n]
        if trial % 5 == 0:
            q = p[:n].clone()  # nothing is ever rejected
        elif trial % 3 == 0:
            q = (q + 2 * p[:n]) / 3
        tokens = [int(torch.multinomial(row, 1)) for row in q]
        accept, sample = [0.0 if rng.random() < 0.1 else rng.random() for _ in range(n)], rng.random()
        what = f"step {trial} ({n} drafts, {vocab} tokens)"
        given = function(p.clone(), q.clone(), list(tokens), list(accept), sample)
        _judge_step(given, p, q, tokens, accept, sample, what)


def _judge_step(
    given: Any, p: Tensor, q: Tensor, tokens: list[int], accept: list[float], sample: float, what: str
) -> None:
    if not isinstance(given, list | tuple):
        raise ExerciseError(f"{what} gave a {type(given).__name__}; it must give a list of tokens")
    made = [integer(token, f"{what}: a token") for token in given]
    count = 0
    while count < len(tokens) and accept[count] * q[count, tokens[count]] < p[count, tokens[count]]:
        count += 1
    if len(made) == len(tokens) == count and count:
        raise ExerciseError(f"{what}: all drafts were accepted; one more token is drawn from the last row of p")
    if len(made) != count + 1:
        ratios = ", ".join(f"{float(p[i, t] / q[i, t]):.3g}" for i, t in enumerate(tokens))
        raise ExerciseError(
            f"{what} gave {len(made)} tokens; it must give {count + 1}: p/q of the drafts is {ratios or 'of none'}, "
            f"the uniforms are {', '.join(f'{u:.3g}' for u in accept) or 'none'}"
        )
    if made[:count] != tokens[:count]:
        raise ExerciseError(f"{what} begins {made[:count]}; the accepted drafts are {tokens[:count]}")
    if count == len(tokens):
        if not _may_be_drawn(made[-1], p[count], sample):
            raise ExerciseError(f"{what}: token {made[-1]} after all drafts is not what the last row of p gives")
    else:
        _say_what_was_drawn(made[-1], p[count], q[count], sample, f"{what}, after {count} accepted drafts")


# --- a tree --------------------------------------------------------------------------------------------------------


def _path(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    at, path = -1, []
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent == at and token == choices[at + 1]:
            at = node
            path.append(node)
    return path


@checker("05.3")
def tree_step(function: Callable[..., Any]) -> None:
    """(masks, accepted nodes) of a tree: its parents, its tokens and the target's choices. Raises: ExerciseError.

    Source: chapter 05.
    """
    rng = random.Random(SEED)
    for trial in range(150):
        size = 62 if trial == 0 else rng.randint(0, 12)
        parents = [rng.randint(-1, i - 1) for i in range(size)]
        choices = [rng.randrange(3) for _ in range(size + 1)]
        tokens: list[int] = []
        for i, parent in enumerate(parents):  # siblings differ, as they do in a drafter's tree
            taken = {tokens[j] for j in range(i) if parents[j] == parent}
            wanted = choices[parent + 1]
            tokens.append(wanted if wanted not in taken and rng.random() < 0.6 else 3 + len(taken))
        what = f"tree_step({parents}, {tokens}, {choices})" if size < 8 else f"a tree of {size} nodes"
        masks, path = parts_of(function(list(parents), list(tokens), list(choices)), "masks, path", what)
        _judge_masks(masks, parents, what)
        if not isinstance(path, list | tuple):
            raise ExerciseError(f"{what}: the path is a {type(path).__name__}; it must be a list of nodes")
        got, right = [integer(node, f"{what}: a node of the path") for node in path], _path(parents, tokens, choices)
        if got == [tokens[node] for node in right] != right:
            raise ExerciseError(f"{what}: the path {got} holds tokens; it must hold nodes")
        if got != right:
            raise ExerciseError(f"{what}: the path is {got}; it must be {right}")


def _judge_masks(masks: Any, parents: list[int], what: str) -> None:
    right = speculative.Tree(tuple(parents)).masks()
    if not isinstance(masks, list | tuple) or len(masks) != len(right):
        shown = len(masks) if isinstance(masks, list | tuple) else type(masks).__name__
        raise ExerciseError(f"{what}: masks are {shown}; there must be {len(right)}, one for the root and each node")
    for i, (mask, wanted) in enumerate(zip(masks, right, strict=True)):
        got = integer(mask, f"{what}: mask {i}")
        if got == wanted:
            continue
        if not got >> i & 1:
            raise ExerciseError(f"{what}: mask {i} is {got:#b}; every token sees itself, bit {i}")
        if not got & 1:
            raise ExerciseError(f"{what}: mask {i} is {got:#b}; every token sees the root, bit 0")
        extra = got & ~wanted
        seen = f"bit {extra.bit_length() - 1} is no ancestor" if extra else "an ancestor is missing"
        raise ExerciseError(f"{what}: mask {i} is {got:#b}; it must be {wanted:#b}: {seen}")


# --- the kernel ----------------------------------------------------------------------------------------------------


@checker("05.4")
def residual_kernel(kernel: Any) -> None:
    """Draw from what a rejection leaves: a Triton kernel, or a torch function where no kernel can be launched.

    Raises: ExerciseError.  Source: chapter 05.
    """
    on, rng = where_to_launch("05.4", kernel), random.Random(SEED)
    cases = [(4, 16, 16), (3, 40, 16), (5, 7, 8), (2, 1, 4), (6, 33, 4), (1, 64, 32)]
    cases += [(rng.randint(1, 6), rng.randint(2, 70), rng.choice([4, 8, 16])) for _ in range(8)]
    for number_of, (batch, vocab, block) in enumerate(cases):
        p, q = _rows(batch, vocab).float(), _rows(batch, vocab).float()
        if number_of % 3 == 1:
            q[0] = p[0]
        if number_of % 3 == 2:
            p[0, vocab // 2 :] = 0.0  # nothing is left in the last tiles
            p[0] = p[0] / p[0].sum() if float(p[0].sum()) > 0 else torch.ones(vocab) / vocab
        uniforms = torch.tensor([rng.choice([0.0, 0.999, rng.random(), rng.random()]) for _ in range(batch)])
        what = f"batch {batch}, {vocab} tokens, BLOCK {block}"
        if on is not None:
            got = _launched(kernel, p.to(on), q.to(on), uniforms.to(on), block, what).cpu()
        else:
            got = kernel(p.clone(), q.clone(), uniforms.clone())
        _judge_draws(got, p, q, uniforms, what)


def _launched(kernel: Any, p: Tensor, q: Tensor, uniforms: Tensor, block: int, what: str) -> Tensor:
    """One launch amid poison; gives the tokens [B]."""
    batch, vocab = p.shape
    tensors = {"p": _Rows(p, NAN), "q": _Rows(q, NAN), "u": _Rows(uniforms[:, None], NAN)}
    empty = torch.full((batch, 1), int(_UNWRITTEN), dtype=torch.int64, device=p.device)
    tensors["out"] = _Rows(empty, int(_UNWRITTEN))
    with launching(what), _watched(tensors), np.errstate(all="ignore"):  # a right kernel may choose another value later
        kernel[(batch,)](*(t.pointer for t in tensors.values()), vocab, BLOCK=block)
        if p.is_cuda:
            torch.cuda.synchronize(p.device)
    _only_rows_of_out(tensors, what)
    return tensors["out"].inside[:, 0].clone()


def _judge_draws(got: Any, p: Tensor, q: Tensor, uniforms: Tensor, what: str) -> None:
    if not isinstance(got, Tensor) or got.shape != uniforms.shape or got.is_floating_point():
        shown = f"{list(got.shape)} of {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        raise ExerciseError(f"{what}: the tokens are {shown}; they must be {list(uniforms.shape)} of torch.int64")
    for b, token in enumerate(got.tolist()):
        where = f"{what}: sequence {b}"
        if token == int(_UNWRITTEN):
            raise ExerciseError(f"{where}: nothing was written")
        if not 0 <= token < p.shape[1]:
            raise ExerciseError(f"{where}: token {token} is not in the vocabulary, 0 to {p.shape[1] - 1}")
        if torch.equal(p[b], q[b]) and not _may_be_drawn(token, p[b], float(uniforms[b])):
            raise ExerciseError(f"{where}: p and q are equal, so nothing is left; it must then be drawn from p")
        _say_what_was_drawn(token, p[b], q[b], float(uniforms[b]), where)


# --- find the planted bugs -----------------------------------------------------------------------------------------


def emitted(q: Tensor, accept: Tensor, left: Tensor) -> Tensor:
    """The distribution [V] of the first token: a draft from q, accepted with probability ``accept``, or from ``left``.

    Shapes and units: all [V]; ``left`` need not be normalised.

    Source: exercise 05.5
    """
    accepted = q * accept
    rest = left / left.sum() if left.sum() > 0 else left
    return accepted + (1 - accepted.sum()) * rest


def step_one(p: Tensor, q: Tensor) -> Tensor:
    """One of three versions, of which one is right: p and q [V]; gives [V]. Source: exercise 05.5"""
    return emitted(q, (p >= q).to(p.dtype), (p - q).clamp(min=0))


def step_two(p: Tensor, q: Tensor) -> Tensor:
    """One of three versions, of which one is right: p and q [V]; gives [V]. Source: exercise 05.5"""
    both = torch.minimum(p, q)
    return emitted(q, torch.where(q > 0, both / q, 1.0), p - both)


def step_three(p: Tensor, q: Tensor) -> Tensor:
    """One of three versions, of which one is right: p and q [V]; gives [V]. Source: exercise 05.5"""
    return emitted(q, p, (p - q).clamp(min=0))


_VERSIONS = {"one": step_one, "two": step_two, "three": step_three}
_FAULTS = {"one": "threshold", "three": "match"}
_WORDS = ("threshold", "match", "residual", "roles", "bonus")


@checker("05.5")
def planted_bugs(answer: Any) -> None:
    """{version: (fault, (p [V], q [V]))}: distributions that show what is wrong. Raises: ExerciseError.

    Source: chapter 05.
    """
    faults_found(answer, _VERSIONS, _FAULTS, _WORDS, _tried)


def _tried(given: Any, what: str) -> Tried:
    p, q = _distributions(given, what)
    off = {name: float((version(p, q) - p).abs().max()) for name, version in _VERSIONS.items()}
    return Tried(f"distributions over {len(p)} tokens", off, 1e-4, 1.0)


def _distributions(given: Any, what: str) -> tuple[Tensor, Tensor]:
    found = []
    for name, x in zip(("p", "q"), parts_of(given, "p, q", f"{what}: the input"), strict=True):
        if isinstance(x, list | tuple):
            x = torch.tensor([float(number(v, f"{what}: an entry of {name}")) for v in x], dtype=torch.float64)
        if not isinstance(x, Tensor) or x.ndim != 1 or not x.is_floating_point() or not 1 <= len(x) <= 512:
            shown = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ExerciseError(f"{what}: {name} is {shown}; it must be [V], 1 to 512 probabilities")
        x = x.detach().cpu().double()
        if not bool((x.isfinite() & (x >= 0)).all()) or abs(float(x.sum()) - 1) > 1e-4:
            raise ExerciseError(f"{what}: {name} adds up to {float(x.sum()):.4g}; it must be 0 or more and add up to 1")
        found.append(x / x.sum())
    if len(found[0]) != len(found[1]):
        raise ExerciseError(f"{what}: p has {len(found[0])} entries and q {len(found[1])}; as many")
    return found[0], found[1]
