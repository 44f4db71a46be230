"""A capacity calculator to play with: what fits on a card, how long, how many at once, and how fast at the most.

``show`` displays one piece of HTML that needs no kernel and no network once it is there, so that it works in a
notebook and on a static page alike. Python writes the first state of it as a plain table, from ``costs``; the script
in it builds the controls and recomputes the table from constants that Python took from ``costs``.
"""

from __future__ import annotations

import functools
import json
import math
from html import escape
from typing import Any

from kvlab import config as models
from kvlab import costs

DTYPES = tuple(costs.BYTES_PER_ELEMENT)
MAX_GPUS = 8
MIN_CONTEXT, MAX_CONTEXT = 1, 2**24
MAX_BATCH = 2**16

# The rows in the order shown: key, label, colour of the part in the bar (None: not a part of the memory).
_ROWS = [
    ("weights", "Weights", "#3b78c3"),
    ("kv", "KV cache", "#e08a1e"),
    ("reserved", "Reserved for activations and the runtime", "#8a8f98"),
    ("free", "Free", "transparent"),
    ("kv_per_token", "KV cache of one token, all layers and GPUs", None),
    ("max_batch", "Largest batch at this context", None),
    ("max_context", "Longest context at this batch", None),
    ("bytes_read", "Read in one decode step: weights and KV cache", None),
    ("bandwidth_bound", "Upper bound, reading at the datasheet's bandwidth", None),
    ("flops_bound", "Upper bound, computing at the datasheet's bf16 rate", None),
]
_NOTE = (
    "1 GB is 1e9 bytes. The upper bounds divide what one decode step must read, and compute, by the card's datasheet "
    "rates; an engine that computes in bf16 stays below the lower of the two. Quantized types are counted without "
    "their scales, and work is taken to split evenly over the GPUs at no cost."
)


def estimate(
    model: str = "llama-3-8b",
    card: str = "h200",
    *,
    num_gpus: int = 1,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    context: int = 8192,
    batch: int = 1,
    utilization: float = 0.9,
) -> dict[str, float]:
    """The numbers behind the calculator, from ``costs`` alone.

    Shapes and units: ``model`` is a key of ``config.MODELS``, ``card`` one of ``costs.HARDWARE``; ``context`` in
    tokens of each of ``batch`` sequences; ``utilization`` the part of the memory that weights and cache may take.
    The result has ``fits`` (1 or 0), ``total``, ``weights``, ``kv``, ``reserved``, ``free`` (negative where that much
    is missing), ``kv_per_token`` and ``bytes_read`` in bytes over all GPUs, ``max_batch`` in sequences,
    ``max_context`` in tokens, ``bandwidth_bound`` and ``flops_bound`` in tokens a second over the batch. KV heads that
    several GPUs must copy are stored, and read, on each.

    Raises: ValueError naming the argument that is not one of these, or not positive.

    Source: chapter 00.
    """
    _check(model, card, num_gpus, weight_dtype, kv_dtype, context, batch, utilization)
    shape, hardware = models.get(model), costs.HARDWARE[card]
    room = costs.capacity(
        shape, hardware.memory, context,
        num_gpus=num_gpus, weight_dtype=weight_dtype, kv_dtype=kv_dtype, utilization=utilization,
    )  # fmt: skip
    kv = room.kv_per_token * context * batch
    bytes_read = costs.decode(shape, context, batch, weight_dtype).bytes_weights + kv
    flops = costs.decode(shape, context, batch).flops
    return {
        "fits": int(room.max_batch >= batch),
        "total": room.total,
        "weights": room.weights,
        "kv": kv,
        "reserved": room.reserved,
        "free": room.total - room.reserved - room.weights - kv,
        "kv_per_token": room.kv_per_token,
        "max_batch": room.max_batch,
        "max_context": room.max_tokens // batch,
        "bytes_read": bytes_read,
        "bandwidth_bound": batch * hardware.bandwidth * num_gpus / bytes_read,
        "flops_bound": batch * hardware.flops * num_gpus / flops,
    }


def show(model: str = "llama-3-8b", card: str = "h200", **settings: Any) -> None:
    """Display the calculator, opened at these settings; prints ``text`` where nothing can show HTML.

    Shapes and units: ``settings`` as the keyword arguments of ``estimate``.

    Raises: ValueError as ``estimate``.  Source: chapter 00.
    """
    html_version, text_version = html(model, card, **settings), text(model, card, **settings)
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(text_version)
        return
    if get_ipython() is None:
        print(text_version)
    else:
        display({"text/html": html_version, "text/plain": text_version}, raw=True)


def text(model: str = "llama-3-8b", card: str = "h200", **settings: Any) -> str:
    """The calculator's table as plain text.

    Shapes and units: ``settings`` as the keyword arguments of ``estimate``; bytes in GB (1e9).

    Raises: ValueError as ``estimate``.  Source: chapter 00.
    """
    numbers = estimate(model, card, **settings)
    state = _state(model, card, settings)
    width = max(len(label) for _, label, _ in _ROWS)
    lines = [_caption(state, numbers), _verdict(numbers)]
    lines += [f"  {label:{width}s}  {_cell(key, numbers):>20s}" for key, label, _ in _ROWS]
    return "\n".join([*lines, *_remarks(state)])


def html(model: str = "llama-3-8b", card: str = "h200", **settings: Any) -> str:
    """The calculator as one self-contained piece of HTML: style, the table of these settings, and its script.

    Shapes and units: ``settings`` as the keyword arguments of ``estimate``.

    Raises: ValueError as ``estimate``.  Source: chapter 00.
    """
    numbers = estimate(model, card, **settings)
    state = _state(model, card, settings)
    rows = "".join(
        f'<tr data-row="{key}"><th scope="row">{_swatch(colour)}{escape(label)}</th>'
        f'<td data-value="{_number(numbers[key])}">{escape(_cell(key, numbers))}</td></tr>'
        for key, label, colour in _ROWS
    )
    scale = max(numbers["total"], numbers["total"] - numbers["free"])
    parts = "".join(
        f'<span data-part="{key}" style="width:{100 * max(0.0, numbers[key]) / scale:.4f}%;background:{colour}"></span>'
        for key, _, colour in _ROWS
        if colour
    )
    over = 100 * numbers["total"] / scale
    place = f"left:{over:.4f}%;display:{'block' if over < 100 else 'none'}"
    limit = f'<span class="kvlab-c-limit" title="what the cards have" style="{place}"></span>'
    # In a script element only "</" could end it early.
    data = json.dumps({"state": state, **_constants()}, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<div class="kvlab-calculator"><style>{_STYLE}</style>'
        '<p class="kvlab-c-static">The table holds for one setting. To change it, let the page run its script: '
        "in a notebook run the cell.</p>"
        f'<div class="kvlab-c-bar" role="img" aria-label="{escape(_bar_label(numbers))}">{parts}{limit}</div>'
        f'<p class="kvlab-c-verdict" role="status" aria-live="polite">{escape(_verdict(numbers))}</p>'
        f"<table><caption>{escape(_caption(state, numbers))}</caption><tbody>{rows}</tbody></table>"
        f'<p class="kvlab-c-remarks">{escape(" ".join(_remarks(state)))}</p>'
        f"<script>({_SCRIPT})({data});</script></div>"
    )


def _check(
    model: str, card: str, num_gpus: int, weight_dtype: str, kv_dtype: str, context: int, batch: int, utilization: float
) -> None:
    models.get(model)
    if card not in costs.HARDWARE:
        raise ValueError(f"card is {card!r}; it must be one of {', '.join(costs.HARDWARE)}")
    for name, dtype in (("weight_dtype", weight_dtype), ("kv_dtype", kv_dtype)):
        if dtype not in costs.BYTES_PER_ELEMENT:
            raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    for name, value, low, high in (
        ("num_gpus", num_gpus, 1, MAX_GPUS),
        ("context", context, MIN_CONTEXT, MAX_CONTEXT),
        ("batch", batch, 1, MAX_BATCH),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be a whole number from {low} to {high:,}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization}; it must be over 0 and at most 1")


def _state(model: str, card: str, settings: dict[str, Any]) -> dict[str, Any]:
    defaults = dict(estimate.__kwdefaults__ or {})
    return {"model": model, "card": card, **defaults, **settings}


@functools.cache
def _constants() -> dict[str, Any]:
    """What the script needs of ``costs``, as elements, operations and rates, so that it repeats no formula of a model.

    The weights a decode step reads are base + slope * batch up to all of them (slope: experts); int8 makes bytes
    elements.
    """
    table: dict[str, Any] = {}
    for name, shape in models.MODELS.items():
        one, two = (costs.decode(shape, 1, batch, "int8") for batch in (1, 2))
        every = costs.forward(shape, [10**6], [10**6], "int8").bytes_weights
        slope = two.bytes_weights - one.bytes_weights
        table[name] = {
            "weights": costs.num_parameters(shape).total,
            "read_base": one.bytes_weights - slope,
            "read_slope": slope,
            "read_all": every,
            "kv": costs.kv_bytes_per_token(shape, "int8"),
            "heads": 1 if shape.mla else shape.num_kv_heads,
            "flops_linear": one.flops_linear,
            "flops_attention": one.flops_attention,
            "remarks": _model_remarks(name),
            "max_seq_len": shape.max_seq_len,
        }
    cards = {
        name: {"memory": h.memory, "bandwidth": h.bandwidth, "flops": h.flops} for name, h in costs.HARDWARE.items()
    }
    limits = {"gpus": MAX_GPUS, "context": MAX_CONTEXT, "batch": MAX_BATCH}
    return {"models": table, "cards": cards, "dtypes": costs.BYTES_PER_ELEMENT, "limits": limits, "note": _NOTE}


# Formatting. The script repeats these; a test compares what both write.


def _half_up(value: float, digits: int) -> str:
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:,.{digits}f}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _gb(value: float) -> str:
    if value < 1e6:
        return f"{_half_up(value / 1e3, 1)} kB"
    if value < 1e9:
        return f"{_half_up(value / 1e6, 1)} MB"
    return f"{_half_up(value / 1e9, 1)} GB"


def _cell(key: str, numbers: dict[str, float]) -> str:
    value = numbers[key]
    if key in ("bandwidth_bound", "flops_bound"):
        if not numbers["fits"]:
            return "does not fit"
        return f"{_half_up(value, 0 if value >= 100 else 1)} tokens/s"
    if key == "free":
        return _gb(max(0.0, value)) if numbers["fits"] else f"{_gb(-value)} missing"
    if key == "kv_per_token":
        return f"{_half_up(value, 0)} bytes"
    if key == "max_batch":
        return f"{int(value):,} sequence{'' if value == 1 else 's'}"
    if key == "max_context":
        return f"{int(value):,} tokens"
    return _gb(value)


def _caption(state: dict[str, Any], numbers: dict[str, float]) -> str:
    return (
        f"{state['model']} on {state['num_gpus']} × {state['card']} ({_gb(numbers['total'])}), {state['weight_dtype']} "
        f"weights, {state['kv_dtype']} KV cache, context {state['context']:,}, batch {state['batch']:,}"
    )


def _verdict(numbers: dict[str, float]) -> str:
    if numbers["fits"]:
        return f"Fits, with {_gb(max(0.0, numbers['free']))} to spare."
    usable = numbers["total"] - numbers["reserved"]
    if numbers["weights"] > usable:
        return f"Does not fit: the weights alone need {_gb(numbers['weights'])} of {_gb(usable)} usable."
    return f"Does not fit: {_gb(-numbers['free'])} of KV cache too much."


def _bar_label(numbers: dict[str, float]) -> str:
    parts = [f"{label.lower()} {_cell(key, numbers)}" for key, label, colour in _ROWS if colour]
    return f"Memory, {_gb(numbers['total'])} in all: {', '.join(parts)}"


def _model_remarks(name: str) -> list[str]:
    shape, remarks = models.get(name), []
    if shape.sliding_window is not None:
        remarks.append(
            f"{name} has a sliding window of {shape.sliding_window:,} tokens; here every layer keeps and reads the "
            "whole context. A cache that forgets holds less, and reading only the window is faster."
        )
    if shape.moe is not None:
        remarks.append(
            f"{name} has {shape.moe.num_experts} experts; a decode step is counted as if each token chose experts "
            "that no other token chose, up to all of them. Where tokens share experts less is read, and the bound "
            "is higher."
        )
    return remarks


def _remarks(state: dict[str, Any]) -> list[str]:
    shape, hardware = models.get(state["model"]), costs.HARDWARE[state["card"]]
    bandwidth, flops = _half_up(hardware.bandwidth / 1e12, 2), _half_up(hardware.flops / 1e12, 0)
    remarks = [f"{hardware.name} by its datasheet: {bandwidth} TB/s and {flops} TFLOP/s in bf16.", _NOTE]
    if state["context"] > shape.max_seq_len:
        remarks.append(f"{shape.name} was published for contexts up to {shape.max_seq_len:,} tokens.")
    return remarks + _model_remarks(shape.name)


def _swatch(colour: str | None) -> str:
    if colour is None:
        return ""
    return f'<span class="kvlab-c-swatch" style="background:{colour}" aria-hidden="true"></span>'


# Colours and fonts are inherited, so that the page's theme, light or dark, holds here too. The last rule undoes the
# light ground that the site's theme puts under the HTML of a cell when it is dark.
_STYLE = """
.kvlab-calculator{max-width:46rem;margin:.5rem 0;font-size:.95em;line-height:1.4;color:inherit;box-sizing:border-box}
.kvlab-calculator *{box-sizing:border-box}
.kvlab-c-controls{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(max(30%,8.5rem),100%),1fr));
gap:.5rem .9rem;border:0;margin:0 0 .8rem;padding:0;min-width:0}
.kvlab-c-controls label{display:block;margin:0;font-weight:600;font-size:.88em}
.kvlab-c-controls>div{min-width:0}
.kvlab-c-controls .kvlab-c-wide{grid-column:1/-1}
.kvlab-calculator select,.kvlab-calculator input[type=number]{width:100%;min-width:0;margin:0;padding:.2rem .35rem;
font:inherit;color:inherit;background:transparent;border:1px solid currentColor;border-radius:4px}
.kvlab-calculator option{color:CanvasText;background:Canvas}
.kvlab-calculator input[type=range]{width:100%;min-width:0;margin:.3rem 0 0;accent-color:#3b78c3}
.kvlab-calculator [aria-invalid=true]{outline:2px solid #d1453b}
.kvlab-calculator :focus-visible{outline:2px solid #3b78c3;outline-offset:2px}
.kvlab-c-context{display:grid;grid-template-columns:minmax(0,1fr) 7.5rem;gap:.8rem;align-items:center}
.kvlab-c-bar{position:relative;display:flex;height:1.6rem;border:1px solid currentColor;border-radius:4px;
overflow:hidden;margin:.2rem 0}
.kvlab-c-bar>span{display:block;height:100%;flex:none}
.kvlab-c-bar>.kvlab-c-limit{position:absolute;top:0;width:0;border-left:3px dashed currentColor}
.kvlab-calculator p{margin:.35rem 0}
.kvlab-calculator p.kvlab-c-verdict{font-weight:600}
.kvlab-calculator p.kvlab-c-remarks,.kvlab-calculator p.kvlab-c-static{font-size:.85em;opacity:.85}
div.kvlab-calculator table{display:table;width:100%;max-width:100%;margin:.4rem 0;border-collapse:collapse;
table-layout:auto;font-size:inherit;color:inherit;border:0}
div.kvlab-calculator caption{caption-side:top;text-align:left;padding:.2rem 0;font-size:.88em;color:inherit;
opacity:.85;overflow-wrap:anywhere}
div.kvlab-calculator tbody tr,div.kvlab-calculator tbody tr:nth-child(n){background:transparent;color:inherit;border:0}
div.kvlab-calculator th,div.kvlab-calculator td{padding:.22rem .3rem;border:0;
border-top:1px solid rgba(128,128,128,.4);color:inherit;background:transparent;vertical-align:top;max-width:none;
white-space:normal}
div.kvlab-calculator th{text-align:left;font-weight:400}
div.kvlab-calculator td{text-align:right;font-variant-numeric:tabular-nums;font-weight:600}
.kvlab-c-swatch{display:inline-block;width:.8em;height:.8em;margin-right:.45em;border:1px solid currentColor;
border-radius:2px;vertical-align:-.05em}
html[data-theme=dark] div.text_html:has(>.kvlab-calculator){background:transparent!important;color:inherit!important;
padding:0!important}
""".replace("\n", "")

_SCRIPT = r"""
function (data) {
  "use strict";
  const script = document.currentScript;
  const mine = script && script.closest(".kvlab-calculator");
  const roots = mine ? [mine] : document.querySelectorAll(".kvlab-calculator:not([data-ready])");

  // As Python's // on floats: the remainder is exact, so no quotient is rounded up to a token that does not fit.
  const floorDivide = (a, b) => Math.round((a - a % b) / b);

  function estimate(s) {
    const m = data.models[s.model], card = data.cards[s.card];
    const total = card.memory * s.num_gpus, usable = card.memory * s.num_gpus * s.utilization;
    const fullest = Math.ceil(m.heads / s.num_gpus);
    const perToken = m.kv * data.dtypes[s.kv_dtype] * s.num_gpus * fullest / m.heads;
    const weights = m.weights * data.dtypes[s.weight_dtype];
    const maxTokens = usable < weights ? 0 : floorDivide(usable - weights, perToken);
    const kv = perToken * s.context * s.batch, reserved = total - usable;
    const read = Math.min(m.read_all, m.read_base + m.read_slope * s.batch) * data.dtypes[s.weight_dtype] + kv;
    const flops = s.batch * (m.flops_linear + m.flops_attention * s.context);
    return {
      fits: maxTokens >= s.context * s.batch ? 1 : 0, total: total, weights: weights, kv: kv, reserved: reserved,
      free: total - reserved - weights - kv,
      kv_per_token: perToken, max_batch: Math.floor(maxTokens / s.context),
      max_context: Math.floor(maxTokens / s.batch), bytes_read: read,
      bandwidth_bound: s.batch * card.bandwidth * s.num_gpus / read,
      flops_bound: s.batch * card.flops * s.num_gpus / flops,
    };
  }

  function halfUp(value, digits) {
    const power = Math.pow(10, digits);
    return (Math.floor(value * power + 0.5) / power).toLocaleString(
      "en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  }
  function gb(v) {
    if (v < 1e6) return halfUp(v / 1e3, 1) + " kB";
    if (v < 1e9) return halfUp(v / 1e6, 1) + " MB";
    return halfUp(v / 1e9, 1) + " GB";
  }
  function cell(key, n) {
    const v = n[key];
    if (key === "bandwidth_bound" || key === "flops_bound")
      return n.fits ? halfUp(v, v >= 100 ? 0 : 1) + " tokens/s" : "does not fit";
    if (key === "free") return n.fits ? gb(Math.max(0, v)) : gb(-v) + " missing";
    if (key === "kv_per_token") return halfUp(v, 0) + " bytes";
    if (key === "max_batch") return halfUp(v, 0) + (v === 1 ? " sequence" : " sequences");
    if (key === "max_context") return halfUp(v, 0) + " tokens";
    return gb(v);
  }
  function caption(s, n) {
    return s.model + " on " + s.num_gpus + " × " + s.card + " (" + gb(n.total) + "), " + s.weight_dtype +
      " weights, " + s.kv_dtype + " KV cache, context " + halfUp(s.context, 0) + ", batch " + halfUp(s.batch, 0);
  }
  function verdict(n) {
    if (n.fits) return "Fits, with " + gb(Math.max(0, n.free)) + " to spare.";
    const usable = n.total - n.reserved;
    if (n.weights > usable)
      return "Does not fit: the weights alone need " + gb(n.weights) + " of " + gb(usable) + " usable.";
    return "Does not fit: " + gb(-n.free) + " of KV cache too much.";
  }
  function remarks(s) {
    const m = data.models[s.model], card = data.cards[s.card];
    const all = [s.card + " by its datasheet: " + halfUp(card.bandwidth / 1e12, 2) + " TB/s and " +
      halfUp(card.flops / 1e12, 0) + " TFLOP/s in bf16.", data.note];
    if (s.context > m.max_seq_len)
      all.push(s.model + " was published for contexts up to " + halfUp(m.max_seq_len, 0) + " tokens.");
    return all.concat(m.remarks).join(" ");
  }

  function make(tag, attributes, parent, content) {
    const node = document.createElement(tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (content !== undefined) node.textContent = content;
    if (parent) parent.appendChild(node);
    return node;
  }
  function freshId() {
    let id;
    do {
      window.kvlabCalculators = (window.kvlabCalculators || 0) + 1;
      id = "kvlab-calculator-" + window.kvlabCalculators;
    } while (document.getElementById(id + "-model"));
    return id;
  }

  roots.forEach(function (root) {
    if (root.dataset.ready) return;
    root.dataset.ready = "yes";
    const id = freshId(), state = Object.assign({}, data.state);
    const find = (selector) => root.querySelector(selector);
    const panel = make("div", {"class": "kvlab-c-controls", role: "group", "aria-label": "Settings"});
    root.insertBefore(panel, find(".kvlab-c-bar"));
    find(".kvlab-c-static").remove();

    function field(key, label, wide) {
      const box = make("div", wide ? {"class": "kvlab-c-wide"} : {}, panel);
      make("label", {"for": id + "-" + key}, box, label);
      return box;
    }
    function choice(key, label, options) {
      const select = make("select", {id: id + "-" + key, "data-key": key}, field(key, label));
      options.forEach(function (option) { make("option", {value: option[0]}, select, option[1]); });
      select.value = String(state[key]);
      select.addEventListener("change", function () {
        state[key] = key === "num_gpus" ? Number(select.value) : select.value;
        update();
      });
    }
    function wholeNumber(key, parent, most, onChange) {
      const input = make("input", {
        type: "number", inputmode: "numeric", id: id + "-" + key, "data-key": key, min: 1, max: most, step: 1,
      }, parent);
      input.value = state[key];
      input.addEventListener("input", function () {
        const value = input.value.trim() === "" ? NaN : Number(input.value);
        const good = Number.isInteger(value) && value >= 1 && value <= most;
        input.setAttribute("aria-invalid", String(!good));
        if (!good) return;  // the table keeps the last good value, and its caption says which
        state[key] = value;
        if (onChange) onChange(value);
        update();
      });
      input.addEventListener("blur", function () {
        input.value = state[key];
        input.setAttribute("aria-invalid", "false");
      });
      return input;
    }

    const named = (table, label) => Object.keys(table).map((name) => [name, label(name)]);
    choice("model", "Model", named(data.models, (name) => name));
    choice("card", "Card", named(data.cards, (name) =>
      name + ", " + data.cards[name].memory / 1e9 + " GB"));
    choice("num_gpus", "GPUs", Array.from({length: data.limits.gpus}, (_, i) => [i + 1, i + 1]));
    choice("weight_dtype", "Weights in", named(data.dtypes, (name) => name));
    choice("kv_dtype", "KV cache in", named(data.dtypes, (name) => name));
    wholeNumber("batch", field("batch", "Batch (sequences)"), data.limits.batch);

    // The slider is logarithmic, eight steps a doubling; the number beside it takes any length.
    const row = make("div", {"class": "kvlab-c-context"}, field("context", "Context (tokens)", true));
    const slider = make("input", {
      type: "range", min: 7, max: Math.log2(data.limits.context), step: 0.125, "aria-label": "Context, logarithmic",
      "data-key": "context_slider",
    }, row);
    function placeSlider() {
      slider.value = Math.log2(state.context);
      slider.setAttribute("aria-valuetext", halfUp(state.context, 0) + " tokens");
    }
    const exact = wholeNumber("context", row, data.limits.context, placeSlider);
    slider.addEventListener("input", function () {
      state.context = Math.round(Math.pow(2, Number(slider.value)));
      exact.value = state.context;
      exact.setAttribute("aria-invalid", "false");
      slider.setAttribute("aria-valuetext", halfUp(state.context, 0) + " tokens");
      update();
    });
    placeSlider();

    function update() {
      const n = estimate(state), scale = Math.max(n.total, n.total - n.free), spoken = [];
      root.querySelectorAll("tr[data-row]").forEach(function (tr) {
        const key = tr.dataset.row, td = tr.querySelector("td"), part = find("[data-part=" + key + "]");
        td.dataset.value = n[key];
        td.textContent = cell(key, n);
        if (part) {
          part.style.width = 100 * Math.max(0, n[key]) / scale + "%";
          spoken.push(tr.querySelector("th").textContent.toLowerCase() + " " + td.textContent);
        }
      });
      const limit = find(".kvlab-c-limit");
      limit.style.left = 100 * n.total / scale + "%";
      limit.style.display = n.total < scale ? "block" : "none";
      find(".kvlab-c-bar").setAttribute("aria-label", "Memory, " + gb(n.total) + " in all: " + spoken.join(", "));
      find(".kvlab-c-verdict").textContent = verdict(n);
      find("caption").textContent = caption(state, n);
      find(".kvlab-c-remarks").textContent = remarks(state);
    }
    update();
  });
}
""".strip()
