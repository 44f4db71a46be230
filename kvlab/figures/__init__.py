"""Figures in one style, each with alt text; records of measurements, read from ``book/measured/``.

Every figure is drawn on its own light card, in colours that people with any kind of colour vision can tell apart (Okabe
and Ito's) and whose line styles survive a black-and-white print, so that it can be read on light and dark pages alike.
matplotlib is imported when the first figure is made, not before.

``_style`` is that style, ``_charts`` draws numbers over numbers, ``_pictures`` what the book talks about (caches,
tables, tokens, masks, tiles), and ``_records`` reads what was measured.
"""

from __future__ import annotations

from kvlab.display import markdown
from kvlab.figures._charts import bars, fit_exponent, growth, heatmap, plot, roofline, stacked_bars, timeline
from kvlab.figures._pictures import (
    block_tables,
    cache_map,
    memory_map,
    memory_maps,
    occupied,
    tiles,
    token_boxes,
    visible,
)
from kvlab.figures._records import by_impl, by_shape, by_way, measured_hardware, record_line, recorded, records, table
from kvlab.figures._style import CARD, COLORS, DPI, EMPTY, INK, figure, png, show, shown, style

__all__ = [
    "CARD",
    "COLORS",
    "DPI",
    "EMPTY",
    "INK",
    "bars",
    "block_tables",
    "by_impl",
    "by_shape",
    "by_way",
    "cache_map",
    "figure",
    "fit_exponent",
    "growth",
    "heatmap",
    "markdown",
    "measured_hardware",
    "memory_map",
    "memory_maps",
    "occupied",
    "plot",
    "png",
    "record_line",
    "recorded",
    "records",
    "roofline",
    "show",
    "shown",
    "stacked_bars",
    "style",
    "table",
    "tiles",
    "timeline",
    "token_boxes",
    "visible",
]
