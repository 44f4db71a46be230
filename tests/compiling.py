"""Compile kernels for GPUs that need not be there, and note what ptxas says of them.

Triton refuses to compile a kernel that was defined under its interpreter, so this is done in a child process; what the
child runs begins with ``PRELUDE``. It takes minutes, and what comes out depends on nothing but kvlab's own files, the
child's code and the versions installed: as long as they stay the same, pytest's cache answers (``--cache-clear``).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = r"""
import contextlib, io, json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

triton.knobs.nvidia.dump_ptxas_log = True  # what `ptxas -v` says, when Triton runs it
triton.knobs.compilation.always_compile = True  # it says nothing of what comes from a cache

found = []
ptx_of = {}  # of each kernel with its types and values: {family of GPUs: PTX, shared memory}
families = set()  # of which it was seen, for one kernel, that their GPUs share their PTX

def inner(kernel):
    while not isinstance(kernel, triton.runtime.jit.JITFunction):
        kernel = kernel.fn
    return kernel

def compiled(source, capability, **options):
    "A kernel compiled for one GPU, and what ptxas said."
    with contextlib.redirect_stdout(io.StringIO()) as said:
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})
    return done, said.getvalue()

def descriptor(block):
    "The type of what the copy engine brings in such blocks of bf16."
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    return f"tensordesc<bf16{block},{NVMMASharedLayout.get_default_for(block, bfloat16)!r}>"

def compiled_gluon(kernel, types, values, **options):
    "A Gluon kernel compiled for Hopper, and what ptxas said. A pointer that is in values, as None, is not there."
    from triton.experimental.gluon._runtime import GluonASTSource
    names = kernel.arg_names
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in names}
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    return compiled(GluonASTSource(kernel, signature, {(names.index(k),): v for k, v in values.items()}, hints), 90,
                    **options)

def overwritten_barriers(ptx):
    "Offsets of barriers that are initialised and lie where warp_specialize hands its warps their arguments."
    # The compiler gives the memory of a barrier that nobody waits for to others; then the arguments may be lost.
    base = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx)) | {"global_smem"}
    places = {register: int(offset) for register, b, offset in
              re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if b in base} | dict.fromkeys(base, 0)
    barriers = [places[register] for register in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)]
    assert barriers, "no barrier was found"
    handed = [(int(at or 0), int(many or 1) * int(bits) // 8) for many, bits, at in
              re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]", ptx)]
    assert handed, "no argument was found"
    return sorted(b for b in barriers if any(at < b + 8 and b < at + size for at, size in handed))

def without_target(ptx):
    return re.sub(r"^\.target .*$", "", ptx, flags=re.M)

def assembled(ptx, capability):
    "What ptxas says of PTX that was made for another GPU of the same family."
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(re.sub(r"^\.target sm_\d+", f".target sm_{capability}", ptx, flags=re.M))
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{capability}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

def build(capability, name, kernel, types, values, free=(), **options):
    "Compile for one GPU and note what it takes. A pointer that is in values, as None, is not there."
    signature = {arg: "constexpr" if arg in values else types.get(arg, "i32") for arg in kernel.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names)
             if signature[arg].startswith("*") or (signature[arg] == "i32" and arg not in free)}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in values.items()}, hints)
    family = capability // 10
    key = family, kernel.__name__, str(sorted(signature.items())), str(sorted(values.items(), key=str)), str(options)
    if key in ptx_of:  # the GPUs of a family differ in what ptxas makes of their PTX
        ptx, shared = ptx_of[key]
        if (family, kernel.__name__) not in families:
            families.add((family, kernel.__name__))
            done, _ = compiled(source, capability, **options)
            assert (without_target(done.asm["ptx"]), done.metadata.shared) == (without_target(ptx), shared), name
        said = assembled(ptx, capability)
    else:
        done, said = compiled(source, capability, **options)
        ptx, shared = ptx_of[key] = done.asm["ptx"], done.metadata.shared
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    found.append({"sm": capability, "name": name, "spills": sum(spills), "said": len(spills), "shared": shared,
                  "wgmma": "wgmma.mma_async" in ptx})
"""


def child(config: pytest.Config, **sources: str) -> dict[str, Any]:
    """What each of these sources, run one after another in one child process after ``PRELUDE``, put into ``found``."""
    parts = [f"found = []\n{source}\nresults[{name!r}] = found" for name, source in sources.items()]
    code = "\n".join([PRELUDE, "results = {}", *parts, "print(json.dumps(results))"])
    digest = hashlib.sha256(f"{code}\0{sys.version}\0{version('triton')}\0{version('torch')}".encode())
    for path in sorted((ROOT / "kvlab").rglob("*.py")):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    cache, place = getattr(config, "cache", None), f"kvlab/compiled-{'-'.join(sources)}"
    stored = cache.get(place, None) if cache else None
    if stored and stored["key"] == digest.hexdigest():
        return stored["results"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    if cache:
        cache.set(place, {"key": digest.hexdigest(), "results": results})
    return results
