"""One kernel that can be wrong in many ways, launched with the way chosen."""

from __future__ import annotations

from typing import Any


class Faulty:
    """A kernel whose constexpr FAULT is fixed, launched like any kernel."""

    def __init__(self, kernel: Any, fault: str) -> None:
        self.fn, self.__name__, self.fault = kernel, fault, fault

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.fn[grid](*args, **kwargs, FAULT=self.fault)
