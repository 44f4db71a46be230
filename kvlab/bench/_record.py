"""One measured number and everything needed to judge it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvlab.config import is_number


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

    Raises: ValueError naming the field: a value that is not a finite number, a time or error that is negative, an empty
    name, a shape of anything but numbers and words.

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
        optional = ("version", "driver", "triton")
        for name in ("run", "bench", "impl", "dtype", "unit", "device", "torch", "date", "commit", *optional):
            word = getattr(self, name)
            if not (isinstance(word, str) and word) and not (name in optional and word is None):
                raise ValueError(f"{name} is {word!r}; a record needs a word there" + ", or None" * (name in optional))
        if not is_number(self.value):
            raise ValueError(f"value is {self.value!r}; a record needs a finite number")
        for name in ("ms", "spread", "error"):
            number = getattr(self, name)
            if number is not None and (not is_number(number) or number < 0):
                raise ValueError(f"{name} is {number!r}; a record needs a finite number, 0 or more, or None")
        if not isinstance(self.shape, dict):
            raise ValueError(f"shape is {self.shape!r}; a record needs sizes by name")
        for key, size in self.shape.items():
            if not isinstance(key, str) or not (isinstance(size, str) or is_number(size)):
                raise ValueError(f"shape has {key!r}: {size!r}; a record needs a name and a finite number or a word")


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Record))


def save(records: Iterable[Record], path: str | Path) -> None:
    """Write records to ``path`` as a JSON list, one record a line; whole, or not at all. Source: chapter 00."""
    lines = ",\n".join(json.dumps(asdict(record), allow_nan=False) for record in records)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")
    partial.replace(target)


def load(path: str | Path) -> list[Record]:
    """Read what ``save`` wrote.

    Raises: ValueError naming the file, and the entry that is not a record.  Source: chapter 00.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds a {type(entries).__name__}; it must hold a list of records")
    records = []
    for i, entry in enumerate(entries):
        found = set(entry) if isinstance(entry, dict) else set()
        if found != set(FIELDS):
            missing, extra = sorted(set(FIELDS) - found), sorted(found - set(FIELDS))
            raise ValueError(f"{path}: entry {i} is not a record (missing {missing}, unknown {extra})")
        try:
            records.append(Record(**entry))
        except ValueError as error:
            raise ValueError(f"{path}: entry {i}: {error}") from None
    return records


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
