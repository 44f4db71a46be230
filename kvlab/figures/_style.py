"""One style: colours, sizes, alt text, and a figure as a picture."""

from __future__ import annotations

import base64
import functools
import html
import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvlab import display

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#B8A800")
INK, CARD, EMPTY = "#222222", "#fcfcfc", "#e9e9e9"
DPI = 110


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
