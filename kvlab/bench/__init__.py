"""Benchmarks: what a machine does, written down so that a chapter can draw it and a reader can repeat it.

``python -m kvlab.bench NAME [--out FILE] [--peers] [--quick] [--only PARTS]`` runs the benchmark in
``kvlab/bench/NAME.py``, prints a table and writes records. A new benchmark is a new file here with a function
``run(session)`` that yields records; ``PARTS`` names functions of the same kind that can be run alone, and
``summary(records)`` gives lines to print after the table.
Nothing here is tested for its speed: a benchmark reports, it does not judge.
"""

from __future__ import annotations

from kvlab.bench._count import CountWork
from kvlab.bench._record import FIELDS, Record, load, save, table
from kvlab.bench._session import Session, names
from kvlab.bench._timing import Timing, l2_bytes, measure, race, rotations

__all__ = [
    "FIELDS",
    "CountWork",
    "Record",
    "Session",
    "Timing",
    "l2_bytes",
    "load",
    "measure",
    "names",
    "race",
    "rotations",
    "save",
    "table",
]
