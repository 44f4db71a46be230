"""A cell fails not only where an error stops it: see ``output_problem`` in book/bookmaker.py.

nbval runs the cells of the chapters. Left to itself it passes a line magic that does not exist, a cell tagged
``raises-exception`` that raises nothing, and a notebook that was committed without ever being run.

Every test begins with the same random numbers, whichever tests its process ran before.
"""

from __future__ import annotations

import random
from collections.abc import Generator

import numpy as np
import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if type(item).__name__ == "IPyNbCell" and item.cell.source.strip():  # type: ignore[attr-defined]
        from bookmaker import output_problem

        if item.cell.execution_count is None:  # type: ignore[attr-defined]
            item.raise_cell_error("The stored notebook was never run here: run `make chapters`")  # type: ignore[attr-defined]
        tags = item.cell.metadata.get("tags", [])  # type: ignore[attr-defined]
        if problem := output_problem(tags, item.test_outputs or []):  # type: ignore[attr-defined]
            item.raise_cell_error(problem)  # type: ignore[attr-defined]
    return result
