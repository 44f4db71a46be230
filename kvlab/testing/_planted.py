"""Planted bugs: proof that tests bite."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlab import source as sources

Replacement = tuple[str, str] | Sequence[tuple[str, str]]

_planted_files: tempfile.TemporaryDirectory[str] | None = None
_planted_count = itertools.count()


def planted(fn: Any, replace: Replacement, *, give: str | None = None) -> Any:
    """A copy of a function, kernel or method with text of its source replaced: the same code with one mistake in it.

    The copy of the whole module lies in a file of its own, so that Triton can read it, and everything in that module
    that calls the function calls the changed one. A function defined in a notebook is copied alone.

    Shapes and units: ``fn`` as ``kvlab.show`` takes it, or the text of a module; ``replace`` is (old, new) or a list of
    such pairs, each old text standing exactly once in the function's source; ``give`` names what to return from the
    changed module (default: the function itself), such as the public function around a kernel.

    Raises: ValueError where an old text does not stand exactly once, or changes nothing, or ``give`` is not there, or
    is not said for a function inside another.

    Source: chapter 02.
    """
    single = isinstance(replace, tuple) and len(replace) == 2 and isinstance(replace[0], str)
    pairs: list[Any] = [replace] if single else list(replace)
    if not pairs:
        raise ValueError("replace is empty; a planted bug needs at least one (old, new) pair")
    seeded: dict[str, Any] = {}
    if isinstance(fn, str):
        if give is None:
            raise ValueError("give is None; for the text of a module it must name what to return")
        changed, name, path = _replaced(fn, pairs, "the module's text"), give, Path("text.py")
    else:
        inner = sources.unwrap(fn)
        if give is None and "<locals>" in inner.__qualname__:
            raise ValueError(f"{inner.__qualname__} stands inside a function; give must name what to return instead")
        name = give or inner.__qualname__.split(".")[0]
        try:
            lines, first = inspect.getsourcelines(inner)
        except (OSError, TypeError):
            raise ValueError(
                f"source not available for {inner.__qualname__}; define it in a file or a notebook"
            ) from None
        span = "".join(lines)
        new = _replaced(span, pairs, f"the source of {inner.__qualname__}")
        path = Path(inspect.getsourcefile(inner) or "")
        if path.exists() and not path.name.startswith("ipykernel_"):
            whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
            start = max(first - 1, 0)
            changed = "".join([*whole[:start], new, *whole[start + len(lines) :]])
        else:
            changed, seeded, path = textwrap.dedent(new), dict(inner.__globals__), Path("cell.py")
    module = _module(changed, path.stem, seeded)
    if not hasattr(module, name):
        raise ValueError(f"the changed module has no {name!r}; give must name one of its functions or classes")
    return getattr(module, name)


def assert_caught(check: Callable[[Any], Any], fn: Any, bugs: Mapping[str, Any], *, give: str | None = None) -> None:
    """Assert that a check passes on the original and fails, by an AssertionError, on each planted bug.

    What NumPy says about the numbers that a changed kernel computes in the interpreter is not shown: a stray read meets
    other numbers in every run.

    Shapes and units: ``check`` takes the function under test; ``bugs`` maps a bug's name to its ``replace`` (see
    ``planted``), or to a variant made already; ``give`` as in ``planted``.

    Raises: AssertionError naming the bugs that go unnoticed; ValueError as ``planted``, or where there are no bugs.

    Source: chapter 02.
    """
    if not bugs:
        raise ValueError("bugs is empty; name at least one")
    original = fn
    if give is not None and not isinstance(fn, str):
        original = getattr(sys.modules[sources.unwrap(fn).__module__], give)
    elif not isinstance(fn, str) and "<locals>" not in sources.unwrap(fn).__qualname__:
        inner = sources.unwrap(fn)
        if "." in inner.__qualname__:  # of a method, its class
            original = getattr(sys.modules[inner.__module__], inner.__qualname__.split(".")[0])
    elif isinstance(fn, str):
        original = getattr(_module(fn, "text", {}), give or "")
    check(original)
    unnoticed = []
    for name, bug in bugs.items():
        variant = planted(fn, bug, give=give) if isinstance(bug, tuple | list) else bug
        try:
            with np.errstate(all="ignore"):
                check(variant)
        except AssertionError:
            continue
        unnoticed.append(name)
    assert not unnoticed, f"planted bugs that the check does not notice: {', '.join(unnoticed)}"


def _replaced(text: str, pairs: Iterable[tuple[str, str]], what: str) -> str:
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {what}; it must stand exactly once")
        if old == new:
            raise ValueError(f"replacing {old!r} by itself changes nothing")
        text = text.replace(old, new)
    return text


def _module(text: str, stem: str, seeded: dict[str, Any]) -> types.ModuleType:
    global _planted_files
    if _planted_files is None:
        _planted_files = tempfile.TemporaryDirectory(prefix="kvlab-planted-")
    name = f"kvlab_planted_{stem}_{next(_planted_count)}"
    file = Path(_planted_files.name) / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update({k: v for k, v in seeded.items() if not (k.startswith("__") and k.endswith("__"))})
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
