"""What the book shows, in a real kernel, on the built page, and where there is no IPython at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import claims, display, figures

ROOT = Path(__file__).resolve().parent.parent
SHOWS = [
    "import kvlab\nfrom kvlab import claims, config, display, exercises, figures, source",
    "def double(x):\n    return 2 * x",
    "kvlab.show(double)\nkvlab.show(config.get)",
    "kvlab.show_diff(config.get, double)",
    "fig, ax = figures.figure(4, 2)\nax.plot([1, 2])\n"
    "figures.show(fig, alt='A line that \"rises\" & ends', caption='Above `x`, 1 < 2.')",
    "claims.verdict('A3', 'holds', '4,096 *bytes*', 'computed')",
    "figures.markdown('a **bold** word')",
    "exercises.check('00.1', ...)",
]


def test_a_bundle_without_plain_text_is_refused():
    with pytest.raises(ValueError, match="text/plain"):
        display.emit({"text/html": "x"})


def test_a_script_without_ipython_prints_everything(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class NoIPython:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('IPython', 'ipykernel'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, NoIPython())\n"
    )
    script = tmp_path / "script.py"
    script.write_text("\n".join([*SHOWS, "import sys", "assert 'IPython' not in sys.modules"]))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "", "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for wanted in (
        "# script.py:", "return 2 * x", "+def double(x):", '[Figure: A line that "rises" & ends]', "Above `x`, 1 < 2.",
        "A3: ", "holds: 4,096 *bytes* (computed)", "a **bold** word", "00.1: not yet",
    ):  # fmt: skip
        assert wanted in done.stdout


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook that shows one thing of each kind, run in a kernel."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    sys.path.insert(0, str(ROOT / "book"))
    import bookmaker

    folder = tmp_path_factory.mktemp("shown")
    cells = [nbformat.v4.new_markdown_cell("# Shown"), *map(nbformat.v4.new_code_cell, SHOWS)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=bookmaker.METADATA)
    bookmaker.execute(notebook, "00_shown", folder)
    path = folder / "00_shown.ipynb"
    nbformat.write(bookmaker.prepare(notebook, "00_shown"), path)
    return path


def outputs(path, number):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    return cells[number]["outputs"]


def test_a_notebook_shows_source_of_cells_and_of_the_library(executed):
    cell, library = outputs(executed, 2)
    assert "".join(cell["data"]["text/markdown"]).startswith("`this notebook`\n\n```python\ndef double(x):")
    assert re.match(r"`kvlab/config\.py:\d+`", "".join(library["data"]["text/markdown"]))


def test_a_notebook_holds_the_figure_once_with_its_alt_text(executed):
    (output,) = outputs(executed, 4)
    image, alt, caption = figures.shown(output)
    assert image.startswith(b"\x89PNG")
    assert alt == 'A line that "rises" & ends'
    assert caption == "Above `x`, 1 < 2."
    page = "".join(output["data"]["text/html"])
    assert page.count("base64,") == 1
    assert 'alt="A line that &quot;rises&quot; &amp; ends"' in page
    assert "<figcaption" in page
    assert "<code>x</code>, 1 &lt; 2." in page
    assert figures.shown(outputs(executed, 3)[0]) is None


def test_the_ledger_reads_what_a_notebook_stored(executed):
    (found,) = claims.read(executed)
    assert found == claims.make("A3", "holds", "4,096 *bytes*", "computed")
    assert '<a href="chapters/00_shown.html#claim-a3">00</a>' in claims.ledger([executed])


def test_the_built_page_has_alt_text_anchor_and_colours(executed, tmp_path):
    pytest.importorskip("myst_nb")
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / executed.name).write_text(executed.read_text())
    (tmp_path / "claims.md").write_text(claims.ledger([executed]))
    (tmp_path / "index.md").write_text("# Home\n\n```{toctree}\nclaims\nchapters/00_shown\n```\n")
    (tmp_path / "conf.py").write_text(
        "extensions = ['myst_nb']\nnb_execution_mode = 'off'\nnb_render_markdown_format = 'myst'\n"
    )
    out = tmp_path / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(tmp_path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (out / "chapters" / "00_shown.html").read_text()
    (image,) = re.findall(r"<img [^>]*alt=\"A line[^>]*>", page)
    assert "rises" in image
    assert "<figcaption" in page
    assert "Above" in page
    assert 'id="claim-a3"' in page
    assert "4,096 *bytes*" in page
    assert 'class="kvlab-diff"' in page
    assert re.search(r'class="highlight[^"]*python', page)
    ledger = (out / "claims.html").read_text()
    for anchor, file in [(m[2], m[1]) for m in re.finditer(r'href="(chapters/[^"#]+)#(claim-[^"]+)"', ledger)]:
        assert f'id="{anchor}"' in (out / file).read_text()
    assert "chapters/00_shown.html#claim-a3" in ledger
    assert ledger.count("untested yet") > 60
