"""Show the library's own source in a chapter, so that no chapter holds a copy of it.

``show(fn)`` and ``show_diff(old, new)`` take functions, classes, methods and Triton kernels, however decorated;
``show_of(module, name)`` takes their names, for modules that do not load on every machine.
"""

from __future__ import annotations

import difflib
import functools
import html
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

from kvlab import display


def unwrap(obj: Any) -> Any:
    """The Python function or class beneath decorators: jit, autotune, launch counting, functools.wraps, methods.

    Raises: ValueError for something that is no function, class or module beneath.

    Source: chapter 02.
    """
    inner, seen = obj, 0
    while seen < 32:
        seen += 1
        if isinstance(inner, staticmethod | classmethod | functools.partial):
            inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
        elif isinstance(inner, property):
            inner = inner.fget
        elif inspect.isclass(inner) or inspect.ismodule(inner):
            return inner
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        elif not inspect.isfunction(inner) and hasattr(inner, "fn"):
            inner = inner.fn
        elif inspect.isfunction(inner):
            return inner
        else:
            break
    raise ValueError(f"obj is {obj!r}, a {type(obj).__name__}; it must be a function, a kernel, a class or a module")


def text(obj: Any, *, docstring: bool = False) -> str:
    """The source of a function, kernel or class, decorators included, unindented; without its docstrings by default.

    Raises: ValueError where there is no source to be had: something built in, or defined through exec.

    Source: chapter 02.
    """
    source, _, _ = _located(obj)
    return source if docstring else _without_docstrings(source)


def location(obj: Any) -> str:
    """Where an object is defined, as "kvlab/costs.py:31"; a cell of a notebook is "this notebook".

    Raises: ValueError as ``text``.  Source: chapter 02.
    """
    _, path, line = _located(obj)
    if path is None:
        return "this notebook"
    root = Path(__file__).resolve().parent.parent
    name = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return f"{name.as_posix()}:{line}"


def show(obj: Any, *, docstring: bool = False) -> None:
    """Show the source of a function, kernel or class, highlighted in a notebook and printed by a script.

    Shapes and units: ``docstring=True`` keeps the docstrings.

    Raises: ValueError as ``text``.

    Source: chapter 02.
    """
    code, where = text(obj, docstring=docstring), location(obj)
    fence = "`" * max(3, _longest_ticks(code) + 1)
    bundle = {"text/plain": f"# {where}\n{code}", "text/markdown": f"`{where}`\n\n{fence}python\n{code}\n{fence}"}
    display.emit(bundle)


def show_of(module: str, *names: str) -> None:
    """Show functions of a module that may not load on every machine; where it does not, say where they are.

    Raises: AttributeError where the module has no such function.

    Source: chapter 04.
    """
    try:
        found = importlib.import_module(module)
    except ImportError:  # no Triton on this machine, or one without Gluon
        print(f"{', '.join(names)}: see {module.replace('.', '/')}.py")
        return
    for name in names:
        show(getattr(found, name))


def show_diff(old: Any, new: Any, *, docstring: bool = False) -> None:
    """Show what changed from one function, kernel or class to another, as a coloured unified diff.

    Shapes and units: both as ``show`` takes them; ``docstring=True`` compares the docstrings too.

    Raises: ValueError as ``text``.

    Source: chapter 02.
    """
    names = location(old), location(new)
    before, after = (text(x, docstring=docstring).splitlines() for x in (old, new))
    lines = list(difflib.unified_diff(before, after, *names, n=max(len(before), len(after)), lineterm=""))
    lines = [line for line in lines if not line.startswith("@@")] or [
        f"(no difference between {names[0]} and {names[1]})"
    ]
    plain = "\n".join(lines)
    display.emit({"text/plain": plain, "text/html": _coloured(lines)})


def _coloured(lines: list[str]) -> str:
    """The diff as HTML. Each colour has its own background, so that it reads on light and dark pages."""
    colors = {"+": "background:#d7f5dd;color:#0b3d17", "-": "background:#fbe0e0;color:#5c1111"}
    rows = []
    for i, line in enumerate(lines):
        head = i < 2 and line.startswith(("---", "+++"))
        css = "font-weight:bold" if head else colors.get(line[:1], "")
        rows.append(f'<span style="{css}">{html.escape(line) or " "}</span>' if css else html.escape(line))
    body = "\n".join(rows)
    return f'<pre class="kvlab-diff" style="overflow-x:auto;line-height:1.35;font-size:85%">{body}</pre>'


def _located(obj: Any) -> tuple[str, Path | None, int]:
    """Source, file (None for a notebook's cell) and first line."""
    inner = unwrap(obj)
    name = getattr(inner, "__qualname__", getattr(inner, "__name__", repr(inner)))
    try:
        lines, first = inspect.getsourcelines(inner)
        file = inspect.getsourcefile(inner) or ""
    except (OSError, TypeError) as error:
        raise ValueError(
            f"source not available for {name}: it is built in, or was defined through exec, which keeps no source; "
            f"run as a notebook, as a script or from a file ({error})"
        ) from None
    if not lines or not (inspect.ismodule(inner) or _holds(lines, inner)):
        raise ValueError(
            f"source not available for {name}: its file changed after it was imported; restart and import again"
        )
    source = textwrap.dedent("".join(lines)).rstrip("\n")
    path = Path(file)
    in_cell = not path.exists() or path.name.startswith("ipykernel_") or "ipykernel_" in path.as_posix()
    return source, None if in_cell else path.resolve(), max(first, 1)


def _holds(lines: list[str], function: Any) -> bool:
    text = "".join(lines)
    return any(f"{word} {function.__name__}" in text for word in ("def", "class")) or "lambda" in text


def _without_docstrings(source: str) -> str:
    """Source without the docstrings of the function or class and of what is defined in it."""
    import ast

    try:
        tree = ast.parse(source)
    except SyntaxError:  # part of a larger expression, such as a lambda in a call
        return source
    lines: list[str | None] = list(source.splitlines())
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) or not node.body:
            continue
        first = node.body[0]
        if not (
            isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        ):
            continue
        end = first.end_lineno or first.lineno
        only = len(node.body) == 1
        for number in range(first.lineno - 1, end):
            lines[number] = None
        if only:  # the docstring was the body
            lines[first.lineno - 1] = " " * first.col_offset + "..."
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.body[1].lineno > end + 1:
            while end < len(lines) and lines[end] is not None and not str(lines[end]).strip():
                lines[end] = None
                end += 1
    return "\n".join(line for line in lines if line is not None)


def _longest_ticks(code: str) -> int:
    longest = run = 0
    for character in code:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    return longest
