"""The capacity calculator: its table is what costs says, in Python and in the browser, with and without scripts."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest

from kvlab import calculator, config, costs

KEYS = [
    "weights", "kv", "reserved", "free", "kv_per_token", "max_batch", "max_context", "bytes_read", "bandwidth_bound",
    "flops_bound",
]  # fmt: skip

# The settings that every model and card is tried with, between them every dtype, every count of GPUs and both ends.
SETTINGS = [
    {"num_gpus": 1, "weight_dtype": "bf16", "kv_dtype": "bf16", "context": 8192, "batch": 1},
    {"num_gpus": 8, "weight_dtype": "fp8", "kv_dtype": "fp8", "context": 131_072, "batch": 33},
    {"num_gpus": 3, "weight_dtype": "int4", "kv_dtype": "int2", "context": 1, "batch": 1000},
    {"num_gpus": 2, "weight_dtype": "fp32", "kv_dtype": "int8", "context": 999_983, "batch": 7},
    {"num_gpus": 5, "weight_dtype": "int2", "kv_dtype": "fp32", "context": 4097, "batch": 300},
]
GRID = [
    {"model": model, "card": card, **settings}
    for model, card, settings in itertools.product(config.MODELS, costs.HARDWARE, SETTINGS)
]


class Rows(HTMLParser):
    """The rows of the table as written into the page: key to (text, value)."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.rows: dict[str, tuple[str, str]] = {}
        self.key = self.value = ""
        self.in_cell = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "tr":
            self.key = given.get("data-row") or ""
        elif tag == "td":
            self.in_cell, self.value = True, given.get("data-value") or ""

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[self.key] = (data, self.value)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_estimate_is_that_of_costs(settings: dict[str, Any]) -> None:
    for model, card in itertools.product(config.MODELS, costs.HARDWARE):
        shape, hardware = config.get(model), costs.HARDWARE[card]
        got = calculator.estimate(model, card, **settings)
        room = costs.capacity(
            shape, hardware.memory, settings["context"], num_gpus=settings["num_gpus"],
            weight_dtype=settings["weight_dtype"], kv_dtype=settings["kv_dtype"],
        )  # fmt: skip
        assert (got["weights"], got["reserved"], got["total"]) == (room.weights, room.reserved, room.total)
        assert (got["kv_per_token"], got["max_batch"]) == (room.kv_per_token, room.max_batch)
        assert got["fits"] == (room.max_batch >= settings["batch"])
        parts = got["weights"] + got["kv"] + got["reserved"] + got["free"]
        assert parts == pytest.approx(room.total, rel=1e-12)

        longest = got["max_context"]
        for context, fits in ((longest, True), (longest + 1, False)):
            if context >= 1:
                there = costs.capacity(
                    shape, hardware.memory, int(context), num_gpus=settings["num_gpus"],
                    weight_dtype=settings["weight_dtype"], kv_dtype=settings["kv_dtype"],
                )  # fmt: skip
                assert (there.max_batch >= settings["batch"]) == fits


def test_one_gpu_reads_what_a_decode_step_reads_and_needs_the_time_of_the_roofline() -> None:
    for model, card in itertools.product(config.MODELS, costs.HARDWARE):
        work = costs.decode(config.get(model), 4096, 16)
        got = calculator.estimate(model, card, context=4096, batch=16)
        assert got["bytes_read"] == work.bytes_weights + work.bytes_kv_read
        assert got["flops_bound"] == pytest.approx(16 * costs.HARDWARE[card].flops / work.flops)
        # The roofline also counts activations and writes, so that it allows a little less than the bound shown.
        assert 16 / costs.roofline_time(work, costs.HARDWARE[card]) <= got["bandwidth_bound"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "gpt-5"}, "model"),
        ({"card": "abacus"}, "card"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"num_gpus": 9}, "num_gpus"),
        ({"num_gpus": True}, "num_gpus"),
        ({"weight_dtype": "fp7"}, "weight_dtype"),
        ({"kv_dtype": "fp7"}, "kv_dtype"),
        ({"context": 0}, "context"),
        ({"context": 8192.0}, "context"),
        ({"context": 2**24 + 1}, "context"),
        ({"batch": 0}, "batch"),
        ({"batch": 2**16 + 1}, "batch"),
        ({"utilization": 0}, "utilization"),
        ({"utilization": 1.01}, "utilization"),
    ],
)
@pytest.mark.parametrize("function", [calculator.estimate, calculator.show, calculator.text, calculator.html])
def test_bad_settings_are_refused_by_name(function: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}\b"):
        function(**settings)


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="contxt"):
        calculator.show(contxt=5)


@pytest.mark.parametrize("settings", GRID[::7])
def test_the_page_and_the_text_hold_the_same_table_without_any_script(settings: dict[str, Any]) -> None:
    numbers = calculator.estimate(**settings)
    page = re.sub(r"<(script|style)>.*?</\1>", "", calculator.html(**settings), flags=re.S)
    rows = Rows(page).rows
    assert list(rows) == KEYS
    assert {key: float(value) for key, (_, value) in rows.items()} == {key: numbers[key] for key in KEYS}
    plain = calculator.text(**settings)
    for shown, _ in rows.values():
        assert shown in plain
    assert ("does not fit" in plain) == (not numbers["fits"])


def test_the_page_is_closed_in_itself_the_same_each_time_and_carries_no_id() -> None:
    page = calculator.html()
    assert page == calculator.html()
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|import\(", page)
    assert not re.search(r"<[a-z]+[^>]*\sid=", page)
    assert page.count("</script>") == page.count("<script>") == 1
    assert len(page) < 25_000


def test_out_of_a_notebook_show_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    calculator.show("qwen3-8b", "rtx-4090", batch=2)
    assert capsys.readouterr().out == calculator.text("qwen3-8b", "rtx-4090", batch=2) + "\n"


def test_in_a_notebook_show_displays_both_forms() -> None:
    pytest.importorskip("IPython")
    code = """
import json
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.displaypub import CapturingDisplayPublisher
shell = InteractiveShell.instance()
shell.display_pub = CapturingDisplayPublisher()
from kvlab import calculator
assert calculator.show("mistral-7b", kv_dtype="fp8") is None
print(json.dumps([output["data"] for output in shell.display_pub.outputs]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (bundle,) = json.loads(done.stdout)
    assert bundle == {
        "text/html": calculator.html("mistral-7b", kv_dtype="fp8"),
        "text/plain": calculator.text("mistral-7b", kv_dtype="fp8"),
    }


# In the browser. The first widget of the page is driven; the second must not move.

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>calculator</title>
<meta name="viewport" content="width=device-width, initial-scale=1"></head><body>
<div class="out">{first}</div><div class="out">{second}</div></body></html>"""

HELPERS = """
var widgets = Array.from(document.querySelectorAll(".kvlab-calculator"));
function control(key, at) { return widgets[at || 0].querySelector('[data-key="' + key + '"]'); }
function set(key, value, at) {
  const node = control(key, at);
  node.value = value;
  if (node.value !== String(value)) throw new Error(key + " does not take " + value);
  node.dispatchEvent(new Event(node.tagName === "SELECT" ? "change" : "input", {bubbles: true}));
}
function read(at) {
  const found = {};
  widgets[at || 0].querySelectorAll("tr[data-row]").forEach(tr => {
    const td = tr.querySelector("td");
    found[tr.dataset.row] = [td.textContent, Number(td.dataset.value)];
  });
  const text = selector => widgets[at || 0].querySelector(selector).textContent;
  const widths = Array.from(widgets[at || 0].querySelectorAll("[data-part]"), part => parseFloat(part.style.width));
  return {rows: found, verdict: text(".kvlab-c-verdict"), caption: text("caption"), remarks: text(".kvlab-c-remarks"),
          widths: widths, bar: widgets[at || 0].querySelector(".kvlab-c-bar").getAttribute("aria-label")};
}
1
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.find() is None:
        pytest.skip("no Chromium or Chrome on this machine: the widget cannot be driven")
    pytest.importorskip("websocket", reason="websocket-client is not installed: the widget cannot be driven")
    with browser.launch(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def widgets(page: browser.Page, tmp_path: Path) -> browser.Page:
    """A page with two calculators, of which the script has run; 1000 pixels wide."""
    file = tmp_path / "page.html"
    file.write_text(
        PAGE.format(first=calculator.html(), second=calculator.html("qwen3-0.6b", "rtx-4090")), encoding="utf-8"
    )
    page.resize(1000, 1400)
    page.open(file.as_uri())
    page.evaluate(HELPERS)
    return page


def page_rows(settings: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return Rows(calculator.html(**settings)).rows


def test_every_setting_shows_in_the_browser_what_costs_says(widgets: browser.Page) -> None:
    before = widgets.evaluate("read(1)")
    shown = widgets.evaluate(
        f"{json.dumps(GRID)}.map(setting => {{ for (const key in setting) set(key, setting[key]); return read(); }})"
    )
    assert len(shown) == len(GRID) == 275
    fitting = 0
    for settings, got in zip(GRID, shown, strict=True):
        numbers = calculator.estimate(**settings)
        fitting += int(numbers["fits"])
        for key, (text, value) in page_rows(settings).items():
            assert got["rows"][key][1] == pytest.approx(float(value), rel=1e-12, abs=1e-3), (settings, key)
            assert got["rows"][key][0] == text, (settings, key)
        room = costs.capacity(
            config.get(settings["model"]), costs.HARDWARE[settings["card"]].memory, settings["context"],
            num_gpus=settings["num_gpus"], weight_dtype=settings["weight_dtype"], kv_dtype=settings["kv_dtype"],
        )  # fmt: skip
        assert got["rows"]["max_batch"][1] == room.max_batch
        assert got["rows"]["max_context"][1] == room.max_tokens // settings["batch"]
        plain = calculator.text(**settings).splitlines()
        assert [got["caption"], got["verdict"]] == plain[:2]
        assert got["remarks"] == " ".join(plain[2 + len(KEYS) :])
        assert sum(got["widths"]) == pytest.approx(100, abs=0.01)
        assert got["verdict"].startswith("Fits" if numbers["fits"] else "Does not fit")
    assert 50 < fitting < len(GRID) - 50  # the grid tries both
    assert widgets.evaluate("read(1)") == before
    assert not widgets.complaints()
    assert [address for address in widgets.requests() if not address.startswith("file:")] == []


def test_the_script_changes_nothing_of_what_python_wrote(widgets: browser.Page) -> None:
    for at, settings in enumerate([{}, {"model": "qwen3-0.6b", "card": "rtx-4090"}]):
        got = widgets.evaluate(f"read({at})")
        rows = page_rows(settings)
        assert {key: text for key, (text, _) in got["rows"].items()} == {key: text for key, (text, _) in rows.items()}
        assert f'aria-label="{got["bar"]}"' in calculator.html(**settings)


def test_a_reader_can_work_the_slider_by_keyboard(widgets: browser.Page) -> None:
    widgets.evaluate("control('context_slider').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        widgets.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    context = int(widgets.evaluate("control('context').value"))
    assert context == round(8192 * 2**0.125)
    assert widgets.evaluate("control('context_slider').getAttribute('aria-valuetext')") == f"{context:,} tokens"
    rows = page_rows({"context": context})
    assert widgets.evaluate("read().rows.max_batch[0]") == rows["max_batch"][0]


def test_the_number_moves_the_slider(widgets: browser.Page) -> None:
    widgets.evaluate("set('context', 65536)")
    assert float(widgets.evaluate("control('context_slider').value")) == 16


@pytest.mark.parametrize(("key", "bad"), [("batch", "0"), ("batch", ""), ("context", "-5"), ("context", "1.5")])
def test_a_number_that_is_none_keeps_the_last_good_one(widgets: browser.Page, key: str, bad: str) -> None:
    before = widgets.evaluate("read()")
    widgets.evaluate(f"set('{key}', '{bad}')")
    assert widgets.evaluate("read()") == before
    assert widgets.evaluate(f"control('{key}').getAttribute('aria-invalid')") == "true"
    widgets.evaluate(f"control('{key}').dispatchEvent(new Event('blur'))")
    assert widgets.evaluate(f"control('{key}').value") == {"batch": "1", "context": "8192"}[key]
    assert widgets.evaluate(f"control('{key}').getAttribute('aria-invalid')") == "false"


def test_every_control_has_a_name_and_no_id_stands_twice(widgets: browser.Page) -> None:
    names = widgets.evaluate(
        "Array.from(document.querySelectorAll('select, input'), node => "
        "node.getAttribute('aria-label') || (node.labels[0] && node.labels[0].textContent) || '')"
    )
    assert len(names) == 2 * 8
    assert all(names)
    ids = widgets.evaluate("Array.from(document.querySelectorAll('[id]'), node => node.id)")
    assert len(ids) == len(set(ids)) == 2 * 7
    assert widgets.evaluate("document.querySelectorAll('[role=status][aria-live=polite]').length") == 2


@pytest.mark.parametrize("width", [320, 380, 600, 1000])
def test_no_width_needs_sideways_scrolling(widgets: browser.Page, width: int) -> None:
    widgets.resize(width)
    widgets.evaluate("set('model', 'deepseek-v3'); set('num_gpus', 8); set('context', 1000003); set('batch', 65536); 1")
    assert widgets.evaluate("document.scrollingElement.scrollWidth") <= width
    boxes = widgets.evaluate(
        "Array.from(widgets[0].querySelectorAll('*'), node => node.getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    assert all(left >= 0 and right <= width for left, right in boxes)


def test_text_and_controls_take_the_colour_of_the_page(widgets: browser.Page) -> None:
    widgets.evaluate("document.body.style.color = 'rgb(1, 2, 3)'; 1")
    colours = widgets.evaluate(
        "Array.from(widgets[0].querySelectorAll('td, th, caption, label, select, input[type=number], p'), "
        "node => getComputedStyle(node).color)"
    )
    assert set(colours) == {"rgb(1, 2, 3)"}


def test_with_scripts_blocked_the_table_stands_and_no_dead_control_is_shown(page: browser.Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    blocked = '<meta http-equiv="Content-Security-Policy" content="script-src \'none\'">'
    source = PAGE.format(first=calculator.html(), second="").replace("<head>", f"<head>{blocked}")
    file.write_text(source, encoding="utf-8")
    page.open(file.as_uri())
    page.evaluate(HELPERS)
    assert page.evaluate("document.querySelectorAll('select, input, button').length") == 0
    assert page.evaluate("!!document.querySelector('.kvlab-c-static').offsetHeight")
    assert {key: row[0] for key, row in page.evaluate("read().rows").items()} == {
        key: text for key, (text, _) in page_rows({}).items()
    }


@pytest.mark.parametrize("attached", [True, False])
def test_it_starts_the_way_notebooks_insert_html(page: browser.Page, tmp_path: Path, attached: bool) -> None:
    """A notebook sets innerHTML, which runs no script, and then puts a fresh copy in each script's place."""
    file = tmp_path / "empty.html"
    file.write_text(PAGE.format(first="", second=""), encoding="utf-8")
    page.open(file.as_uri())
    page.evaluate(
        f"""
        for (let copy = 0; copy < 2; copy++) {{
          const host = document.createElement("div");
          if ({json.dumps(attached)}) document.body.appendChild(host);
          host.innerHTML = {json.dumps(calculator.html())};
          host.querySelectorAll("script").forEach(old => {{
            const fresh = document.createElement("script");
            fresh.textContent = old.textContent;
            old.parentNode.replaceChild(fresh, old);
          }});
          document.body.appendChild(host);
        }}
        1"""
    )
    page.evaluate(HELPERS)
    page.evaluate("set('model', 'llama-3-70b', 0); set('model', 'qwen3-32b', 1); 1")
    for at, model in enumerate(["llama-3-70b", "qwen3-32b"]):
        assert page.evaluate(f"read({at}).rows.weights[0]") == page_rows({"model": model})["weights"][0]
    assert not page.complaints()
