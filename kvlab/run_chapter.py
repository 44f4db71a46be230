"""Run a chapter as a plain script: no Jupyter, no jupytext, only what the chapter itself imports.

    python -m kvlab.run_chapter chapters/00_memory_wall.md

A chapter's code is written to a real file first, so that ``inspect.getsource`` and Triton, which both read a function's
source, find it. Text is shown as text, a picture as one line that names it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

_FENCE = re.compile(r"^(`{3,})\{code-cell\}[^\n]*$")
_MAGIC = re.compile(r"^\s*[%!]")


@dataclass(frozen=True)
class Cell:
    """One code cell of a chapter.

    Shapes and units: ``line`` is the line of its first line of code in the .md file, from 1; ``tags`` its cell tags.

    Source: CONTRIBUTING.md.
    """

    source: str
    line: int
    tags: tuple[str, ...] = ()


def parse(text: str) -> list[Cell]:
    """The code cells of a chapter, in order.

    Shapes and units: ``text`` is a MyST Markdown file whose code stands in ``{code-cell}`` blocks.

    Raises: ValueError where a block is never closed.

    Source: the MyST notebook format.
    """
    cells: list[Cell] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = _FENCE.match(lines[i])
        i += 1
        if not fence:
            continue
        start = i
        while i < len(lines) and lines[i].rstrip() != fence[1]:
            i += 1
        if i == len(lines):
            raise ValueError(f"text has a code cell in line {start} that is never closed")
        body = lines[start:i]
        tags, skip = _options(body)
        while skip < len(body) and not body[skip].strip():
            skip += 1
        cells.append(Cell("\n".join(body[skip:]), start + skip + 1, tags))
    return cells


def _options(body: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """A cell's tags, and how many of its lines are options: ``:name: value``, or a block between ``---`` lines."""
    if body and body[0].strip() == "---":
        end = next((i for i, line in enumerate(body[1:], 1) if line.strip() == "---"), 0)
    else:
        end = next((i for i, line in enumerate(body) if not line.startswith(":")), len(body)) - 1
    tags = tuple(
        re.findall(r"[\w-]+", " ".join(line.split("tags:", 1)[1] for line in body[: end + 1] if "tags:" in line))
    )
    return tags, end + 1


def script(cells: Sequence[Cell], name: str) -> str:
    """One Python file that holds all cells; a line magic is left out, as a comment.

    Shapes and units: ``name`` says in the first line where the code comes from.

    Source: CONTRIBUTING.md.
    """
    parts = [f"# The code of {name}\n"]
    for number, cell in enumerate(cells, 1):
        lines = [f"# {line}" if _MAGIC.match(line) else line for line in cell.source.splitlines()]
        parts.append(f"# %% cell {number}, line {cell.line}\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


class _Shown:
    """What ``IPython.display.Markdown`` and its like are without IPython: something that prints its text."""

    def __init__(self, data: Any = None, *_: Any, **__: Any) -> None:
        self.data = data

    def __repr__(self) -> str:
        return self.data if isinstance(self.data, str) else f"<{type(self).__name__}>"


def display(*objects: Any, raw: bool = False, metadata: dict[str, Any] | None = None, **_: Any) -> None:
    """Print objects as text, where IPython would render them; of a picture, its alternative text.

    Shapes and units: ``raw`` objects are dictionaries from mime type to data; ``metadata`` as IPython's.

    Source: IPython.
    """
    for thing in objects:
        if raw and isinstance(thing, dict):
            picture = next((mime for mime in thing if mime.startswith("image/")), None)
            if picture is not None:
                about = (metadata or {}).get(picture) or metadata or {}
                print(f"[figure: {about.get('alt', 'no alternative text')}]")
            else:
                print(thing.get("text/markdown") or thing.get("text/plain") or "[output]")
        elif type(thing).__module__.startswith("matplotlib"):
            print("[figure]")
        else:
            # IPython's Markdown and HTML keep their text in `data`.
            data = getattr(thing, "data", None)
            print(data if isinstance(data, str) else repr(thing))


@contextmanager
def _plain_display() -> Iterator[None]:
    """Let ``display`` and ``from IPython.display import ...`` find what prints plain text, IPython installed or not."""
    with mock.patch.object(builtins, "display", display, create=True):
        if importlib.util.find_spec("IPython"):
            with mock.patch("IPython.display.display", display):
                yield
        else:
            with mock.patch.dict(sys.modules, _stand_in_for_ipython()):
                yield


def _stand_in_for_ipython() -> dict[str, types.ModuleType]:
    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    module.clear_output = lambda *_, **__: None  # type: ignore[attr-defined]
    for kind in ("Markdown", "HTML", "Image", "SVG", "Code", "Math", "Latex", "Pretty"):
        setattr(module, kind, type(kind, (_Shown,), {}))
    package.display = module  # type: ignore[attr-defined]
    package.get_ipython = lambda: None  # type: ignore[attr-defined]
    package.version_info = (9, 0, 0, "")  # type: ignore[attr-defined]  # matplotlib asks for it when it draws
    return {"IPython": package, "IPython.display": module}


def run(path: Path | str) -> dict[str, Any]:
    """Run all code cells of a chapter in one namespace, and return that namespace.

    The last expression of a cell is shown, as in a notebook. A cell tagged ``raises-exception`` must raise; its error
    is printed and the chapter goes on. Any other error ends it.

    Shapes and units: ``path`` names the .md file.

    Raises: ValueError where the file is no chapter; RuntimeError, naming file, cell and line, where a cell fails.

    Source: CONTRIBUTING.md.
    """
    path = Path(path)
    if path.suffix != ".md" or not path.is_file():
        raise ValueError(f"path is {str(path)!r}; it must be a chapter's .md file")
    cells = parse(path.read_text(encoding="utf-8"))
    if not cells:
        raise ValueError(f"path is {str(path)!r}; that file has no {{code-cell}} blocks")
    if importlib.util.find_spec("matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
    folder = Path(tempfile.mkdtemp(prefix="kvlab-chapter-"))
    file = folder / f"chapter_{path.stem}.py"
    text = script(cells, path.name)
    file.write_text(text, encoding="utf-8")
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines, 1) if line.startswith("# %% cell ")]
    with _plain_display():
        for number, (cell, start) in enumerate(zip(cells, starts, strict=True), 1):
            place = f"{path.name}, code cell {number}, line {cell.line}"
            code = lines[start : start + len(cell.source.splitlines())]
            try:
                _run_cell("\n" * start + "\n".join(code), file, module)
            except Exception as error:
                if "raises-exception" not in cell.tags:
                    raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
                print(f"{type(error).__name__}: {error}")
            else:
                if "raises-exception" in cell.tags:
                    raise RuntimeError(f"{place}: it is tagged raises-exception and raised nothing")
    return vars(module)


def _run_cell(source: str, file: Path, module: types.ModuleType) -> None:
    tree = ast.parse(source, str(file))
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(file), "exec"), vars(module))
        return
    tree.body.pop()
    exec(compile(tree, str(file), "exec"), vars(module))
    value = eval(compile(ast.Expression(last.value), str(file), "eval"), vars(module))
    if value is not None and not source.rstrip().endswith(";"):
        display(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chapters named on the command line; returns 1 where one fails.

    Shapes and units: ``arguments`` are the command line's, without the program.

    Source: CONTRIBUTING.md.
    """
    parser = argparse.ArgumentParser(prog="python -m kvlab.run_chapter", description="Run a chapter as a plain script.")
    parser.add_argument("chapter", nargs="+", help="a chapter's .md file")
    for chapter in parser.parse_args(arguments).chapter:
        print(f"== {chapter}", flush=True)
        run(chapter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
