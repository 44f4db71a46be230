"""Exercises: ``check("02.1", answer)`` says "not yet", "right", or precisely what is wrong.

The checkers of chapter NN are in ``chNN.py`` beside this file, loaded when one of them is first asked for. A checker
takes the answer, returns nothing where it is right, and raises ``ExerciseError`` where it is not::

    @checker("02.1")
    def pages(function):
        for tokens in (0, 1, 15, 16, 17):
            near(function(tokens, 16), -(-tokens // 16), what=f"pages({tokens}, 16)")

It tests properties on inputs that it draws, never stored outputs. One seed draws them: an answer is judged alike every
time, and whoever mends one meets the case that failed again.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab import runtime

Checker = Callable[[Any], None]

SEED = 0  # of every checker's random.Random; torch's own numbers begin from it too

_CHECKERS: dict[str, Checker] = {}


class ExerciseError(AssertionError):
    """An answer is wrong; the message says what about it. Source: each chapter's exercises."""


class _NotYet(Exception):
    """A stub returned ``...``."""


def checker(exercise: str) -> Callable[[Checker], Checker]:
    """Register the decorated function as the checker of an exercise such as "02.1".

    Raises: ValueError where the id is not a chapter's number, a dot and a number, or has a checker already.

    Source: CONTRIBUTING.md.
    """
    if not isinstance(exercise, str) or not re.fullmatch(r"[0-9]{2}[a-z]?\.[0-9]+", exercise):
        raise ValueError(f"exercise is {exercise!r}; it must be a chapter and a number, such as '02.1'")

    def register(function: Checker) -> Checker:
        known = _CHECKERS.get(exercise)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"exercise {exercise} has a checker already: {known.__module__}.{known.__qualname__}")
        _CHECKERS[exercise] = function
        return function

    return register


def exercises(chapter: str) -> list[str]:
    """The ids of a chapter's exercises, in order; ``chapter`` is its number, such as "02".

    Raises: ValueError where the chapter has no exercises.

    Source: CONTRIBUTING.md.
    """
    name = f"kvlab.exercises.ch{chapter}"
    if not isinstance(chapter, str):
        raise ValueError(f"chapter is {chapter!r}; it must be a string such as '02'")
    if chapter.isalnum() and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
    found = sorted((e for e in _CHECKERS if e.split(".")[0] == chapter), key=lambda e: int(e.split(".")[1]))
    if not found:
        raise ValueError(f"chapter {chapter!r} has no exercises; ids look like '02.1'")
    return found


def outcome(exercise: str, answer: Any) -> str:
    """Judge an answer: "right", or "not yet" where it is or returns ``...``.

    Raises: ExerciseError where the answer is wrong or fails; ValueError for an unknown exercise.

    Source: each chapter's exercises.
    """
    if not isinstance(exercise, str):
        raise ValueError(f"exercise is {exercise!r}; it must be a string such as '02.1'")
    known = exercises(exercise.split(".")[0])
    if exercise not in known:
        raise ValueError(f"there is no exercise {exercise!r}; this chapter has {', '.join(known)}")
    if _unsolved(answer):
        return "not yet"
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(SEED)  # of every GPU too
            _CHECKERS[exercise](_guarded(answer))
    except _NotYet:
        return "not yet"
    except ExerciseError as error:
        raise ExerciseError(f"{exercise}: {error}") from error.__cause__
    except Exception as error:
        raise ExerciseError(f"{exercise}: the answer could not be used: {_described(error)}") from error
    return "right"


def check(exercise: str, answer: Any) -> None:
    """Print "right" or "not yet" for an answer to an exercise.

    Shapes and units: ``answer`` is what the exercise asks for: a number, a tensor, a function or a kernel. ``...``,
    something that holds it, or a function that returns it is a stub not yet filled in.

    Raises: ExerciseError that says what is wrong; ValueError for an unknown exercise.

    Source: each chapter's exercises.
    """
    print(f"{exercise}: {outcome(exercise, answer)}")


def assert_refuses(exercise: str, wrong_answers: Sequence[Any]) -> None:
    """For tests: assert that an exercise's checker refuses each of at least two wrong answers, and says why.

    Raises: AssertionError naming the first answer that is let through; ValueError for fewer than two.

    Source: CONTRIBUTING.md.
    """
    if len(wrong_answers) < 2:
        raise ValueError(f"wrong_answers has {len(wrong_answers)} entries; show at least two to be refused")
    for i, wrong in enumerate(wrong_answers):
        name = getattr(wrong, "__name__", repr(wrong))
        try:
            result = outcome(exercise, wrong)
        except ExerciseError as error:
            if len(str(error)) < len(exercise) + 10:
                raise AssertionError(f"wrong answer {i} ({name}) is refused without a reason: {error}") from None
        else:
            raise AssertionError(f"exercise {exercise} says {result!r} to wrong answer {i} ({name})")


# --- what checkers are made of -------------------------------------------------------------------------------------


def number(value: Any, what: str = "the answer") -> float | int:
    """``value`` as a plain finite number; a tensor or array of one element is taken for its element.

    Raises: ExerciseError for NaN, infinity, a boolean, ``None``, text or anything else that is no number.

    Source: CONTRIBUTING.md.
    """
    value = _element(value)
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    if hasattr(value, "item") and isinstance(size, int) and size != 1:
        raise ExerciseError(f"{what} has {size} elements; it must be one number")
    if isinstance(value, bool):
        raise ExerciseError(f"{what} is {value}, a boolean; it must be a number")
    if not isinstance(value, int | float):
        raise ExerciseError(f"{what} is {_short(value)}, of type {type(value).__name__}; it must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ExerciseError(f"{what} is {value}; it must be a finite number")
    return value


def integer(value: Any, what: str = "the answer") -> int:
    """``value`` as a Python int; NumPy's integers, and a tensor or array of one integer, are taken for theirs.

    Raises: ExerciseError as ``number``, and for a float, a whole one too.

    Source: CONTRIBUTING.md.
    """
    got = number(value, what)
    if not isinstance(got, int):
        raise ExerciseError(f"{what} is {_number(got)}, a float; it must be an integer")
    return got


def near(value: Any, expected: float, rel: float = 1e-6, what: str = "the answer") -> None:
    """Accept a number within a relative distance of the expected one; an expected 0 must be met to 1e-9.

    Raises: ExerciseError that says whether the value is no number, too large or too small, and by what factor;
    ValueError where ``expected`` is not finite, or ``rel`` not finite or negative.

    Source: CONTRIBUTING.md.
    """
    _check_rel(rel)
    if not math.isfinite(expected):
        raise ValueError(f"expected is {expected}; it must be a finite number")
    got = number(value, what)
    if abs(got - expected) <= (rel * abs(expected) if expected else 1e-9):
        return
    if expected == 0:
        raise ExerciseError(f"{what} is {_number(got)}; it must be 0")
    if got == 0:
        raise ExerciseError(f"{what} is 0, and should not be")
    if (got < 0) != (expected < 0):
        raise ExerciseError(f"{what} is {_number(got)}: its sign is wrong")
    ratio = got / expected
    size = "too large" if ratio > 1 else "too small"
    factor = max(ratio, 1 / ratio)
    by = f"by {factor - 1:.3%}" if factor < 1.1 else f"by a factor of {factor:.4g}"
    raise ExerciseError(f"{what} is {_number(got)}: {size} {by}")


def whole(value: Any, expected: int, what: str = "the answer") -> None:
    """Accept exactly the expected whole number, as an integer (see ``integer``); 3.0 is none.

    Raises: ExerciseError that says whether it is no integer, too large or too small.

    Source: CONTRIBUTING.md.
    """
    got = integer(value, what)
    if got != expected:
        raise ExerciseError(f"{what} is {_number(got)}: too {'large' if got > expected else 'small'}")


def close(value: Any, expected: Tensor, *, rel: float = 1e-4, what: str = "the answer") -> None:
    """Accept a tensor of the expected one's shape whose largest error is within ``rel`` of its largest element.

    Shapes and units: ``expected`` of any shape, real, without NaN; infinities must stand in the same places.

    Raises: ExerciseError that names a wrong type, shape, NaN or the place of the largest error; ValueError where
    ``expected`` holds complex numbers or NaN, or ``rel`` is not finite or negative.

    Source: CONTRIBUTING.md.
    """
    _check_rel(rel)
    if expected.is_complex() or bool(expected.isnan().any()):
        raise ValueError(f"expected holds {'complex numbers' if expected.is_complex() else 'NaN'}; it must hold none")
    if not isinstance(value, Tensor):
        raise ExerciseError(f"{what} is of type {type(value).__name__}; it must be a tensor")
    if tuple(value.shape) != tuple(expected.shape):
        raise ExerciseError(f"{what} has shape {list(value.shape)}; it must be {list(expected.shape)}")
    if value.is_complex() or (value.dtype == torch.bool) != (expected.dtype == torch.bool):
        kind = "booleans" if value.dtype == torch.bool else value.dtype
        raise ExerciseError(f"{what} holds {kind}; it must hold {expected.dtype}")
    got, want = value.detach().cpu().double(), expected.detach().cpu().double()
    if got.numel() == 0:
        return
    if bool(got.isnan().any()):
        raise ExerciseError(f"{what} is NaN at {_place(got.isnan())}")
    infinite = want.isinf() | got.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        wrong = infinite & (got != want)
        raise ExerciseError(
            f"{what} is {got[wrong][0].item():g} at {_place(wrong)}; it must be {want[wrong][0].item():g}"
        )
    error = torch.where(infinite, torch.zeros_like(got), (got - want).abs())
    scale = float(torch.where(infinite, torch.zeros_like(want), want.abs()).max())
    worst = float(error.max())
    if worst > rel * max(scale, 1e-12):
        at = _place(error == worst)
        raise ExerciseError(f"{what} is off by {worst:.3g} at {at} (the largest element is {scale:.3g})")


def parts_of(value: Any, names: str, what: str) -> list[Any]:
    """The parts of a tuple or list that must hold what ``names`` lists, such as "q, k, v".

    Raises: ExerciseError where it is none, or holds more or fewer.

    Source: CONTRIBUTING.md.
    """
    wanted = names.split(", ")
    if not isinstance(value, tuple | list) or len(value) != len(wanted):
        shown = f"{len(value)} things" if isinstance(value, tuple | list) else type(value).__name__
        raise ExerciseError(f"{what} gave {shown}; it must give ({names})")
    return list(value)


def where_to_launch(exercise: str, answer: Any) -> torch.device | None:
    """Where to launch an answer that must be a kernel; None where none can be launched and it is a PyTorch function.

    A kernel that cannot be launched is not judged, and a line says so.

    Raises: ExerciseError where a kernel could be launched and the answer is none.

    Source: CONTRIBUTING.md.
    """
    on = torch.device("cpu") if runtime.INTERPRET else runtime.device()
    inner = answer
    while not isinstance(inner, type) and getattr(inner, "fn", None) is not None:
        inner = inner.fn
    is_kernel, launchable = inner is not answer and callable(inner), runtime.can_launch(on)
    if is_kernel and not launchable:
        print(f"{exercise}: skipped, no kernel can be launched on this machine; a PyTorch function can be checked")
        raise _NotYet
    if not is_kernel and launchable:
        shown = getattr(answer, "__wrapped__", answer)
        raise ExerciseError(f"the answer is of type {type(shown).__name__}; it must be a kernel under @triton.jit")
    return on if launchable else None


@contextlib.contextmanager
def launching(what: str) -> Iterator[None]:
    """Run a kernel that is an answer: whatever it raises is its own fault, said in one line.

    Raises: ExerciseError, from inside the kernel or made of what it raised.

    Source: CONTRIBUTING.md.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, ExerciseError):
            cause = cause.__cause__
        if isinstance(cause, ExerciseError):
            raise ExerciseError(f"{what}: {cause}") from None
        text = (str(cause).strip() or "no message").splitlines()[-1]
        raise ExerciseError(f"{what}: the kernel could not be run: {type(cause).__name__}: {text}") from error


class Tried(NamedTuple):
    """What versions of a function did on an input: how it is called, how far each was off, what rounding may do, and
    the largest score. Source: CONTRIBUTING.md."""

    sizes: str
    off: Mapping[str, float]
    limit: float
    largest: float


def faults_found(
    answer: Any, versions: Iterable[str], faults: Mapping[str, str], words: Sequence[str],
    run: Callable[[Any, str], Tried],
) -> None:  # fmt: skip
    """Accept {version: (fault, input)}: for each faulty version its fault, and an input that it alone fails on.

    Shapes and units: ``faults`` {version: fault} of the versions that are wrong; ``words`` the faults there might be;
    ``run(input, what)`` tries every version on an input.

    Raises: ExerciseError that says which entry is wrong, and how; as ``run``.

    Source: CONTRIBUTING.md.
    """
    if not isinstance(answer, dict):
        raise ExerciseError(f"the answer is a {type(answer).__name__}; it must be {{version: (fault, input)}}")
    known = list(versions)
    for version, found in answer.items():
        if version not in known:
            raise ExerciseError(f"there is no version {version!r}; there are {', '.join(map(repr, known))}")
        what = f"version {version!r}"
        fault, given = parts_of(found, "fault, input", f"{what}: the entry")
        if fault not in words:
            raise ExerciseError(f"{what}: the fault is {fault!r}; it must be one of {', '.join(words)}")
        sizes, off, limit, largest = run(given, what)
        if off[version] <= limit:
            if largest > 1e6:
                raise ExerciseError(f"on {sizes} scores of {largest:.1g} are rounded too coarsely to tell; take less")
            raise ExerciseError(f"on {sizes} {what} is right: it is off by {off[version]:.2g}")
        others = [name for name in off if name != version and off[name] > limit]
        if others:
            raise ExerciseError(f"on {sizes} version {others[0]!r} is wrong too; find one that {version!r} alone fails")
        if fault != faults.get(version):
            raise ExerciseError(f"{sizes} shows that it is wrong, but its fault is not {fault!r}")
    if len(answer) < len(faults):
        raise ExerciseError(f"{len(answer)} of the {len(known)} versions are named; {len(faults)} are wrong")


def same_function(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Iterable[tuple[Any, ...]], *, rel: float = 1e-6
) -> None:
    """Accept a function that gives what a reference gives on each of the inputs, which are hidden and drawn anew.

    Shapes and units: ``inputs`` yields tuples of arguments; each function gets a copy of its own. Numbers and tensors
    are compared within ``rel``, lists, tuples and dicts element by element, everything else by equality.

    Raises: ExerciseError that names the arguments of the first difference; ValueError where there are no inputs.

    Source: CONTRIBUTING.md.
    """
    name, tried = getattr(function, "__name__", "the function"), list(inputs)
    if not tried:
        raise ValueError("inputs is empty; a function must be tried on at least one")
    for args in tried:
        expected = reference(*copy.deepcopy(args))
        shown = ", ".join(_short(a) for a in args)
        _same(function(*copy.deepcopy(args)), expected, rel, f"{name}({shown})")


def _same(value: Any, expected: Any, rel: float, what: str) -> None:
    if isinstance(expected, Tensor) and expected.ndim:
        return close(value, expected, rel=rel, what=what)
    expected = _element(expected)
    if isinstance(expected, bool | str):
        value = _element(value)
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        if type(value) is not type(expected) or value != expected:
            raise ExerciseError(f"{what} is {_short(value)}; it must be {_short(expected)}")
    elif isinstance(expected, int | float):
        near(value, expected, rel, what)
    elif isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            raise ExerciseError(f"{what} is {_short(value)}; it must be a list of {len(expected)}")
        for i, (a, b) in enumerate(zip(value, expected, strict=True)):
            _same(a, b, rel, f"{what}[{i}]")
    elif isinstance(expected, dict):
        if not isinstance(value, dict) or set(value) != set(expected):
            raise ExerciseError(f"{what} is {_short(value)}; its keys must be {sorted(map(str, expected))}")
        for key in expected:
            _same(value[key], expected[key], rel, f"{what}[{key!r}]")
    elif value != expected:
        raise ExerciseError(f"{what} is {_short(value)}; it must be {_short(expected)}")


def _unsolved(answer: Any) -> bool:
    if answer is ...:
        return True
    if isinstance(answer, dict):
        return any(_unsolved(v) for v in answer.values())
    return isinstance(answer, list | tuple | set) and any(_unsolved(v) for v in answer)


class _Guarded:
    """A callable whose failures are reported as its own, and whose ``...`` means that it is a stub; else as it is."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.__wrapped__ = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)

    def __getitem__(self, key: Any) -> Any:  # a kernel's grid
        return self.__wrapped__[key]  # type: ignore[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.__wrapped__(*args, **kwargs)
        except (ExerciseError, _NotYet):
            raise
        except Exception as error:
            name = getattr(self.__wrapped__, "__name__", "the function")
            shown = ", ".join([*map(_short, args), *(f"{k}={_short(v)}" for k, v in kwargs.items())])
            raise ExerciseError(f"{name}({shown}) raised {_described(error)}") from error
        if _unsolved(result):
            raise _NotYet
        return result


def _guarded(answer: Any) -> Any:
    return _Guarded(answer) if callable(answer) and not isinstance(answer, type) else answer


def _element(value: Any) -> Any:
    """The element of a tensor or array of one, or of a NumPy scalar, as Python's own; anything else as it is."""
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    return value.item() if hasattr(value, "item") and size == 1 else value


def _check_rel(rel: float) -> None:
    if not 0 <= rel < math.inf:
        raise ValueError(f"rel is {rel}; it must be a finite number, 0 or more")


def _described(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _place(where: Tensor) -> str:
    return str(where.nonzero()[0].tolist()) if where.ndim else "its one element"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}" if value.numel() > 8 else f"tensor({value.tolist()})"
    name = getattr(value, "name", None)
    text = name if isinstance(name, str) and not isinstance(value, type) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
