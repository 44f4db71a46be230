"""The site as a reader meets it: opened from the disk in a browser, with nothing else to ask.

It is built from the committed notebooks, warnings as errors, so that a citation or a cross-reference that does not
resolve fails here. ``KVLAB_SITE=book/_build/html`` tests a site that was built already.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest

try:  # asked of its metadata: an import would leave half a package behind where only a folder has the name
    version("sphinx")
except PackageNotFoundError:
    pytest.skip("needs Sphinx: make setup", allow_module_level=True)
pytest.importorskip("jupytext", reason="needs Jupyter: make setup")
bookmaker = pytest.importorskip("bookmaker")

ROOT = Path(__file__).resolve().parent.parent

needs_browser = pytest.mark.skipif(browser.find() is None, reason="no Chromium or Chrome: apt-get install chromium")
NARROW, WIDE = 380, 1280


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    if os.environ.get("KVLAB_SITE"):
        return Path(os.environ["KVLAB_SITE"]).resolve()
    folder = tmp_path_factory.mktemp("site")
    bookmaker.assemble({md: md.with_suffix(".ipynb") for md in bookmaker.chapters()}, folder / "source")
    assert bookmaker.sphinx(folder / "source", folder / "html", strict=True) == 0, "Sphinx warned: see above"
    return folder / "html"


class Tags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag


@pytest.fixture(scope="session")
def pages(site) -> dict[str, Tags]:
    """Every page of the site, by its path."""
    paths = [p for p in sorted(site.rglob("*.html")) if "_static" not in p.parts]
    return {str(p.relative_to(site)): Tags(p.read_text(encoding="utf-8")) for p in paths}


@pytest.fixture(scope="session")
def chapters() -> list[str]:
    """The names of all chapters, such as 00_memory_wall."""
    return [md.stem for md in bookmaker.chapters() if md.parent.name == "chapters"]


@pytest.fixture(scope="session")
def tab(tmp_path_factory) -> Iterator[browser.Page]:
    """A tab of a headless browser."""
    with browser.launch(tmp_path_factory.mktemp("profile")) as page:
        yield page


# --- what the files say --------------------------------------------------------------------------------------------


def test_site_has_a_page_for_each_part(pages, chapters):
    expected = {"index", "notation", "glossary", "claims", "bibliography", "search", "genindex"}
    expected |= {f"chapters/{name}" for name in chapters} | {f"chapters/solutions/{name}" for name in chapters}
    assert {f"{name}.html" for name in expected} - pages.keys() == set()


def test_every_link_and_anchor_inside_the_site_resolves(site, pages):
    anchors = {
        name: {value for _, a in tags.found for value in (a.get("id"), a.get("name")) if value}
        for name, tags in pages.items()
    }
    broken = []
    for name, tags in pages.items():
        for tag, attributes in tags.found:
            link = attributes.get("href") if tag == "a" else attributes.get("src")
            if not link or urlsplit(link).scheme or link.startswith("//"):
                continue
            path, fragment = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
            target = (site / name).parent / path if path else site / name
            if not target.resolve().exists():
                broken.append(f"{name}: {link}")
                continue
            page = str(target.resolve().relative_to(site.resolve()))
            if fragment and page in anchors and fragment not in anchors[page]:
                broken.append(f"{name}: {link} (no such anchor)")
    assert broken == []


def test_every_image_has_alt_text(pages):
    bare = []
    for name, tags in pages.items():
        for tag, attributes in tags.found:
            if tag != "img":
                continue
            alt = (attributes.get("alt") or "").strip()
            # Without a description Sphinx writes the picture's path there, which tells a listener nothing.
            if len(alt) < 5 or alt.endswith((".png", ".svg", ".jpg", ".jpeg", ".gif")):
                bare.append(f"{name}: {attributes.get('src', '')[:60]} has alt {alt!r}")
    assert bare == []


def test_no_role_or_directive_is_left_as_text(site, pages):
    left = [
        f"{name}: {role}"
        for name in pages
        if name.startswith(("chapters/", "notation", "glossary", "index", "claims"))
        for role in ("{ref}", "{cite}", "{cite:", "{term}", "{eq}", "{numref}", ":::{", "```{")
        if role in (site / name).read_text(encoding="utf-8")
    ]
    assert left == []


def test_each_chapter_offers_its_executed_notebook(site, pages, chapters):
    for name in chapters:
        hrefs = [a.get("href") or "" for tag, a in pages[f"chapters/{name}.html"].found if tag == "a"]
        link = next((h for h in hrefs if h.endswith(f"{name}.ipynb")), None)
        assert link, f"{name} has no link to its notebook"
        notebook = json.loads((site / "chapters" / link).resolve().read_text(encoding="utf-8"))
        assert any(cell.get("outputs") for cell in notebook["cells"])


def test_chapters_lead_to_each_other(pages, chapters):
    def links(name: str) -> set[tuple[str | None, str | None]]:
        return {(a.get("class"), a.get("href")) for tag, a in pages[f"chapters/{name}.html"].found if tag == "a"}

    for before, after in pairwise(chapters):
        assert ("right-next", f"{after}.html") in links(before)
        assert ("left-prev", f"{before}.html") in links(after)


# --- what the browser says -----------------------------------------------------------------------------------------


SEEN_WIDE = """(async () => ({
    bare: [...document.querySelectorAll('.math')].filter(m => !m.querySelector('mjx-container')).length,
    errors: document.querySelectorAll('mjx-merror, [data-mml-node=merror]').length,
    height: document.querySelector('mjx-container')?.getBoundingClientRect().height ?? 0,
    fonts: [...await document.fonts.ready].filter(f => f.family.startsWith('MJX') && f.status == 'loaded').length,
    cells: document.querySelectorAll('.cell_input div.highlight').length,
    buttons: document.querySelectorAll('.cell_input button.copybtn').length,
}))()"""


@pytest.fixture(scope="session")
def visits(site, pages, chapters, tab) -> dict[tuple[str, int], dict[str, object]]:
    """What each page was like at each width: all are asked for everything at once.

    Each kind of page is opened at both widths; of the other chapters, which run the same scripts, the window is made
    narrow once they are open.
    """
    found = {}
    for name in pages:
        one_of_many = name.startswith("chapters/") and name != f"chapters/{chapters[-1]}.html"
        for width in (WIDE, NARROW):
            tab.resize(width)
            if width == WIDE or not one_of_many:
                tab.open((site / name).as_uri())
            else:
                tab.settle()
            found[name, width] = {
                "complaints": tab.complaints(), "requests": tab.requests(),
                "scroll": tab.evaluate("document.documentElement.scrollWidth"),
                **(tab.evaluate(SEEN_WIDE) if width == WIDE else {}),
            }  # fmt: skip
    return found


@needs_browser
def test_every_page_opens_clean_at_both_widths(visits):
    faults = []
    for (name, width), seen in visits.items():
        at = f"{name} at {width} px"
        faults += [f"{at}: {complaint}" for complaint in seen["complaints"]]
        outside = [u for u in seen["requests"] if not u.startswith(("file:", "data:", "blob:", "about:"))]
        faults += [f"{at}: asks for {address}" for address in outside]
        if seen["scroll"] > width:
            faults.append(f"{at}: {seen['scroll']} px wide")
    assert faults == []


@needs_browser
def test_all_mathematics_is_typeset(pages, visits):
    everything, faults = 0, []
    for name, tags in pages.items():
        written = sum("math" in (a.get("class") or "").split() for tag, a in tags.found if tag in ("span", "div"))
        seen = visits[name, WIDE]
        if written and (seen["bare"] or seen["errors"] or seen["height"] < 5 or not seen["fonts"]):
            faults.append(f"{name}: {seen['bare']} of {written} left as text, {seen['errors']} errors")
        everything += written
    assert faults == []
    assert everything > 10


@needs_browser
def test_search_finds_a_word(site, tab):
    tab.open((site / "search.html").as_uri() + "?q=cache")
    count = "document.querySelectorAll('#search-results li').length"
    found = tab.evaluate(
        f"new Promise(done => {{ const end = Date.now() + 10000; const look = () => "
        f"({count} || Date.now() > end) ? done({count}) : setTimeout(look, 50); look(); }})"
    )
    assert found > 1


@needs_browser
def test_dark_mode_changes_the_page(site, tab):
    tab.resize(WIDE)
    tab.open((site / "index.html").as_uri())
    colours = {}
    for mode in ("light", "dark"):
        tab.evaluate(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        tab.evaluate("document.getAnimations().forEach(a => a.finish())")
        colours[mode] = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]


@needs_browser
def test_code_can_be_copied(chapters, visits):
    for name in chapters:
        seen = visits[f"chapters/{name}.html", WIDE]
        assert seen["buttons"] == seen["cells"] > 0


@needs_browser
def test_the_browser_check_bites(tmp_path, tab):
    (tmp_path / "bad.html").write_text(
        "<img src='missing.png'><div style='width: 900px'>wide</div><script>nothing.here()</script>"
        "<script>console.error('an error')</script><link rel=stylesheet href='http://127.0.0.1:9/outside.css'>"
    )
    tab.resize(NARROW)
    tab.open((tmp_path / "bad.html").as_uri())
    complaints = " ".join(tab.complaints())
    assert "nothing is not defined" in complaints
    assert "an error" in complaints
    assert "did not load" in complaints
    assert any(address.startswith("http:") for address in tab.requests())
    assert tab.evaluate("document.documentElement.scrollWidth") > NARROW
