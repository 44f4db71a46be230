"""What arguments must be. Each refusal names the argument, what it got and what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

from kvlab.batch import as_ints


def number(value: object, name: str, least: float = -math.inf, most: float = math.inf, unit: str = "") -> float:
    """A finite number of any kind (of NumPy, too) between two bounds, as a Python float; a bool is none.

    Raises: ValueError that begins with ``name``.  Source: chapter 06.
    """
    found = value if type(value) is float else _as_float(value)
    if math.isfinite(found) and least <= found <= most:
        return found
    bounds = ("" if least == -math.inf else f", {least} or more") if most == math.inf else f" from {least} to {most}"
    raise ValueError(f"{name} is {value!r:.80}; it must be a finite number{unit}{bounds}")


def _as_float(value: object) -> float:
    """NaN for what is no number; infinite for one that no float holds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def seconds(value: object, name: str, least: float = -math.inf) -> float:
    """A time in seconds, as ``number``. Raises: ValueError that begins with ``name``.  Source: chapter 06."""
    return number(value, name, least, unit=" of seconds")


def require(value: object, kind: type, name: str) -> None:
    """Refuse what is not of a kind. Raises: ValueError that begins with ``name``.  Source: chapter 06."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}; it must be a {kind.__name__}")


def entries(values: object, name: str) -> list:  # type: ignore[type-arg]
    """What can be walked through, as a list. Raises: ValueError that begins with ``name``.  Source: chapter 06."""
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        return list(values)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        raise ValueError(f"{name} is {values!r:.80}; it must be a list") from None


def token_ids(values: Iterable[object], name: str) -> list[int]:
    """Token ids as Python ints, each 0 or more and within 64 bits.

    Raises: ValueError that names the first that is none.  Source: chapter 06."""
    found = as_ints(values, name)
    if found and not 0 <= min(found) <= max(found) < 2**63:
        i = next(i for i, token in enumerate(found) if not 0 <= token < 2**63)
        raise ValueError(f"{name}[{i}] is {found[i]}; a token id must be 0 or more, and under 2**63")
    return found
