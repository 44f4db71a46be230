"""What all records of one run have in common, and the list of benchmarks there are."""

from __future__ import annotations

import datetime
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import torch

from kvlab import runtime
from kvlab.bench._record import Record
from kvlab.bench._timing import Timing


def names() -> list[str]:
    """The benchmarks there are: the public modules beside this one, sorted. Source: chapter 00."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("_"))


def device_name(device: torch.device) -> str:
    """The marketing name of a GPU or of this machine's CPU. Source: chapter 00."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({torch.get_num_threads()} threads)"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine() or 'CPU'} ({torch.get_num_threads()} threads)"


def output(*command: str, cwd: Path | None = None) -> str | None:
    """What a command prints, None where it is missing, fails or takes over 20 s. Source: chapter 00."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where there is none. Source: chapter 00."""
    found = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def commit() -> str:
    """The commit of the code that runs: the variable KVLAB_COMMIT, else git's answer, else "unknown".

    A tree with changes is marked "-dirty". Source: chapter 00."""
    given = os.environ.get("KVLAB_COMMIT")
    if given:
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    return output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=root) or "unknown"


class Session:
    """One run of a benchmark: its options, its machine, and a maker of records.

    Shapes and units: ``device`` where it runs; ``quick`` asks for the smallest sizes that exercise everything;
    ``peers`` for other libraries beside kvlab's own code, where they can be imported.

    Source: chapter 00.
    """

    def __init__(self, device: torch.device | str | None = None, *, quick: bool = False, peers: bool = False) -> None:
        self.device = runtime.device() if device is None else torch.device(device)
        self.quick, self.peers = quick, peers
        now = datetime.datetime.now(datetime.UTC)
        self.run = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        self._common = {
            "run": self.run,
            "device": device_name(self.device),
            "driver": driver_version() if self.device.type == "cuda" else None,
            "torch": torch.__version__,
            "triton": getattr(runtime.triton, "__version__", None) if runtime.HAS_TRITON else None,
            "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "commit": commit(),
        }

    @property
    def on_gpu(self) -> bool:
        """Whether the session runs on a GPU. Source: chapter 00."""
        return self.device.type == "cuda"

    def seconds(self, full: float) -> float:
        """How long to repeat one measurement (seconds): ``full``, or next to nothing in a quick run.

        Source: chapter 00."""
        return 0.01 if self.quick else full

    def record(
        self,
        bench: str,
        impl: str,
        value: float,
        unit: str,
        *,
        shape: dict[str, int | float | str],
        dtype: torch.dtype | str,
        timing: Timing | None = None,
        ms: float | None = None,
        error: float | None = None,
        version: str | None = None,
    ) -> Record:
        """A record of this run; the arguments are the fields of ``Record``, ``timing`` gives ms and spread.

        Raises: ValueError from ``Record``.  Source: chapter 00."""
        return Record(
            bench=bench, impl=impl, version=version, shape=shape, dtype=str(dtype).removeprefix("torch."),
            value=value, unit=unit, ms=timing.ms if timing else ms, spread=timing.spread if timing else None,
            error=error, **self._common,  # type: ignore[arg-type]
        )  # fmt: skip

    def note(self, text: str) -> None:
        """Tell the person who waits (on stderr) what is skipped or under way. Source: chapter 00."""
        print(text, file=sys.stderr, flush=True)
