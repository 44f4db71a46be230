"""Show something in a notebook, and print its plain text everywhere else.

A chapter runs as a notebook, as a script and on machines that have no IPython. Everything that the book shows goes
through ``emit``, so that all three work.
"""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel (not in a script, a terminal or IPython's own terminal).

    Source: CONTRIBUTING.md.
    """
    ipython = sys.modules.get("IPython")  # a kernel has imported it; a script need not have it
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def emit(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display a bundle of representations in a notebook; print its ``text/plain`` otherwise.

    Shapes and units: ``data`` maps media types to content and must hold ``text/plain``; ``metadata`` is stored with
    the output.

    Raises: ValueError where ``data`` has no ``text/plain``.

    Source: Jupyter's message format.
    """
    if "text/plain" not in data:
        raise ValueError(f"data holds {sorted(data)}; it must hold text/plain, for readers without a notebook")
    if in_notebook():
        from IPython.display import display

        display(data, metadata=metadata or {}, raw=True)
    else:
        print(data["text/plain"])


def markdown(text: str) -> None:
    """Display Markdown in a notebook; print the text as it stands otherwise. Source: CONTRIBUTING.md."""
    emit({"text/markdown": text, "text/plain": text})
