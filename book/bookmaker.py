"""Chapters to notebooks, notebooks to a site: what `make chapters` and `make book` run.

    python book/bookmaker.py chapters [NN ...]    pair each chapter's .md with its .ipynb and execute it in place
    python book/bookmaker.py book [--strict]      execute copies under book/_build/ and build the site from them
    python book/bookmaker.py tests NN             print what `make test CH=NN` runs

The .md file of a pair is the source. Whether the two agree is decided by their content, never by their dates.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "book" / "_build"
CELL_TIMEOUT = 600  # seconds; a chapter takes under 30 s, and a first run on a GPU compiles its kernels
IMAGES = ("image/png", "image/jpeg", "image/svg+xml", "image/gif")
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


class BookError(Exception):
    """A chapter that must not be published. Its message names the file and the cell. Source: CONTRIBUTING.md."""


def chapters(only: Iterable[str] = ()) -> list[Path]:
    """The .md files of all chapters and solutions, or of those whose number is in ``only``."""
    numbers = tuple(only)
    found = [p for folder in ("chapters", "chapters/solutions") for p in sorted((ROOT / folder).glob("[0-9]*_*.md"))]
    return [path for path in found if not numbers or path.name.split("_")[0] in numbers]


def named(path: Path) -> str:
    """``path`` as a reader would type it: relative to the repository where it lies in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# --- a pair --------------------------------------------------------------------------------------------------------


def read_source(md: Path) -> NotebookNode:
    """The notebook that a chapter's .md file describes: no outputs, and cell ids that follow from the text."""
    notebook = jupytext.read(md, fmt="md:myst")
    result = nbformat.v4.new_notebook(metadata={**METADATA, "jupytext": {"formats": "ipynb,md:myst"}})
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = f"{digest}-{seen[digest]}"
        result.cells.append(cell)
    return result


def content(notebook: NotebookNode) -> list[tuple[str, str, tuple[str, ...]]]:
    """What the two files of a pair must agree on: each cell's kind, text and tags."""
    return [(c.cell_type, c.source.strip(), tuple(sorted(c.metadata.get("tags", [])))) for c in notebook.cells]


def differences(md: Path) -> list[str]:
    """Where a chapter's .ipynb says something else than its .md, in words; empty where they agree."""
    ipynb = md.with_suffix(".ipynb")
    if not ipynb.exists():
        return [f"{named(ipynb)} is missing: run `make chapters`"]
    ours, theirs = content(read_source(md)), content(nbformat.read(ipynb, as_version=4))
    found = [
        f"{named(ipynb)}: cell {i + 1} differs from {md.name} ({b[1][:60]!r}, not {a[1][:60]!r}); run `make chapters`"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
        if a != b
    ]
    if len(ours) != len(theirs):
        found.append(f"{named(ipynb)} has {len(theirs)} cells and {md.name} {len(ours)}; run `make chapters`")
    return found


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells that hold code, each with its number among all code cells, from 1."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ((i, cell) for i, cell in enumerate(code, 1) if cell.source.strip())


def where(name: str, number: int, cell: NotebookNode) -> str:
    """A cell's place for a message: file, number and first line of code."""
    lines = [line for line in cell.source.splitlines() if line.strip()]
    return f"{name}, code cell {number} ({lines[0].strip()[:70] if lines else 'empty'})"


def output_problem(tags: Iterable[str], outputs: Iterable[Any]) -> str | None:
    """Why a cell that ran did not do what it says, although no error stopped it; None where all is well.

    A line magic that does not exist only writes a line to stderr. A cell tagged ``raises-exception`` promises an error.
    """
    outputs, expected = list(outputs), "raises-exception" in tags
    raised = any(o["output_type"] == "error" for o in outputs)
    if expected and not raised:
        return "it is tagged raises-exception and raised nothing"
    if raised and not expected:
        error = next(o for o in outputs if o["output_type"] == "error")
        return f"it raised {error['ename']}: {error['evalue'][:300]}"
    for o in outputs:
        if o["output_type"] == "stream" and o["name"] == "stderr":
            text = "".join(o["text"])
            if re.search(r"^UsageError\b", text, re.M):
                return text.strip().splitlines()[0]
    return None


def problems(notebook: NotebookNode, name: str) -> list[str]:
    """Why an executed notebook must not be committed or published: a cell that was not run, or went wrong."""
    found = []
    cells = list(code_cells(notebook))
    for number, cell in cells:
        if cell.execution_count is None:
            found.append(f"{where(name, number, cell)}: it was never run")
        elif problem := output_problem(cell.metadata.get("tags", []), cell.outputs):
            found.append(f"{where(name, number, cell)}: {problem}")
    if cells and not any(cell.outputs for _, cell in cells):
        found.append(f"{name}: no cell has a stored output")
    return found


def execute(notebook: NotebookNode, name: str, cwd: Path) -> float:
    """Run all cells in place, in a kernel of this Python started in ``cwd``; returns the seconds it took.

    Raises: BookError, which names the file and the cell, where a cell fails.
    """
    total = sum(1 for _ in code_cells(notebook))
    live = sys.stdout.isatty()
    done = 0

    def progress(cell: NotebookNode, cell_index: int, **_: Any) -> None:
        nonlocal done
        done += cell.cell_type == "code" and bool(cell.source.strip())
        if live:
            print(f"\r  {name}  {done}/{total}", end="", flush=True)

    client = NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(cwd)}},
        on_cell_execute=progress,
        record_timing=False,
    )
    start = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        if live:
            print()
        ran = [(n, c) for n, c in code_cells(notebook) if c.execution_count is not None]
        raised = [(n, c) for n, c in ran if any(o.output_type == "error" for o in c.outputs)]
        unexpected = [(n, c) for n, c in raised if "raises-exception" not in c.metadata.get("tags", [])]
        # A cell that timed out or killed its kernel has no error stored: it is the last one that was started.
        number, cell = unexpected[-1] if unexpected else list(code_cells(notebook))[max(done - 1, 0)]
        reason = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error).strip()
        details = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise BookError(f"{where(name, number, cell)}: {reason}\n{details}") from None
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    print(("\r" if live else "") + f"  {name}  {total} cells, {seconds:.0f} s", flush=True)
    if found := problems(notebook, name):
        raise BookError("\n".join(found))
    return seconds


# --- make chapters -------------------------------------------------------------------------------------------------


def run_chapters(only: list[str]) -> None:
    """Write each chapter's executed .ipynb beside its .md, then the claims ledger from all of them.

    Raises: BookError where a cell fails; that chapter's .ipynb is left as it was.
    """
    todo = chapters(only=only)
    if not todo:
        raise BookError(f"no chapter {' '.join(only)} in chapters/")
    for md in todo:
        notebook = read_source(md)
        execute(notebook, named(md), md.parent)
        nbformat.write(notebook, md.with_suffix(".ipynb"))
    write_claims([md.with_suffix(".ipynb") for md in chapters()], ROOT / "book" / "claims.md")


def write_claims(notebooks: list[Path], out: Path) -> None:
    """Build the ledger of claims from the verdicts that executed notebooks hold.

    Raises: BookError where the ledger cannot be built.
    """
    main = [str(path) for path in notebooks if path.parent.name != "solutions"]
    done = subprocess.run([sys.executable, "-m", "kvlab.claims", *main, "--out", str(out)], cwd=ROOT)
    if done.returncode:
        raise BookError(f"the claims ledger could not be built from {len(main)} notebooks")


# --- make book -----------------------------------------------------------------------------------------------------


def fingerprint(md: Path) -> str:
    """Changes whenever what a chapter prints could: its text, kvlab, the records, the versions installed."""
    digest = hashlib.sha256(sys.version.encode())
    folders = [ROOT / "kvlab", ROOT / "book" / "measured"]
    files = [p for folder in folders for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    for path in [md, Path(__file__), *sorted(ROOT.glob("requirements-*.txt")), *files]:
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def executed_copy(md: Path) -> Path:
    """An executed copy of a chapter under book/_build/, made anew unless nothing it depends on has changed.

    Raises: BookError where a cell fails.
    """
    out = BUILD / "executed" / md.relative_to(ROOT / "chapters").with_suffix(".ipynb")
    key, stored = out.with_suffix(".key"), fingerprint(md)
    if out.exists() and key.exists() and key.read_text() == stored:
        print(f"  {named(md)}  unchanged", flush=True)
        return out
    key.unlink(missing_ok=True)
    notebook = read_source(md)
    with_cwd = BUILD / "run" / md.stem
    with_cwd.mkdir(parents=True, exist_ok=True)
    execute(notebook, named(md), with_cwd)
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out)
    key.write_text(stored)
    return out


def prepare(notebook: NotebookNode, name: str) -> NotebookNode:
    """A copy for the site: each figure's alt text, stored with the output, is put where Sphinx looks for it.

    What only kvlab reads, such as a verdict on a claim, is left out.

    Raises: BookError where a figure has none.
    """
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    for number, cell in code_cells(notebook):
        for output in cell.outputs:
            for private in [m for m in output.get("data", {}) if m.startswith("application/vnd.kvlab")]:
                del output["data"][private]
        cell.outputs = [o for o in cell.outputs if o.get("data") != {}]
        for output in cell.outputs:
            mime = next((m for m in IMAGES if m in output.get("data", {})), None)
            if mime is None:
                continue
            metadata = output.get("metadata", {})
            alt = metadata.get(mime, {}).get("alt") or metadata.get("alt")
            options = cell.metadata.setdefault("mystnb", {}).setdefault("image", {})
            if alt:
                options["alt"] = alt
            if not options.get("alt"):
                raise BookError(f"{where(name, number, cell)}: its figure has no alt text (figures.show(fig, alt=...))")
    return notebook


def assemble(notebooks: dict[Path, Path], source: Path) -> None:
    """Lay out a Sphinx source folder: the pages of book/, and for each chapter's .md the notebook given for it.

    Raises: BookError where a notebook may not be published or the claims ledger cannot be built.
    """
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(
        ROOT / "book", source, ignore=shutil.ignore_patterns("_build", "bookmaker.py", "measured", "__pycache__")
    )
    for md, ipynb in notebooks.items():
        notebook = nbformat.read(ipynb, as_version=4)
        if found := problems(notebook, named(md)):
            raise BookError("\n".join(found))
        out = source / "chapters" / md.relative_to(ROOT / "chapters").with_suffix(".ipynb")
        out.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(prepare(notebook, named(md)), out)
    write_claims(list(notebooks.values()), source / "claims.md")


def sphinx(source: Path, html: Path, strict: bool) -> int:
    """Build the site from an assembled source; with ``strict`` a warning is an error. Returns Sphinx's exit status."""
    options = ["-W", "--keep-going"] if strict else []
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(html.parent / "doctrees"), *options]
    return subprocess.run([*command, str(source), str(html)]).returncode


def run_book(strict: bool) -> None:
    """Execute every chapter as a copy, then build the site.

    Raises: BookError where a cell fails, or Sphinx does.
    """
    print("Executing the chapters", flush=True)
    notebooks = {md: executed_copy(md) for md in chapters()}
    print("Building the site", flush=True)
    html = BUILD / "html"
    shutil.rmtree(html, ignore_errors=True)
    assemble(notebooks, BUILD / "source")
    if status := sphinx(BUILD / "source", html, strict):
        raise BookError(f"Sphinx exited with status {status}")
    print(f"The book is built: open {named(html / 'index.html')}")


# --- make test CH=NN -----------------------------------------------------------------------------------------------


def tests_of(number: str) -> list[str]:
    """The test files of the modules a chapter explains, its notebook and its solutions.

    Raises: BookError where there is no such chapter.
    """
    notebooks = [named(md.with_suffix(".ipynb")) for md in chapters(only=[number])]
    if not notebooks:
        raise BookError(f"no chapter {number} in chapters/; there are {', '.join(p.stem for p in chapters())}")
    with open(ROOT / "pyproject.toml", "rb") as file:
        modules = tomllib.load(file)["tool"]["kvlab"]["chapters"].get(number, [])
    tests = [f"tests/test_{module}.py" for module in [*modules, f"exercises_ch{number}"]]
    return [test for test in tests if (ROOT / test).exists()] + notebooks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("chapters").add_argument("numbers", nargs="*", metavar="NN")
    commands.add_parser("book").add_argument("--strict", action="store_true")
    commands.add_parser("tests").add_argument("number", metavar="NN")
    args = parser.parse_args(arguments)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a debugger's note on each kernel start
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    try:
        if args.command == "chapters":
            run_chapters(args.numbers)
        elif args.command == "book":
            run_book(args.strict)
        else:
            print(" ".join(tests_of(args.number)))
    except BookError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
