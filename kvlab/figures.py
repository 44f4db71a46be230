"""Figures in one style, each with alt text; records of measurements, read from ``book/measured/``.

Every figure is drawn on its own light card, in colours that people with any kind of colour vision can tell apart (Okabe
and Ito's) and whose line styles survive a black-and-white print, so that it can be read on light and dark pages alike.
matplotlib is imported when the first figure is made, not before.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import display
from kvlab.display import markdown as markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.costs import Hardware

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#B8A800")
INK, CARD, EMPTY = "#222222", "#fcfcfc", "#e9e9e9"
DPI = 110

_MEASURED: Path | None = Path(__file__).resolve().parent.parent / "book" / "measured"


@functools.cache
def style() -> None:
    """Set matplotlib's defaults to the book's style, for this process; ``figure`` does so by itself.

    Source: Okabe and Ito 2008 (the colours).
    """
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": "#666666",
            "axes.facecolor": CARD,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.prop_cycle": cycler(color=COLORS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "figure.dpi": DPI,
            "figure.facecolor": CARD,
            "font.family": "DejaVu Sans",  # ships with matplotlib: figures look the same everywhere
            "font.size": 9,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "image.cmap": "cividis",
            "legend.fontsize": 8,
            "legend.framealpha": 0.9,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
            "savefig.facecolor": CARD,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def figure(width: float = 6.4, height: float = 3.6, *, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A new figure in the book's style.

    Shapes and units: width and height in inches (110 pixels each); gives the figure and its Axes: one, or an array
    [columns] or [rows] where there is one row or column, or [rows, columns].

    Raises: ValueError for a size or count that is not positive.

    Source: CONTRIBUTING.md.
    """
    if not (width > 0 and height > 0 and rows > 0 and columns > 0):
        raise ValueError(f"width {width}, height {height}, rows {rows} and columns {columns} must all be positive")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style()
    fig = Figure(figsize=(width, height), layout="constrained")  # not pyplot's: nothing shows it but show()
    FigureCanvasAgg(fig)
    return fig, fig.subplots(rows, columns)


def png(fig: Figure) -> bytes:
    """A figure as PNG bytes at 110 dpi, in 256 colours, the same bytes each time. Source: CONTRIBUTING.md."""
    from PIL import Image

    raw = io.BytesIO()
    fig.savefig(raw, format="png", dpi=DPI, facecolor=CARD, metadata={"Software": None})
    small = io.BytesIO()
    image = Image.open(raw).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(small, format="PNG", optimize=True)
    return min(small.getvalue(), raw.getvalue(), key=len)


def show(fig: Figure, *, alt: str, caption: str = "") -> None:
    """Show a figure with a text for those who cannot see it; a script prints the texts.

    Shapes and units: ``alt`` says in a sentence what can be seen; ``caption`` stands below (`code` is set as code).

    Raises: ValueError where ``alt`` is empty.

    Source: CONTRIBUTING.md.
    """
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt is {alt!r}; it must say in a sentence what the figure shows")
    plain = f"[Figure: {alt}]" + (f"\n{caption}" if caption else "")
    if not display.in_notebook():
        display.emit({"text/plain": plain})
        return
    data = base64.b64encode(png(fig)).decode()
    width = round(fig.get_figwidth() * DPI)
    legend = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(caption, quote=False))
    below = f'<figcaption style="font-size:90%">{legend}</figcaption>' if caption else ""
    image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" width="{width}" style="max-width:100%">'
    display.emit(
        {"text/html": f'<figure class="kvlab-figure">{image}{below}</figure>', "text/plain": plain},
        {"kvlab_figure": {"alt": alt, "caption": caption}},
    )


def shown(output: Mapping[str, Any]) -> tuple[bytes, str, str] | None:
    """Take apart a notebook output that ``show`` made: (PNG bytes, alt text, caption), or None for another output.

    Source: Jupyter's notebook format.
    """
    about = output.get("metadata", {}).get("kvlab_figure")
    text = output.get("data", {}).get("text/html", "")
    found = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)", "".join(text))
    if about is None or found is None:
        return None
    return base64.b64decode(found[1]), about["alt"], about["caption"]


# --- records -------------------------------------------------------------------------------------------------------


def records(
    bench: str | None = None, impl: str | None = None, device: str | None = None, **where: Any
) -> list[dict[str, Any]]:
    """The committed measurements that fit, as dicts, in the order of their files.

    Shapes and units: ``bench`` is a whole name ("ceilings.read") or the part before the dot; ``device`` is found
    anywhere in the record's ("H200"); ``impl`` and all others (dtype, unit, version, ...) must be equal, and a name
    that is no field of a record is looked up in its shape. A record has run, bench, impl, version, shape (a dict),
    dtype, value, unit, ms, spread, error, device, driver, torch, triton, date and commit.

    Raises: FileNotFoundError outside a checkout of the repository; LookupError where no record fits.

    Source: book/measured.
    """
    everything = _all_records(_MEASURED)

    def fits(record: dict[str, Any]) -> bool:
        if bench is not None and record["bench"] != bench and not record["bench"].startswith(bench + "."):
            return False
        if device is not None and device not in record["device"]:
            return False
        if impl is not None and record["impl"] != impl:
            return False
        return all((record[k] if k in record else record["shape"].get(k)) == v for k, v in where.items())

    found = [record for record in everything if fits(record)]
    if not found:
        wanted = {"bench": bench, "impl": impl, "device": device, **where}
        asked = ", ".join(f"{k}={v!r}" for k, v in wanted.items() if v is not None)
        raise LookupError(f"no record in {_MEASURED} has {asked}; there are {sorted({r['bench'] for r in everything})}")
    return found


def record_line(
    bench: str, impl: str, axis: str, *, device: str = "H200", field: str = "value", **where: Any
) -> tuple[Any, Any]:
    """One recorded line: (x, y) arrays, x an entry of the shape in rising order, y a number of the record.

    Shapes and units: x in the unit of the shape's entry, y in the record's; ``where`` as in ``records``.

    Raises: as ``records``; KeyError where a record has no such entry or field.

    Source: book/measured.
    """
    import numpy as np

    rows = sorted(records(bench, impl, device, **where), key=lambda r: r["shape"][axis])
    return np.array([r["shape"][axis] for r in rows]), np.array([r[field] for r in rows])


def recorded(bench: str, *, device: str = "H200", **where: Any) -> list[dict[str, Any]]:
    """As ``records``, but an empty list, and a line that says so, where nothing fits yet.

    Shapes and units: as ``records``.

    Raises: FileNotFoundError outside a checkout of the repository.

    Source: chapter 03.
    """
    try:
        return records(bench, device=device, **where)
    except LookupError:
        print(f"{bench}: not recorded yet")
        return []


def by_shape(bench: str, *axes: str, unit: str = "TFLOP/s", **where: Any) -> dict[tuple[Any, ...], dict[str, float]]:
    """The best recorded value of each implementation in each shape: {shape: {impl: value}}, in order of shape.

    Shapes and units: a shape is the values of ``axes``, entries of a record's shape; the best value is the largest one,
    of times and sizes (ms, us, MB) the smallest. What an impl's name has in parentheses is left out. ``where`` as in
    ``records``.

    Raises: as ``recorded``.

    Source: chapter 03.
    """
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in recorded(bench, unit=unit, **where):
        values = found.setdefault(tuple(r["shape"].get(axis) for axis in axes), {})
        impl = re.sub(r" \([^)]*\)", "", r["impl"])  # "X (wheel), dense" is "X, dense"
        better = min if unit in ("ms", "us", "MB") else max
        values[impl] = better(r["value"], values.get(impl, r["value"]))
    return dict(sorted(found.items(), key=lambda entry: [(x is None, x) for x in entry[0]]))


def by_impl(found: Mapping[tuple[Any, ...], Mapping[str, float]]) -> dict[str, tuple[list[Any], list[float]]]:
    """What ``by_shape`` gave as lines for ``plot``: {impl: (x, y)}, x the first entry of each shape that has the impl.

    Shapes and units: as ``by_shape``.

    Source: chapter 03.
    """
    names = dict.fromkeys(impl for values in found.values() for impl in values)
    points = {impl: [(shape[0], values[impl]) for shape, values in found.items() if impl in values] for impl in names}
    return {impl: ([x for x, _ in line], [y for _, y in line]) for impl, line in points.items()}


def table(
    title: str, found: Mapping[tuple[Any, ...], Mapping[str, float]], axes: Sequence[str], *, base: Sequence[str] = ()
) -> None:
    """Show what ``by_shape`` gave as a table: a row a shape, each value with, in parentheses, its ratio to the base.

    Shapes and units: ``title`` stands in the corner; ``axes`` name the entries of a shape; ``base`` names the
    implementation to divide by, in order of preference (none: no ratios). Nothing is shown where nothing was found.

    Source: chapter 03.
    """
    columns = list(dict.fromkeys(impl for values in found.values() for impl in values))
    if not columns:
        return
    rows = [f"| {title}: {', '.join(axes)} | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    for shape, values in found.items():
        against = next((values[name] for name in base if name in values), None)
        cells = []
        for impl in columns:
            ratio = f" ({values[impl] / against:.2f})" if impl in values and against else ""
            value = values.get(impl, 0.0)
            number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
            cells.append(f"{number}{ratio}" if impl in values else "")
        at = ", ".join("–" if x is None else str(x) for x in shape)
        rows.append(f"| {at} | {' | '.join(cells)} |")
    markdown("\n".join(rows))


def measured_hardware(name: str = "h200") -> Hardware:
    """A machine of ``costs.HARDWARE`` with the rates and energies that were measured on it in place of the datasheet's.

    Shapes and units: as ``costs.Hardware``; the best read rate and the best bf16 matrix product of ``book/measured``.

    Raises: LookupError for a machine that is not in ``costs.HARDWARE``, or of which nothing is recorded;
    FileNotFoundError outside a checkout.

    Source: chapter 00.
    """
    from kvlab import costs

    if name not in costs.HARDWARE:
        raise LookupError(f"no machine is called {name!r}; there are {sorted(costs.HARDWARE)}")

    def best(bench: str, **where: Any) -> float:
        return float(max(r["value"] for r in records(bench, device=name.upper(), **where)))

    return costs.Hardware(
        f"{name.upper()} (measured)",
        costs.HARDWARE[name].memory,
        bandwidth=best("ceilings.read", unit="GB/s") * 1e9,
        flops=best("ceilings.matmul", unit="TFLOP/s", dtype="bfloat16") * 1e12,
        source="measured",
        joules_per_byte=best("ceilings.energy_above_idle", impl="read") * 1e-12,
        joules_per_flop=best("ceilings.energy_above_idle", impl="matmul") * 1e-12,
    )


def _all_records(folder: Path | None) -> list[dict[str, Any]]:
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"the records of measurements are in book/measured of the repository, and {folder} does not exist: "
            "work from a checkout (an installed kvlab does not carry them)"
        )
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        entries = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(entries, list):
            found += [entry for entry in entries if isinstance(entry, dict) and "bench" in entry]
    return found


# --- kinds of pictures ---------------------------------------------------------------------------------------------


def roofline(
    ax: Axes,
    ceilings: Mapping[str, tuple[float, float]],
    points: Mapping[str, tuple[float, float]],
    *,
    intensity: tuple[float, float] | None = None,
) -> None:
    """Draw rooflines and mark work on them, on logarithmic axes.

    Shapes and units: ``ceilings`` maps a machine to (bytes/s, FLOP/s), ``points`` a label to (FLOP/byte, FLOP/s);
    ``intensity`` is the range of the x axis in FLOP/byte, by default what shows all ridges and points.

    Raises: ValueError for a rate or intensity that is not positive.

    Source: chapter 00; Williams, Waterman and Patterson 2009.
    """
    import numpy as np

    for name, (a, b) in [*ceilings.items(), *points.items()]:
        if not (a > 0 and b > 0):
            raise ValueError(f"{name} is ({a}, {b}); a roofline needs positive numbers")
    xs = [p[0] for p in points.values()] + [flops / bandwidth for bandwidth, flops in ceilings.values()]
    low, high = intensity or (min([*xs, 1.0]) / 3, max([*xs, 100.0]) * 8)
    line = np.geomspace(low, high, 200)
    for i, (name, (bandwidth, flops)) in enumerate(ceilings.items()):
        color = COLORS[i % len(COLORS)]
        ax.plot(line, np.minimum(line * bandwidth, flops), color=color, ls=("-", "--", "-.", ":")[i % 4], label=name)
        ridge = flops / bandwidth
        ax.plot([ridge], [flops], marker="|", ms=12, color=color)
        ax.annotate(
            f"ridge {ridge:.0f}", (ridge, flops), xytext=(2, 5), textcoords="offset points", color=color, fontsize=8
        )
    for i, (name, (x, y)) in enumerate(points.items()):
        marker = "osD^vP*X"[i % 8]
        ax.plot(
            [x], [y], marker=marker, ls="", ms=7, color=INK, mfc=COLORS[(i + len(ceilings)) % len(COLORS)], label=name
        )
    ax.set(xscale="log", yscale="log", xlabel="intensity (FLOP a byte)", ylabel="FLOP/s", xlim=(low, high))
    _engineering(ax.yaxis)
    if ceilings or points:
        ax.legend(loc="lower right")


def stacked_bars(ax: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw one bar a label, made of the parts laid on each other, with hatching that survives a print.

    Shapes and units: each part has one number a label, all in one unit.

    Raises: ValueError where a part has another length or a negative number.

    Source: chapter 00.
    """
    bottom = [0.0] * len(labels)
    for i, (name, values) in enumerate(parts.items()):
        if len(values) != len(labels):
            raise ValueError(f"{name} has {len(values)} numbers for {len(labels)} labels")
        if min(values, default=0) < 0:
            raise ValueError(f"{name} holds {min(values)}; parts of a bar must be 0 or more")
        hatch = ("", "///", "...", "xx")[i % 4]
        color = COLORS[i % len(COLORS)]
        ax.bar(
            list(labels), values, bottom=bottom, label=name, color=color, hatch=hatch, edgecolor="white", linewidth=0.5
        )
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    ax.grid(axis="x", visible=False)
    ax.legend()


def bars(
    values: Mapping[str, float],
    xlabel: str,
    *,
    alt: str,
    caption: str = "",
    fmt: str = "{:.3g}",
    log: bool = False,
    special: Sequence[str] = (),
) -> None:
    """Draw one horizontal bar a label with its number beside it, and show them.

    Shapes and units: ``values`` in one unit, 0 or more, positive where ``log``; labels in ``special`` are orange.

    Raises: ValueError where there are no values, one is out of range, or ``alt`` is empty.

    Source: chapter 03.
    """
    if not values or any(not (x > 0 or (x == 0 and not log)) for x in values.values()):
        raise ValueError(f"values are {dict(values)}; there must be one or more, {'above 0' if log else '0 or more'}")
    fig, ax = figure(7.6, 0.9 + 0.3 * len(values))
    drawn = ax.barh(list(values), list(values.values()), color=[COLORS[3 if x in special else 2] for x in values])
    ax.bar_label(drawn, [fmt.format(x) for x in values.values()], padding=3, fontsize=8)
    low, high = min(values.values()), max(values.values())
    ax.set(xlabel=xlabel, xscale="log" if log else "linear", xlim=(low / 2 if log else 0, high * (3 if log else 1.15)))
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    show(fig, alt=alt, caption=caption)


def heatmap(
    ax: Axes,
    values: Sequence[Sequence[float]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    fmt: str = "{:.2g}",
) -> None:
    """Draw a table as coloured cells, each with its number.

    Shapes and units: values [len(row_labels)][len(column_labels)], in one unit, NaN where there is none; ``fmt``
    formats a number.

    Raises: ValueError where the shapes disagree.

    Source: chapter 00.
    """
    if len(values) != len(row_labels) or any(len(row) != len(column_labels) for row in values):
        raise ValueError(f"values must have {len(row_labels)} rows of {len(column_labels)} numbers")
    numbers = [[float(v) for v in row] for row in values]
    there = [value for row in numbers for value in row if not math.isnan(value)]
    low, high = min(there, default=0.0), max(there, default=1.0)
    ax.imshow(numbers, aspect="auto", cmap="cividis", vmin=low, vmax=high)
    for i, row in enumerate(numbers):
        for j, value in enumerate(row):
            if math.isnan(value):
                continue
            dark = value < low + (high - low) * 0.55
            ax.text(j, i, fmt.format(value), ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
    ax.set_xticks(range(len(column_labels)), list(column_labels))
    ax.set_yticks(range(len(row_labels)), list(row_labels))
    ax.grid(False)


def timeline(ax: Axes, lanes: Mapping[str, Sequence[tuple[float, float, str]]], *, unit: str = "s") -> None:
    """Draw what each lane did when; the same kind of work has the same colour in all lanes.

    Shapes and units: a lane is a list of (start, end, kind), times in ``unit``.

    Raises: ValueError where an interval ends before it starts.

    Source: chapter 06.
    """
    kinds: dict[str, int] = {}
    for y, (name, spans) in enumerate(lanes.items()):
        for start, end, kind in spans:
            if end < start:
                raise ValueError(f"lane {name} has {kind!r} from {start} to {end}; it must not end before it starts")
            seen = kind in kinds
            i = kinds.setdefault(kind, len(kinds))
            ax.barh(
                y, end - start, left=start, height=0.7, color=COLORS[i % len(COLORS)], edgecolor="white", linewidth=0.5,
                hatch=("", "///", "...", "xx")[i % 4], label=None if seen else kind,
            )  # fmt: skip
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.invert_yaxis()
    ax.set_xlabel(f"time ({unit})")
    ax.grid(axis="y", visible=False)
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def cache_map(cache: Any, ax: Axes | None = None) -> Figure:
    """Draw a contiguous cache from its own tables: each row of slots, whose it is, which slots hold a token.

    Shapes and units: ``cache`` is a ``NaiveCache`` (max_num_seqs rows of max_seq_len slots); one square a slot where
    they are few enough to be counted, else bars. Gives the figure.

    Raises: ValueError for a cache that has no rows.

    Source: chapter 01.
    """
    owners = getattr(cache, "_rows", None)
    if owners is None or not hasattr(cache, "max_seq_len"):
        raise ValueError(f"cache is a {type(cache).__name__}; cache_map draws contiguous rows, such as NaiveCache's")
    from matplotlib.patches import Rectangle

    rows, slots = cache.max_num_seqs, cache.max_seq_len
    if ax is None:
        fig, ax = figure(6.8, min(0.9 + 0.34 * rows, 6.0))
    else:
        fig = ax.get_figure(root=True)  # type: ignore[assignment]
    assert ax is not None
    by_row = {row: seq_id for seq_id, row in owners.items()}
    countable = slots <= 64
    for row in range(rows):
        used = cache.length(by_row[row]) if row in by_row else 0
        taken = row in by_row
        spans = (
            [(i, 1, i < used) for i in range(slots)] if countable else [(0, used, True), (used, slots - used, False)]
        )
        for start, width, filled in spans:
            ax.add_patch(
                Rectangle(
                    (start, row - 0.4), width, 0.8, linewidth=0.8 if countable else 0.4, edgecolor="white",
                    facecolor=COLORS[0] if filled else (COLORS[5] if taken else EMPTY),
                    alpha=1.0 if filled or not taken else 0.45, hatch="///" if taken and not filled else None,
                )
            )  # fmt: skip
    labels = [f"row {r}: " + (f"sequence {by_row[r]}" if r in by_row else "free") for r in range(rows)]
    ax.set_yticks(range(rows), labels, fontsize=8 if rows <= 20 else 6)
    ax.set(xlim=(0, slots), ylim=(rows - 0.4, -0.6), xlabel="slot")
    ax.grid(False)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=COLORS[0], label="holds a token"),
        Rectangle(
            (0, 0), 1, 1, facecolor=COLORS[5], alpha=0.45, hatch="///", edgecolor="white", label="reserved, empty"
        ),
        Rectangle((0, 0), 1, 1, facecolor=EMPTY, label="free"),
    ]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return fig


def block_tables(ax: Axes, manager: Any, words: Mapping[int, Sequence[Any]], title: str = "") -> None:
    """Draw a pool block by block, with what each slot holds, and beside it the table of each sequence.

    Shapes and units: ``manager`` is a ``paged.BlockManager`` of few small blocks; ``words`` gives, for each sequence, a
    word for each of its tokens. Blocks in several tables are orange, in one blue, free ones grey.

    Raises: ValueError where a sequence has not a word a token.

    Source: chapter 02.
    """
    from matplotlib.patches import Rectangle

    pool, size = manager.pool, manager.block_size
    text: dict[tuple[int, int], str] = {}
    for seq_id in manager.seq_ids:
        if len(words.get(seq_id, ())) != manager.length(seq_id):
            raise ValueError(f"sequence {seq_id} has {manager.length(seq_id)} tokens; words has another number")
        for i, word in enumerate(words[seq_id]):
            text[manager.table(seq_id)[i // size], i % size] = str(word)
    for block in range(pool.num_blocks):
        owners = pool.ref_count(block)
        color = EMPTY if owners == 0 else COLORS[1] if owners > 1 else COLORS[0]
        for slot in range(size):
            at = (block * (size + 0.5) + slot, 0)
            ax.add_patch(Rectangle(at, 1, 1, facecolor=color, alpha=0.4, edgecolor="white"))
            ax.text(at[0] + 0.5, 0.5, text.get((block, slot), ""), ha="center", va="center", fontsize=8)
        ax.text(block * (size + 0.5) + size / 2, -0.35, str(block), ha="center", va="center", fontsize=8)
    tables = [f"sequence {s}: {manager.table(s).tolist()}, {manager.length(s)} tokens" for s in manager.seq_ids]
    for row, line in enumerate(reversed(tables)):
        ax.text(0, 1.45 + 0.5 * row, line, fontsize=8.5, va="center")
    ax.set(xlim=(-0.3, pool.num_blocks * (size + 0.5)), ylim=(-0.7, 1.6 + 0.5 * max(len(tables), 1)))
    ax.set_title(title)
    ax.set_axis_off()


def memory_map(ax: Axes, states: Sequence[Any], title: str = "") -> None:
    """Draw what each slot of a memory was at each snapshot: free, reserved and empty, or filled.

    Shapes and units: ``states`` are arrays [slots] of 0, 1 and 2 (``workloads.Run.states``); time runs to the right.

    Raises: ValueError where there are no states.

    Source: chapter 02.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    if len(states) == 0:
        raise ValueError("states is empty; take snapshots while serving")
    picture = np.stack(states, axis=1)
    rows = np.unique(np.linspace(0, len(picture) - 1, min(len(picture), 499)).astype(int))  # a pixel is one slot
    ax.imshow(
        picture[rows], aspect="auto", cmap=ListedColormap([EMPTY, COLORS[1], COLORS[0]]), vmin=0, vmax=2,
        interpolation="nearest", extent=(0, len(states), len(picture), 0),
    )  # fmt: skip
    ax.set(title=title, xlabel="snapshot", ylabel="slot")
    ax.grid(False)


def token_boxes(
    ax: Axes,
    rows: Mapping[str, Sequence[Any]],
    *,
    groups: Mapping[str, Sequence[Any]] | None = None,
    start: int = 0,
) -> None:
    """Draw small rows of labelled boxes, for pictures that can be checked by hand; ``None`` is an empty box.

    Shapes and units: a row is a list of what its boxes say, the first at position ``start``; ``groups`` may give, for
    a row, a list as long that says which boxes share a colour (the page, the sequence, the kind).

    Raises: ValueError where a row's groups have another length.

    Source: chapter 01.
    """
    from matplotlib.patches import Rectangle

    groups = groups or {}
    colors: dict[Any, str] = {}
    for y, (name, boxes) in enumerate(rows.items()):
        kinds = groups.get(name, [0] * len(boxes))
        if len(kinds) != len(boxes):
            raise ValueError(f"groups of row {name!r} has {len(kinds)} entries; the row has {len(boxes)}")
        for x, (text, kind) in enumerate(zip(boxes, kinds, strict=True)):
            color = EMPTY if text is None else colors.setdefault(kind, COLORS[len(colors) % len(COLORS)])
            ax.add_patch(
                Rectangle(
                    (start + x - 0.45, y - 0.4), 0.9, 0.8, facecolor=color, alpha=0.35, edgecolor=INK, linewidth=0.6
                )
            )
            ax.text(start + x, y, "" if text is None else str(text), ha="center", va="center", fontsize=9)
    longest = max(map(len, rows.values()), default=0)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(
        xlim=(start - 0.6, start + longest - 0.4), ylim=(len(rows) - 0.4, -0.6), xticks=range(start, start + longest)
    )
    ax.grid(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)


def plot(
    series: Mapping[str, tuple[Any, ...]],
    xlabel: str,
    ylabel: str,
    *,
    alt: str,
    caption: str = "",
    title: str = "",
    log: str = "",
    levels: Sequence[float] = (),
    xticks: Sequence[float] | None = None,
    ymin: float | None = None,
    size: tuple[float, float] = (6.4, 3.4),
    ax: Axes | None = None,
) -> None:
    """Draw lines over one pair of axes and show them: the figure that most chapters need most often.

    Shapes and units: a line is (x, y), two lists of one length, or (x, y, options of ``Axes.plot``); its label is its
    key. ``log`` names the logarithmic axes ("", "x", "y", "xy"); ``levels`` are dotted horizontals; size in inches.
    With ``ax`` the lines are drawn there and nothing is shown.

    Raises: ValueError where x and y differ in length, ``log`` is another word, or ``alt`` is empty.

    Source: chapter 01.
    """
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f'log is {log!r}; it names the logarithmic axes: "", "x", "y" or "xy"')
    if ax is None and not alt.strip():
        raise ValueError("alt is empty; it must say in a sentence what the figure shows")
    for label, (x, y, *_) in series.items():
        if len(x) != len(y):
            raise ValueError(f"line {label!r} has {len(x)} x and {len(y)} y")
    fig = None
    if ax is None:
        fig, ax = figure(*size)
    assert ax is not None
    for i, (label, (x, y, *options)) in enumerate(series.items()):
        ax.plot(x, y, **{"marker": "osD^vP*X"[i % 8], "label": label, **(options[0] if options else {})})
    for level in levels:
        ax.axhline(level, color="0.6", ls=":")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    if xticks is not None:
        ax.set_xticks(list(xticks), [f"{t:g}" for t in xticks], minor=False)
        ax.set_xticks([], minor=True)
    if ymin is not None:
        ax.set_ylim(ymin, None)
    if len(series) > 5:  # beside the lines, which it would cover
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(series) > 1:
        ax.legend()
    if fig is not None:
        show(fig, alt=alt, caption=caption)


def visible(ax: Axes, seen: Any, title: str) -> None:
    """Draw which keys (columns) each query (row) of a pass sees; the queries are the last of the keys' tokens.

    Keys that were there before the pass, and so come from a cache, are orange; those of the pass itself are blue.

    Shapes and units: ``seen`` bool [q_len, kv_len], a tensor or an array.

    Raises: ValueError where ``seen`` has not two dimensions.

    Source: chapter 01.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    grid = np.asarray(seen, dtype=bool)
    if grid.ndim != 2:
        raise ValueError(f"seen has shape {grid.shape}; it must be [q_len, kv_len]")
    rows, columns = grid.shape
    past = max(columns - rows, 0)
    for i, j in np.argwhere(grid):
        color = COLORS[1] if j < past else COLORS[0]
        ax.add_patch(Rectangle((j - 0.45, i - 0.45), 0.9, 0.9, facecolor=color, alpha=0.55))
        ax.text(j, i, "•", ha="center", va="center")
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal")
    ax.set(title=title, xlabel="key of token", ylabel="query of token")
    ax.set_xticks(range(columns))
    ax.set_yticks(range(rows), [str(columns - rows + i) for i in range(rows)])
    ax.grid(False)


def tiles(ax: Axes, q_len: int, kv_len: int, M: int, N: int, title: str = "") -> None:
    """Draw a causal pass cut into tiles of M queries and N keys: clear ones blue, edges orange, skipped ones grey.

    Shapes and units: as ``reference.tile_kinds``; a dot is a pair of a query and a key it sees.

    Raises: as ``reference.tile_kinds``.

    Source: chapter 03.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    from kvlab import reference

    kinds, seen = reference.tile_kinds(q_len, kv_len, M, N), reference.visible_keys(q_len, kv_len)
    ax.imshow(
        kinds, cmap=ListedColormap([EMPTY, COLORS[1], COLORS[0]]), vmin=0, vmax=2, alpha=0.6, aspect="auto",
        extent=(0, kinds.shape[1] * N, kinds.shape[0] * M, 0),
    )  # fmt: skip
    ax.plot(*(np.argwhere(seen.numpy()).T[::-1] + 0.5), ".", color=INK, ms=2)
    ax.set(title=title, xlabel="key", ylabel="query", xlim=(0, kv_len), ylim=(q_len, 0), yticks=range(0, q_len, M))
    ax.grid(False)


def memory_maps(runs: Mapping[str, Sequence[Any]], *, alt: str, caption: str = "") -> None:
    """Draw ``memory_map`` of several runs side by side, a title each, and show them.

    Shapes and units: ``runs`` maps a title to its snapshots, as ``memory_map`` takes them.

    Raises: ValueError where there are no runs, one has no states, or ``alt`` is empty.

    Source: chapter 02.
    """
    if not runs:
        raise ValueError("runs is empty; it must hold the states of one run or more")
    fig, axes = figure(3.2 * len(runs), 3.2, columns=len(runs))
    for ax, (title, states) in zip([axes] if len(runs) == 1 else axes, runs.items(), strict=True):
        memory_map(ax, states, title)
    show(fig, alt=alt, caption=caption)


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y = c · x^p that fits best (least squares of the logarithms).

    Shapes and units: x and y have the same length, at least 2, and positive numbers; p has no unit.

    Raises: ValueError for lengths that differ or are under 2, numbers that are not positive, or x all equal.

    Source: chapter 01.
    """
    import numpy as np

    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(f"x and y have shapes {a.shape} and {b.shape}; they must be lists of one length, 2 or more")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("x and y must hold finite numbers above 0; a power law has no others")
    if np.ptp(a) == 0:
        raise ValueError(f"x holds only {a[0]:g}; a fit needs at least two different values")
    return float(np.polyfit(np.log(a), np.log(b), 1)[0])


def growth(ax: Axes, x: Sequence[float], ys: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Draw lines on logarithmic axes with their fitted exponents in the legend, and give the exponents.

    Shapes and units: each line has one positive number an entry of x.

    Raises: ValueError as ``fit_exponent``.

    Source: chapter 01.
    """
    exponents = {}
    for i, (name, y) in enumerate(ys.items()):
        exponents[name] = fit_exponent(x, y)
        marker, color = "osD^vP*X"[i % 8], COLORS[i % len(COLORS)]
        ax.plot(x, y, marker=marker, color=color, label=f"{name}: exponent {exponents[name]:.2f}")
    ax.set(xscale="log", yscale="log")
    ax.legend()
    return exponents


def _engineering(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=" "))
