"""One measured number and everything needed to judge it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One measured number.

    Shapes and units:
        run      id shared by all records of one run; ratios are formed within a run
        bench    "NAME.part", such as "ceilings.copy"
        impl     what was measured; ``version`` is its library's version, None for kvlab's own code
        shape    sizes by name, such as {"B": 1, "L": 8192}; plain numbers and words
        dtype    of the data, "bfloat16"
        value    the number, in ``unit``; 1 GB is 1e9 bytes
        ms       median milliseconds of one repetition, None where no time was taken
        spread   interquartile range of those milliseconds, None for a single repetition
        error    relative error against a float64 reference, None where nothing was compared
        device, driver, torch, triton, date (UTC), commit    where, on what, when and of what

    Raises: ValueError where value is not a finite number or a name is empty.

    Source: chapter 00.
    """

    run: str
    bench: str
    impl: str
    version: str | None
    shape: dict[str, int | float | str]
    dtype: str
    value: float
    unit: str
    ms: float | None
    spread: float | None
    error: float | None
    device: str
    driver: str | None
    torch: str
    triton: str | None
    date: str
    commit: str

    def __post_init__(self) -> None:
        for name in ("run", "bench", "impl", "dtype", "unit", "device", "commit"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; a record needs a word there")
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise ValueError(f"value is {self.value!r}; a record needs a finite number")


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Record))


def save(records: Iterable[Record], path: str | Path) -> None:
    """Write records to ``path`` as a JSON list, one record a line. Source: chapter 00."""
    lines = ",\n".join(json.dumps(asdict(record), allow_nan=False) for record in records)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")


def load(path: str | Path) -> list[Record]:
    """Read what ``save`` wrote.

    Raises: ValueError naming the file and the entry whose fields are not a record's.  Source: chapter 00.
    """
    entries = json.loads(Path(path).read_text())
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds a {type(entries).__name__}; it must hold a list of records")
    for i, entry in enumerate(entries):
        found = set(entry) if isinstance(entry, dict) else set()
        if found != set(FIELDS):
            missing, extra = sorted(set(FIELDS) - found), sorted(found - set(FIELDS))
            raise ValueError(f"{path}: entry {i} is not a record (missing {missing}, unknown {extra})")
    return [Record(**entry) for entry in entries]


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:.0f}"


def table(records: Sequence[Record]) -> str:
    """Records as plain text in columns, one line a record, with the machine named once. Source: chapter 00."""
    if not records:
        return "(no records)"
    head = ("bench", "impl", "shape", "dtype", "value", "unit", "ms", "spread", "error")
    rows = [head]
    for r in records:
        shape = " ".join(f"{key}={value}" for key, value in r.shape.items())
        numbers = (_number(r.ms), _number(r.spread, 2), _number(r.error, 2))
        rows.append((r.bench, r.impl, shape, r.dtype, _number(r.value), r.unit, *numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = {4, 6, 7, 8}
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    first = records[0]
    driver = f", driver {first.driver}" if first.driver else ""
    lines.append(f"{first.device}{driver}, torch {first.torch}, triton {first.triton}, commit {first.commit}")
    return "\n".join(line.rstrip() for line in lines)
