"""What this machine gives the book, what is missing, and the command that mends it.

    python -m kvlab.doctor

It works with whatever is installed, also where nothing is: it imports torch and kvlab only when they are there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RENEW = "rm -f .venv/.set-up-*; make setup"  # without its stamp, make sets up again
MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
CHECKED = {
    "reading": ("torch", "triton", "numpy", "safetensors", "tokenizers", "matplotlib", "tqdm"),
    "the notebooks": ("jupyterlab", "ipykernel", "jupytext", "nbclient"),
    "the site": ("sphinx", "myst-nb", "sphinx-book-theme", "sphinx-mathjax-offline"),
    "the tests": ("pytest", "pytest-xdist", "nbval", "hypothesis", "transformers", "ruff", "mypy"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Shapes and units: ``level`` is "ok", "note" (worth knowing) or "bad" (something will not work); ``mend`` is the
    command that changes it, or empty.

    Source: CONTRIBUTING.md.
    """

    level: str
    text: str
    mend: str = ""


def pins(path: Path) -> dict[str, str]:
    """The versions that a lock file pins, by package name.

    Shapes and units: ``path`` names a requirements file; lines other than exact pins are passed over.

    Source: CONTRIBUTING.md.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = (re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_from_driver() -> str | None:
    """What ``nvidia-smi`` says of the first GPU, or None where it does not answer.

    Shapes and units: name, memory and driver version, as one line of text.

    Source: NVIDIA's driver.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _python() -> list[Finding]:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < (3, 11):  # noqa: UP036 - the one file that must run on an older Python, to say so
        return [Finding("bad", f"{text}; kvlab needs 3.11 or newer", "install a newer Python, then: make setup")]
    return [Finding("ok", text)]


def _packages(lock: str) -> list[Finding]:
    wanted, found = pins(Path(__file__).resolve().parent.parent / lock), []
    if not wanted:
        found.append(Finding("note", f"{lock} is not beside this kvlab: versions are not compared"))
    for purpose, names in CHECKED.items():
        missing = [n for n in names if _version(n) is None and not (n == "triton" and sys.platform != "linux")]
        other = [
            f"{n} {_version(n)} (locked {wanted[n]})"
            for n in names
            if _version(n) not in (None, wanted.get(n, _version(n)))
        ]
        needed = purpose == "reading" and any(n != "triton" for n in missing)
        if missing:
            found.append(Finding("bad" if needed else "note", f"for {purpose}, missing: {', '.join(missing)}", RENEW))
        if other:
            found.append(Finding("note", f"for {purpose}, not as locked: {', '.join(other)}", RENEW))
        if not missing and not other:
            found.append(
                Finding("ok", f"for {purpose}: {', '.join(f'{n} {_version(n)}' for n in names if _version(n))}")
            )
    return found


def _kernels(driver: str | None) -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("bad", "no torch: nothing of the book runs", RENEW)]
    import torch

    if driver and not torch.cuda.is_available():
        built = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return [
            Finding(
                "bad",
                f"the driver sees {driver}, but torch ({built}) does not use it",
                "make clean; rm -r .venv; make setup",
            )
        ]
    from kvlab import runtime

    if runtime.HAS_GPU:
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        where = f"{torch.cuda.get_device_name()} (sm_{major}{minor}), {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        found = [Finding("ok", f"GPU: {where}")]
        if runtime.INTERPRET:
            found.append(
                Finding(
                    "note", "TRITON_INTERPRET is set: kernels are interpreted despite the GPU", "unset TRITON_INTERPRET"
                )
            )
        elif runtime.HAS_TRITON:
            found.append(Finding("ok", "kernels are compiled; your figures are drawn beside the recorded ones"))
        if free < 2e9:
            found.append(Finding("bad", "under 2 GB of GPU memory are free", "nvidia-smi shows who holds it"))
    else:
        found = [Finding("note", "no NVIDIA GPU: GPU figures are recorded ones, marked as such")]
        if runtime.INTERPRET:
            found.append(Finding("ok", "kernels run in Triton's interpreter, at small sizes"))
        elif runtime.HAS_TRITON:
            found.append(
                Finding("bad", "TRITON_INTERPRET=0 and no GPU: no kernel can be launched", "unset TRITON_INTERPRET")
            )
    if not runtime.HAS_TRITON:
        mend = "make setup" if sys.platform == "linux" else ""
        found.append(Finding("note", "no Triton: every kernel falls back to its torch reference", mend))
    return found


def _models() -> list[Finding]:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "safetensors")):
        return []
    from kvlab import zoo

    found = []
    for name in zoo.NAMES:
        try:
            zoo.load(name, device="cpu")
        except (ValueError, OSError) as error:
            found.append(Finding("bad", f"the model {name} does not load: {error}", "git checkout kvlab/zoo"))
        else:
            found.append(Finding("ok", f"the model {name} loads, checksum right"))
    return found


def _browser() -> list[Finding]:
    if any(shutil.which(n) for n in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")):
        return [Finding("ok", "a browser for the tests of the site")]
    return [Finding("note", "no Chromium: the tests of the site are skipped", "apt-get install chromium")]


def findings() -> list[Finding]:
    """Everything worth saying about this machine, from Python upwards.

    Source: CONTRIBUTING.md.
    """
    driver = gpu_from_driver()
    lock = "requirements-gpu.txt" if driver else "requirements-cpu.txt"
    return [*_python(), *_packages(lock), *_kernels(driver), *_models(), *_browser()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 where something will not work.

    Shapes and units: ``arguments`` are the command line's; there are none.

    Source: CONTRIBUTING.md.
    """
    report = findings()
    for finding in report:
        print(f"{MARKS[finding.level]}  {finding.text}" + (f"\n      mend: {finding.mend}" if finding.mend else ""))
    bad = sum(finding.level == "bad" for finding in report)
    print("Everything the book needs is here." if not bad else f"{bad} to mend before the book runs.")
    return int(bad > 0)


if __name__ == "__main__":
    # Run as a file where there is no torch yet: `python -m kvlab.doctor` would import kvlab, which needs it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
