"""Charts: numbers over numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab.figures._style import COLORS, INK, figure, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def timeline(
    ax: Axes, lanes: Mapping[str, Sequence[tuple[float, float, str]]], *, unit: str = "s", hatched: bool = True
) -> None:  # fmt: skip
    """Draw what each lane did when; the same kind of work has the same colour in all lanes.

    Lanes too many to be told apart (more than 24) touch each other, so that colours show. Where intervals are too short
    for it, ``hatched=False`` leaves out hatching and edges.

    Shapes and units: a lane is a list of (start, end, kind), times in ``unit``.

    Raises: ValueError where an interval ends before it starts.

    Source: chapter 06.
    """
    kinds: dict[str, int] = {}
    height, edge = (0.7, 0.5 if hatched else 0.0) if len(lanes) <= 24 else (1.0, 0.0)
    hatches = ("", "///", "...", "xx") if hatched else ("",)
    for y, (name, spans) in enumerate(lanes.items()):
        for start, end, kind in spans:
            if end < start:
                raise ValueError(f"lane {name} has {kind!r} from {start} to {end}; it must not end before it starts")
            seen = kind in kinds
            i = kinds.setdefault(kind, len(kinds))
            ax.barh(
                y, end - start, left=start, height=height, color=COLORS[i % len(COLORS)], edgecolor="white",
                linewidth=edge, hatch=hatches[i % len(hatches)], label=None if seen else kind,
            )  # fmt: skip
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.invert_yaxis()
    ax.set_xlabel(f"time ({unit})")
    ax.grid(axis="y", visible=False)
    if kinds:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
