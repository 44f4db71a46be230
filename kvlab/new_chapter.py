"""Lay out the files of a new chapter.

    python -m kvlab.new_chapter 02 paged

writes the chapter and its solutions (each a .md file and its notebook), the module, the checkers of its exercises and
the tests of both, gives the module its step in pyproject.toml and the chapter its row on the front page. What it writes
runs and passes its tests; it is the form, and the chapter is what you put in.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3 (ipykernel)
  language: python
  name: python3
---

"""

_CHAPTER = """# Chapter {number}: {title}

What hurts after the last chapter, in three sentences, and what this one does about it.

```{{code-cell}} ipython3
from kvlab import exercises, {name}, show
```

## 1. The problem, measured

The last chapter's module on the workload that hurts.

## 2. The idea

First five tokens, everything printed and checkable by hand; then a picture drawn from the real data structures; then
the mathematics.

## 3. In PyTorch

Twenty readable lines that are right and slow.

## 4. The kernel

Built up in steps. The final source is shown from the library, never pasted.

```{{code-cell}} ipython3
show({name}.bytes_moved)
```

## 5. Checked

Against the naive reference, over the shared hostile table (`kvlab.testing`).

## 6. Predicted, then measured

Bytes and FLOPs from `kvlab.costs` are asserted against counted ones; recorded figures stand beside this machine's.

```{{code-cell}} ipython3
:tags: [nbval-check-output]

print({name}.bytes_moved(1024, 2))
```

## 7. When this is slower

And the trap in benchmarking it.

## 8. In production

The same idea's name, flag and file in vLLM, SGLang, FlashAttention and FlashInfer; what they do beyond.

## 9. Claims

Each claim that this chapter settles gets a cell that calls `kvlab.claims.verdict`.

## 10. Exercises

**{number}.1** How many bytes does one pass over 4096 elements of two bytes read?

```{{code-cell}} ipython3
answer = ...
exercises.check("{number}.1", answer)
```

## 11. Summary

Five lines, and the references.

**Errata.** None known.
"""

_SOLUTIONS = """# Solutions {number}: {title}

```{{code-cell}} ipython3
from kvlab import exercises
```

**{number}.1** Each element is read once.

```{{code-cell}} ipython3
answer = 4096 * 2
exercises.check("{number}.1", answer)
```
"""

_MODULE = '''"""{title}: what this step of the library does, in one sentence.

The naive version first, then the kernel, then the public function.
"""

from __future__ import annotations


def bytes_moved(num_elements: int, element_bytes: int) -> int:
    """Bytes that one pass over the elements reads.

    Shapes and units: ``num_elements`` counts elements, ``element_bytes`` is the bytes of one of them.

    Raises: ValueError where one of them is negative.

    Source: chapter {number}.
    """
    for argument, value in (("num_elements", num_elements), ("element_bytes", element_bytes)):
        if value < 0:
            raise ValueError(f"{{argument}} is {{value}}; it must be 0 or more")
    return num_elements * element_bytes
'''

_EXERCISES = '''"""Checkers of chapter {number}: properties on inputs drawn anew; no stored outputs."""

from __future__ import annotations

from typing import Any

from kvlab import {name}
from kvlab.exercises import checker, whole


@checker("{number}.1")
def bytes_of_one_pass(answer: Any) -> None:
    """The bytes of one pass over 4096 elements of two bytes. Source: chapter {number}."""
    whole(answer, {name}.bytes_moved(4096, 2), what="the bytes")
'''

_TEST = '''"""{title}: the module of chapter {number}."""

from __future__ import annotations

import pytest

from kvlab import {name}


def test_bytes_are_counted_once_for_each_element():
    assert {name}.bytes_moved(1024, 2) == 2048
    assert {name}.bytes_moved(0, 2) == 0


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="num_elements is -1"):
        {name}.bytes_moved(-1, 2)
'''

_EXERCISE_TEST = '''"""The exercises of chapter {number}: right answers pass, wrong ones are refused with a reason."""

from __future__ import annotations

from kvlab import exercises


def test_bytes_of_one_pass():
    assert exercises.outcome("{number}.1", 8192) == "right"
    assert exercises.outcome("{number}.1", ...) == "not yet"
    exercises.assert_refuses("{number}.1", [4096, 8192.5])
'''


def files(number: str, name: str, title: str) -> dict[str, str]:
    """The text of each new file, by its path in the repository.

    Shapes and units: ``number`` such as "02" or "03b"; ``name`` the module's, such as "paged"; ``title`` in words.

    Source: CONTRIBUTING.md.
    """
    stem = f"{number}_{name}"
    templates = {
        f"chapters/{stem}.md": _HEADER + _CHAPTER,
        f"chapters/solutions/{stem}.md": _HEADER + _SOLUTIONS,
        f"kvlab/{name}.py": _MODULE,
        f"kvlab/exercises/ch{number}.py": _EXERCISES,
        f"tests/test_{name}.py": _TEST,
        f"tests/test_exercises_ch{number}.py": _EXERCISE_TEST,
    }
    values = {"number": number, "name": name, "title": title}
    return {path: text.format(**values) for path, text in templates.items()}


def create(number: str, name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a new chapter, its step in pyproject.toml and its row on the front page.

    Shapes and units: ``number`` is two digits and perhaps a letter; ``name`` a module name in lower case; ``root`` the
    repository. Returns the paths written or changed. Nothing is written where anything is wrong.

    Raises: ValueError for a number or name of the wrong form, and for a chapter or module that exists.

    Source: CONTRIBUTING.md.
    """
    if not re.fullmatch(r"\d\d[a-z]?", number):
        raise ValueError(f"number is {number!r}; it must be two digits and perhaps a letter, such as '02' or '03b'")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name is {name!r}; it must be a module name: lower-case letters, digits and underscores")
    new = files(number, name, name.replace("_", " ").capitalize())
    there = [path for path in new if (root / path).exists()] + [str(p) for p in (root / "chapters").glob(f"{number}_*")]
    if there:
        raise ValueError(f"number is {number!r}, name {name!r}; {there[0]} exists")
    project, front = root / "pyproject.toml", root / "book" / "index.md"
    edited = {project: _with_step(project.read_text(), number, name), front: _with_row(front.read_text(), number, name)}
    for name_of_file, text in new.items():
        file = root / name_of_file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for file, text in edited.items():
        file.write_text(text, encoding="utf-8")
    written = [*(root / path for path in new), *edited]
    if importlib.util.find_spec("jupytext"):
        import jupytext

        for md in [root / path for path in new if path.startswith("chapters/")]:
            notebook = jupytext.read(md, fmt="md:myst")
            notebook.metadata["jupytext"] = {"formats": "ipynb,md:myst"}
            jupytext.write(notebook, md.with_suffix(".ipynb"))
            written.append(md.with_suffix(".ipynb"))
    return written


def _with_step(text: str, number: str, name: str) -> str:
    """pyproject.toml with one more step, and the chapter that explains it."""
    text, steps = re.subn(r"(?ms)^(steps = \[\n.*?)^\]\n", rf'\g<1>    ["{name}"],\n]\n', text, count=1)
    table = r"(?m)^(\[tool\.kvlab\.chapters\]\n(?:.+\n)*)"
    text, chapters = re.subn(table, rf'\g<1>{number} = ["{name}"]\n', text, count=1)
    if not steps or not chapters:
        raise ValueError("pyproject.toml has no `steps = [` list or no [tool.kvlab.chapters] table to add to")
    return text


def _with_row(text: str, number: str, name: str) -> str:
    """The front page with one more row in its table of chapters."""
    title = name.replace("_", " ").capitalize()
    row = f"| {number} | [{title}](chapters/{number}_{name}.ipynb) | the question | what you build |\n"
    rows = list(re.finditer(r"(?m)^\| \d\d[a-z]? \|.*\n", text))
    if not rows:
        raise ValueError("book/index.md has no table of chapters to add to")
    return text[: rows[-1].end()] + row + text[rows[-1].end() :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Lay out the chapter named on the command line and say what comes next.

    Shapes and units: ``arguments`` are the command line's, without the program.

    Source: CONTRIBUTING.md.
    """
    parser = argparse.ArgumentParser(prog="python -m kvlab.new_chapter", description="Lay out a new chapter's files.")
    parser.add_argument("number", metavar="NN", help="its number, such as 02")
    parser.add_argument("name", help="its module's name, such as paged")
    args = parser.parse_args(arguments)
    try:
        written = create(args.number, args.name)
    except ValueError as error:
        parser.error(str(error))
    for path in written:
        print(path.relative_to(ROOT))
    print(f"\nNext: make chapters CH={args.number}, then make test CH={args.number}; see CONTRIBUTING.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
