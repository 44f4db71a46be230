"""A new chapter is laid out to the form, and what is laid out runs and passes its own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvlab import new_chapter, run_chapter

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of what a new chapter touches."""
    shutil.copytree(ROOT / "kvlab", tmp_path / "kvlab", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "book").mkdir()
    (tmp_path / "chapters").mkdir()
    shutil.copy(ROOT / "book" / "index.md", tmp_path / "book")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_what_is_laid_out_runs_and_passes_its_tests(copy):
    written = new_chapter.create("77", "shiny_thing", root=copy)
    names = {str(path.relative_to(copy)) for path in written}
    assert {"chapters/77_shiny_thing.md", "chapters/solutions/77_shiny_thing.md", "kvlab/shiny_thing.py"} <= names
    project = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["kvlab"]
    assert project["steps"][-1] == ["shiny_thing"]
    assert project["chapters"]["77"] == ["shiny_thing"]
    assert "| 77 | [Shiny thing](chapters/77_shiny_thing.ipynb)" in (copy / "book" / "index.md").read_text()
    # One process for both, since importing torch takes longer than all of it.
    code = (
        "import sys, pytest; from kvlab import run_chapter; "
        "run_chapter.main(['chapters/77_shiny_thing.md', 'chapters/solutions/77_shiny_thing.md']); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests']))"
    )
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "77.1: not yet" in done.stdout
    assert "77.1: right" in done.stdout


def test_headings_are_those_of_the_written_chapters():
    def headings(text: str) -> list[str]:
        return [line.split(".")[0] for line in text.splitlines() if line.startswith("## ")]

    laid_out = new_chapter.files("77", "thing", "Thing")["chapters/77_thing.md"]
    for chapter in sorted((ROOT / "chapters").glob("[0-9]*_*.md")):
        assert headings(chapter.read_text()) == headings(laid_out), chapter.name


def test_what_exists_is_never_overwritten(copy):
    before = (copy / "pyproject.toml").read_text()
    with pytest.raises(ValueError, match=r"kvlab/naive\.py exists"):
        new_chapter.create("77", "naive", root=copy)
    new_chapter.create("77", "thing", root=copy)
    with pytest.raises(ValueError, match="exists"):
        new_chapter.create("77", "other", root=copy)
    assert before.count("\n") + 2 == (copy / "pyproject.toml").read_text().count("\n")


@pytest.mark.parametrize(
    ("number", "name"), [("7", "thing"), ("077", "thing"), ("77", "Thing"), ("77", "a-b"), ("77", "")]
)
def test_a_bad_number_or_name_is_refused(copy, number, name):
    with pytest.raises(ValueError, match="must be"):
        new_chapter.create(number, name, root=copy)


def test_parser_reads_cells_tags_and_lines():
    text = (
        "# A\n\n```{code-cell} ipython3\n:tags: [one, two-x]\n\na = 1\n\nb = 2\n```\n\n"
        "```python\nno = 1\n```\n```{code-cell}\nc\n```\n"
    )
    first, second = run_chapter.parse(text)
    assert (first.source, first.line, first.tags) == ("a = 1\n\nb = 2", 6, ("one", "two-x"))
    assert (second.source, second.tags) == ("c", ())
    with pytest.raises(ValueError, match="never closed"):
        run_chapter.parse("```{code-cell}\na\n")


def test_only_a_chapter_can_be_run(tmp_path):
    with pytest.raises(ValueError, match="must be a chapter"):
        run_chapter.run(tmp_path / "none.md")
    (tmp_path / "text.md").write_text("# Text\n")
    with pytest.raises(ValueError, match=r"no \{code-cell\} blocks"):
        run_chapter.run(tmp_path / "text.md")
