"""Run code in a child process that has its slow imports behind it: forked from a server that made them once.

A fresh Python takes seconds to import torch. Nothing else is shared: each child has its own environment, and what it
imports or changes ends with it. Where there is no fork, a fresh Python is started after all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

SERVER = r"""
import json, os, sys, traceback

def run(job):
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[:0] = [p for p in job["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    try:
        exec(compile(job["code"], "<child>", "exec"), {"__name__": "__main__"})
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Children that have imported what ``before`` imports; ``env`` is the environment of the server itself."""

    def __init__(self, before: str, env: dict[str, str] | None = None) -> None:
        self.before, self.env = before, dict(os.environ) if env is None else env
        self.process: subprocess.Popen[str] | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="kvlab-forks-")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=60)
        self.folder.cleanup()

    def run(
        self, code: str, *, env: dict[str, str] | None = None, cwd: Path | str = "."
    ) -> subprocess.CompletedProcess:
        """Run code as ``python -c`` would, with this environment, in this folder."""
        env = self.env if env is None else env
        if not hasattr(os, "fork"):
            command = [sys.executable, "-c", f"{self.before}\n{code}"]
            return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
        if self.process is None:
            command = [sys.executable, "-c", f"{self.before}\n{SERVER}"]
            self.process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        files = {name: str(Path(self.folder.name) / name) for name in ("out", "err")}
        job = {"code": code, "env": env, "cwd": str(Path(cwd).resolve()), **files}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.strip(), "the server of child processes has ended"
        out, err = (Path(files[name]).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([sys.executable, "-c", code], int(answer), out, err)
