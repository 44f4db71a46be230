"""Records of measurements, read from ``book/measured/``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.display import markdown

if TYPE_CHECKING:
    from kvlab.costs import Hardware

_MEASURED: Path | None = Path(__file__).resolve().parents[2] / "book" / "measured"


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


def by_way(found: Mapping[tuple[Any, ...], Mapping[str, float]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """What ``by_shape`` gave of implementations that ran in several ways, with the way as the last entry of the shape:
    {shape: {"impl, way": value}} becomes {(*shape, way): {impl: value}}.

    Shapes and units: as ``by_shape``; a name without a comma keeps an empty way.

    Source: chapter 04.
    """
    ways: dict[tuple[Any, ...], dict[str, float]] = {}
    for shape, values in found.items():
        for name, value in values.items():
            impl, _, way = name.partition(", ")
            ways.setdefault((*shape, way), {})[impl] = value
    return ways


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
