"""kvlab: KV-cache engineering for LLM inference, one bottleneck a chapter.

Import kvlab before triton (and before transformers models, which import it): without a GPU, kvlab asks for Triton's
interpreter, and that choice must be made before triton is loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from kvlab import runtime as runtime

if TYPE_CHECKING:
    from kvlab.source import show as show
    from kvlab.source import show_diff as show_diff
    from kvlab.source import show_of as show_of

__version__ = "0.1.0"


def __dir__() -> list[str]:
    parts = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    return sorted([*parts, "show", "show_diff", "show_of", "__version__"])


def __getattr__(name: str) -> Any:
    if name in ("show", "show_diff", "show_of"):
        return getattr(importlib.import_module("kvlab.source"), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
    try:
        return importlib.import_module(f"kvlab.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"kvlab.{name}":
            raise
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}") from None
