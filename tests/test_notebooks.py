"""Chapters and solutions as notebooks, as scripts and as pairs of files; and that the checks on them bite.

nbval itself runs the cells: `make test` hands it the notebooks in chapters/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter: pip install nbformat nbclient jupytext")
pytest.importorskip("nbclient", reason="needs Jupyter: pip install nbclient jupytext")
jupytext = pytest.importorskip("jupytext", reason="needs Jupyter: pip install jupytext")

bookmaker = pytest.importorskip("bookmaker")
ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = bookmaker.chapters()
each_chapter = pytest.mark.parametrize("md", CHAPTERS, ids=[str(p.relative_to(ROOT)) for p in CHAPTERS])
HEADER = """---
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


def cell(source: str, tags: str = "") -> str:
    """A code cell as it stands in a chapter's .md file."""
    return f"```{{code-cell}} ipython3\n{f':tags: [{tags}]' + chr(10) if tags else ''}\n{source}\n```\n\n"


def run_as_script(md: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a chapter as a plain script, in a process of its own."""
    command = [sys.executable, "-m", "kvlab.run_chapter", str(md)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


# --- what is committed ---------------------------------------------------------------------------------------------


def test_every_chapter_has_solutions():
    names = {p.name for p in CHAPTERS if p.parent.name == "chapters"}
    assert names, "there are no chapters"
    assert names == {p.name for p in CHAPTERS if p.parent.name == "solutions"}


@each_chapter
def test_pair_is_in_sync_by_content(md):
    assert bookmaker.differences(md) == []


@each_chapter
def test_notebook_holds_outputs_and_no_error(md):
    notebook = nbformat.read(md.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert bookmaker.problems(notebook, md.name) == []
    assert md.with_suffix(".ipynb").stat().st_size < 1_000_000


@each_chapter
def test_every_figure_has_alt_text(md):
    bookmaker.prepare(nbformat.read(md.with_suffix(".ipynb"), as_version=4), md.name)


def strays(output: str) -> list[str]:
    """Lines of the library's source, as ``show`` prints it, that do not stand where it says, in this order."""
    found: list[str] = []
    for path, first, shown in re.findall(r"^# (kvlab/[\w/]+\.py):(\d+)\n((?:.+\n?|\n(?=.))*)", output, re.M):
        lines = iter(
            [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()[int(first) - 1 :]]
        )
        head, *rest = shown.split("\n")
        found += [] if next(lines, None) == head.strip() else [f"{path}:{first}: {head}"]
        found += [f"{path}: {line}" for line in rest if line.strip() and not any(line.strip() == x for x in lines)]
    return found


@each_chapter
def test_source_that_is_shown_stands_in_the_library(md):
    notebook = nbformat.read(md.with_suffix(".ipynb"), 4)
    outputs = [o.get("data", {}) for c in notebook.cells for o in c.get("outputs", [])]
    assert [line for data in outputs for line in strays(data.get("text/plain", ""))] == []


def test_source_that_is_out_of_date_is_found():
    first, line = next(
        (n, x) for n, x in enumerate((ROOT / "kvlab/cache.py").read_text().splitlines(), 1) if "def " in x
    )
    assert strays(f"# kvlab/cache.py:{first}\n{line.strip()}\n") == []
    assert strays(f"# kvlab/cache.py:{first + 1}\n{line.strip()}\n") != []
    assert strays(f"# kvlab/cache.py:{first}\n{line.strip()}\n    return nothing of the kind\n") != []


@pytest.fixture(scope="module")
def bare():
    """Children as on a machine that has neither Jupyter nor Triton; with a GPU, Triton is there."""
    triton = "" if torch.cuda.is_available() else "sys.modules['triton'] = None\n"
    with forks.Server(
        f"import sys\n{triton}import torch, matplotlib.backends.backend_agg, matplotlib.figure"
    ) as server:
        yield server


@each_chapter
def test_chapter_runs_as_a_plain_script_and_without_triton(md, bare, tmp_path):
    """The notebooks themselves, which nbval runs, are where kernels are launched."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"from kvlab import run_chapter, runtime; run_chapter.main([{str(md)!r}]); print(runtime.HAS_TRITON)"
    done = bare.run(code, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"{torch.cuda.is_available()}\n")


def test_committed_ledger_is_the_one_the_notebooks_make(tmp_path):
    out = tmp_path / "claims.md"
    bookmaker.write_claims([md.with_suffix(".ipynb") for md in CHAPTERS], out)
    assert out.read_text() == (ROOT / "book" / "claims.md").read_text(), "run `make chapters`"


# --- a small book of our own ---------------------------------------------------------------------------------------


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """An empty repository: a function that writes a chapter into it returns the chapter's path."""
    for folder in ("chapters/solutions", "kvlab", "book"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(bookmaker, "ROOT", tmp_path)
    monkeypatch.setattr(bookmaker, "BUILD", tmp_path / "book" / "_build")

    def write(name: str, *cells: str) -> Path:
        path = tmp_path / "chapters" / name
        path.write_text(HEADER + "# A chapter\n\n" + "".join(cells))
        return path

    write.root = tmp_path
    return write


BAD_MAGIC = cell("%no_such_magic"), "UsageError"
NO_ERROR = cell("1 + 1", "raises-exception"), "raised nothing"


@pytest.mark.parametrize(("bad", "reason"), [BAD_MAGIC, NO_ERROR, (cell("1 / 0"), "ZeroDivisionError")])
def test_execution_refuses_a_bad_cell_and_names_it(small_book, bad, reason):
    md = small_book("09_bad.md", cell("x = 1"), bad)
    with pytest.raises(bookmaker.BookError, match=reason) as error:
        bookmaker.execute(bookmaker.read_source(md), "chapters/09_bad.md", md.parent)
    assert "chapters/09_bad.md, code cell 2" in str(error.value)


def test_an_expected_error_is_no_problem(small_book):
    md = small_book("09_good.md", cell("x = 1"), cell("1 / 0", "raises-exception"), cell("print(x)"))
    notebook = bookmaker.read_source(md)
    bookmaker.execute(notebook, "09_good.md", md.parent)
    assert bookmaker.problems(notebook, "09_good.md") == []


@pytest.mark.parametrize("command", ["book", "chapters"])
def test_building_fails_on_a_cell_error_and_names_file_and_cell(small_book, capsys, command):
    md = small_book("09_bad.md", cell("x = 1"), cell("raise KeyError('gone')"))
    assert bookmaker.main([command]) != 0
    message = capsys.readouterr().err
    assert "chapters/09_bad.md, code cell 2" in message
    assert "KeyError" in message
    assert not md.with_suffix(".ipynb").exists()


def test_outputs_are_made_anew_when_kvlab_changes(small_book, capsys):
    module = small_book.root / "kvlab" / "shade.py"
    module.write_text("blue")
    md = small_book("09_shade.md", cell(f"print(open({str(module)!r}).read())"))

    def output() -> str:
        notebook = nbformat.read(bookmaker.executed_copy(md), as_version=4)
        assert bookmaker.problems(notebook, md.name) == []
        return notebook.cells[-1].outputs[0].text.strip()

    assert output() == "blue"
    assert output() == "blue"
    assert "unchanged" in capsys.readouterr().out
    module.write_text("green")
    assert output() == "green"


def test_difference_in_a_pair_is_found_and_named(small_book):
    md = small_book("09_pair.md", cell("x = 1"))
    assert "is missing" in bookmaker.differences(md)[0]
    nbformat.write(bookmaker.read_source(md), md.with_suffix(".ipynb"))
    assert bookmaker.differences(md) == []
    md.write_text(md.read_text().replace("x = 1", "x = 2"))
    assert "cell 2 differs" in bookmaker.differences(md)[0]


@pytest.mark.parametrize("newer", [".md", ".ipynb"])
def test_file_dates_decide_nothing(small_book, newer):
    from jupytext import TextFileContentsManager

    makefile = (ROOT / "Makefile").read_text()
    assert "--notebook-dir=. --LabApp.default_url=/lab/tree/chapters" in makefile  # jupytext's settings lie in the root

    md = small_book("09_pair.md", cell("print('kept')"))
    ipynb = md.with_suffix(".ipynb")
    notebook = bookmaker.read_source(md)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="kept\n")]
    notebook.cells[-1].execution_count = 1
    nbformat.write(notebook, ipynb)
    for path in (md, ipynb):
        hour = 3600 * (path.suffix == newer)
        os.utime(path, (1_700_000_000 + hour, 1_700_000_000 + hour))
    assert bookmaker.differences(md) == []
    shutil.copy(ROOT / "pyproject.toml", small_book.root)
    manager = TextFileContentsManager()
    manager.root_dir = str(small_book.root)
    for path in (md, ipynb):
        opened = manager.get(f"chapters/{path.name}", type="notebook")["content"]
        assert opened.cells[-1].outputs[0]["text"] == "kept\n"
    opened.cells[-1].source = "print('edited')"
    before = md.read_text()
    manager.save({"type": "notebook", "format": "json", "content": opened}, f"chapters/{ipynb.name}")
    lines = [text.replace("print('kept')", "print('edited')").split() for text in (before, md.read_text())]
    assert lines[0] == lines[1]  # a save reaches both files, and changes nothing else
    assert "edited" in ipynb.read_text()


# --- nbval, made stricter by conftest.py ---------------------------------------------------------------------------


CHECKED = {  # what the checker sees: source, tags, stored output
    "good": ("print('fine')", (), "fine\n"),
    "bad magic": ("%no_such_magic", (), ""),
    "an error that does not come": ("1 + 1", ("raises-exception",), ""),
    "an error that comes": ("1 / 0", ("raises-exception",), ""),
    "another output": ("print('fine')", ("nbval-check-output",), "other\n"),
}


@pytest.fixture(scope="module")
def nbval_report(tmp_path_factory) -> dict[str, str]:
    """What the checker that `make test` uses says of each cell above, and of a notebook that was never run."""
    folder = tmp_path_factory.mktemp("checked")
    shutil.copy(ROOT / "conftest.py", folder)
    cells = []
    for source, tags, output in CHECKED.values():
        stored = [nbformat.v4.new_output("stream", text=output)] if output else []
        cells.append(
            nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)}, execution_count=1, outputs=stored)
        )
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=bookmaker.METADATA), folder / "run.ipynb")
    never = [nbformat.v4.new_code_cell("print('fine')")]
    nbformat.write(nbformat.v4.new_notebook(cells=never, metadata=bookmaker.METADATA), folder / "never.ipynb")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rA",
            "--nbval-lax",
            "--nbval-current-env",
            str(folder),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "book")},
    )
    result = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(PASSED|FAILED) (run|never)\.ipynb::Cell (\d+)", line):
            result["never run" if match[2] == "never" else list(CHECKED)[int(match[3])]] = match[1]
    return result


@pytest.mark.parametrize("what", ["good", "an error that comes"])
def test_nbval_passes_a_good_cell(nbval_report, what):
    assert nbval_report[what] == "PASSED"


@pytest.mark.parametrize("what", ["bad magic", "an error that does not come", "another output", "never run"])
def test_nbval_refuses_a_bad_cell(nbval_report, what):
    assert nbval_report[what] == "FAILED"


# --- where a kernel's source is found ------------------------------------------------------------------------------

SOURCE_OF = """import inspect

def double(x):
    return 2 * x

assert "return 2 * x" in inspect.getsource(double), "function"
"""


KERNEL = """import torch

from kvlab import runtime, show
from kvlab.runtime import tl, triton

@triton.jit
def twice(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)

x = torch.ones(5, device=runtime.device())
if runtime.can_launch():
    twice[(1,)](x, 5, BLOCK=8)
    assert x.tolist() == [2] * 5
show(twice)
"""


def test_source_is_found_in_a_notebook_and_in_a_script(small_book):
    md = small_book("09_source.md", cell(SOURCE_OF), cell(KERNEL), cell("display(double(21))\ndouble(4)"))
    bookmaker.execute(bookmaker.read_source(md), md.name, md.parent)
    done = run_as_script(md, md.parent)
    assert done.returncode == 0, done.stderr
    assert "tl.store(x_ptr + i, 2 * tl.load" in done.stdout
    assert done.stdout.split()[-2:] == ["42", "8"]


def test_source_of_what_exec_defined_is_a_clear_error():
    from kvlab import source

    namespace: dict[str, object] = {"__name__": "made_by_exec"}
    exec("def double(x):\n    return 2 * x\n", namespace)
    with pytest.raises(ValueError, match="source"):
        source.show(namespace["double"])


def test_script_fails_where_the_notebook_would(small_book):
    from kvlab import run_chapter

    for bad, reason in ((cell("x = 1\n1 / 0"), "ZeroDivisionError"), NO_ERROR):
        md = small_book("09_bad.md", cell("x = 1"), bad)
        with pytest.raises(RuntimeError, match=f"09_bad.md, code cell 2.*{reason}"):
            run_chapter.run(md)
