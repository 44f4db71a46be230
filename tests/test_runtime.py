"""runtime: the interpreter chosen in time or said to be too late, exact bf16 products, in-place kernels, no Triton."""

from __future__ import annotations

import os
import textwrap
import warnings
from pathlib import Path

import forks
import pytest
import torch

from kvlab import runtime
from kvlab.runtime import dot

triton, tl = runtime.triton, runtime.tl
ROOT = Path(__file__).parents[1]
launchable = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched on this machine")


PLAIN = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KVLAB_CHECK")}
PLAIN |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCH = "import sys, torch\nassert not {'triton', 'kvlab'} & sys.modules.keys()"


@pytest.fixture(scope="module")
def python():
    """Run code in a Python that has torch, and sees no GPU and no TRITON_INTERPRET but what is asked for."""
    with forks.Server(TORCH, PLAIN) as server:

        def run(code: str, **environment: str) -> str:
            done = server.run(textwrap.dedent(code), env=PLAIN | environment)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run


@pytest.fixture
def script(python, tmp_path):
    """The same from a file: a kernel's source must be readable."""

    def run(code: str, **environment: str) -> str:
        file = tmp_path / "child.py"
        file.write_text(textwrap.dedent(code))
        return python(f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')", **environment)

    return run


# ---------------------------------------------------------------------------------------------------- kernels


@runtime.counted
@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@runtime.counted
@triton.jit
def _matmul(a, b, out, SIZE: tl.constexpr):
    rows, cols = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    acc = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    acc = dot(tl.load(a + rows * SIZE + cols), tl.load(b + rows * SIZE + cols), acc)
    tl.store(out + rows * SIZE + cols, acc)


@runtime.counted
@runtime.autotune(
    [triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 64}, num_warps=2)],
    key=["n"],
    restore_value=["total"],
)
@triton.jit
def _accumulate(total, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(total + i, tl.load(total + i, mask=mask) + tl.load(x + i, mask=mask), mask=mask)


@launchable
def test_launches_are_counted():
    x = torch.arange(100.0, device=runtime.device())
    out = torch.empty_like(x)
    before = runtime.launches["_double"]
    for _ in range(2):
        _double[(triton.cdiv(100, 32),)](x, out, 100, BLOCK=32)
    assert torch.equal(out, 2 * x)
    assert runtime.launches["_double"] == before + 2
    assert _double.__name__ == "_double"


@launchable
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_is_exact_on_small_integers(dtype):
    """Every product and sum is an integer that float32 holds, so the result must be right to the last bit."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (16, 16), generator=g).to(runtime.device(), dtype) for _ in range(2))
    out = torch.full((16, 16), float("nan"), device=runtime.device())
    _matmul[(1,)](a, b, out, SIZE=16)
    assert torch.equal(out.cpu(), a.cpu().float() @ b.cpu().float())


@launchable
def test_dot_of_float32_is_not_cut_to_tf32():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=g).to(runtime.device()) for _ in range(2))
    out = torch.empty_like(a)
    _matmul[(1,)](a, b, out, SIZE=16)
    exact = a.double() @ b.double()
    assert (out - exact).abs().max() < 1e-5  # TF32 keeps 10 bits: it would be off by about 1e-3


@launchable
@pytest.mark.parametrize("n", [1, 100, 128])
def test_the_search_does_not_run_a_kernel_in_place(n):
    x = torch.arange(float(n), device=runtime.device())
    total = torch.ones_like(x)
    for calls in (1, 2, 3):  # the first one searches where there is a GPU
        _accumulate[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](total, x, n)
        assert torch.equal(total, 1 + calls * x)


@launchable
def test_autotuned_kernel_with_a_plain_grid():
    x = torch.arange(10.0, device=runtime.device())
    total = torch.zeros_like(x)
    _accumulate[(1,)](total, x, 10)  # the smallest block covers it
    assert torch.equal(total, x)


def test_autotune_needs_a_configuration():
    with pytest.raises(ValueError, match="configs is empty"):
        runtime.autotune([], key=["n"])


# --------------------------------------------------------------------------------------------- the interpreter


KERNEL = """
    import torch, triton, triton.language as tl

    @runtime.counted
    @triton.jit
    def add_sum(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        a = tl.load(x + i, mask=i < n, other=0.0)
        tl.store(out + i, a + tl.sum(a, 0), mask=i < n)

    x, out = torch.arange(8.0), torch.zeros(8)
    try:
        add_sum[(1,)](x, out, 8, BLOCK=8)
        print(torch.equal(out, x + 28))
    except RuntimeError as error:
        print(error)
    print(runtime.INTERPRET, runtime.can_launch(), dict(runtime.launches))
"""

needs_triton = pytest.mark.skipif(not runtime.HAS_TRITON, reason="triton is not installed")


@needs_triton
def test_kvlab_first_gives_the_interpreter(script):
    assert script(f"    from kvlab import runtime{KERNEL}") == "True\nTrue True {'add_sum': 1}\n"


@needs_triton
def test_triton_first_is_too_late(script):
    said = script(f"    import triton\n    from kvlab import runtime{KERNEL}")
    assert "add_sum cannot be launched: triton was imported before kvlab" in said
    assert "False False {}" in said


@needs_triton
def test_variable_set_after_triton_is_too_late(script):
    late = "    import os, triton\n    os.environ['TRITON_INTERPRET'] = '1'\n    from kvlab import runtime"
    said = script(late + KERNEL)
    assert "add_sum cannot be launched: TRITON_INTERPRET became 1 after triton was imported" in said
    assert "False False {}" in said


@needs_triton
def test_variable_that_forbids_the_interpreter_is_respected(script):
    said = script(f"    from kvlab import runtime{KERNEL}", TRITON_INTERPRET="0")
    assert "TRITON_INTERPRET=0 and there is no GPU" in said
    assert "False False {}" in said


def test_fallback_is_said_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            runtime.warn_fallback("a_kernel_that_is_only_named_here")
    assert len(caught) == (0 if runtime.can_launch() else 1)


def test_fallback_names_what_is_missing(python):
    said = python(
        """
        import warnings
        warnings.simplefilter("error")
        from kvlab import runtime
        try:
            runtime.warn_fallback("kernel")
        except RuntimeWarning as warning:
            print(warning)
        """,
        TRITON_INTERPRET="0",
    )
    assert "kernel cannot be launched" in said
    assert "running the torch reference" in said


# ---------------------------------------------------------------------------------------------------- no Triton


HIDE_TRITON = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec

def hidden(name, path=None, target=None):
    return None if name.split(".")[0] == "triton" else find(name, path, target)

importlib.machinery.PathFinder.find_spec = hidden
"""


def test_without_triton(script):
    code = HIDE_TRITON + textwrap.dedent("""
        import sys, torch
        import kvlab
        from kvlab import cache, checkpoint, model, naive, reference, runtime
        from kvlab.runtime import tl, triton

        assert not runtime.HAS_TRITON and not runtime.INTERPRET and not runtime.can_launch()
        assert "triton" not in sys.modules

        @runtime.counted
        @runtime.autotune([triton.Config({"BLOCK": 16}, num_warps=2)], key=["n"])
        @triton.jit
        def tuned(x, n, BLOCK: tl.constexpr):
            tl.store(x + tl.arange(0, BLOCK), 1.0)

        @triton.jit
        def plain(x, BLOCK: tl.constexpr = 16):
            pass

        @triton.autotune(configs=[triton.Config({})], key=[])
        @triton.jit
        def directly(x, dtype: tl.float32):
            pass

        for kernel in (tuned, plain, directly):
            try:
                kernel[(triton.cdiv(4, 16),)](torch.zeros(4), 4)
                print("launched")
            except RuntimeError as error:
                print(error)
        print(runtime.cdiv(5, 2), runtime.next_power_of_2(5), dict(runtime.launches))

        from kvlab.batch import Batch
        from kvlab.config import ModelConfig
        small = ModelConfig("small", 1, 16, 2, 1, 8, 16, 32, 16)
        print(model.Decoder(small)(Batch.build([0], [[1, 2]], [0]), cache.NoCache(small)).shape)
    """)
    lines = script(code).splitlines()
    assert lines[0] == "tuned cannot be launched: triton is not installed; use impl='torch'"
    assert lines[1] == "plain cannot be launched: triton is not installed on this machine"
    assert lines[2] == "a kernel cannot be launched: triton is not installed on this machine"
    assert lines[3:] == ["3 8 {}", "torch.Size([1, 32])"]


# ------------------------------------------------------------------------------------------------------- import


def test_import_is_light(python):
    """What takes long to import comes when it is used, not before."""
    said = python(
        """
        import sys
        import torch
        before = set(sys.modules)  # torch brings tqdm itself
        import kvlab
        from kvlab import batch, cache, checkpoint, config, generate, model, naive, reference, runtime, sampling
        slow = ("matplotlib", "transformers", "tokenizers", "safetensors", "tqdm", "IPython", "huggingface_hub")
        print([name for name in slow if name in sys.modules and name not in before])
        """
    )
    assert said == "[]\n"


def test_unknown_attribute():
    import kvlab

    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        kvlab.nothing_of_this_name  # noqa: B018
    assert kvlab.reference.__name__ == "kvlab.reference"


# ------------------------------------------------------------------------------------------------------- checks


def test_device():
    assert runtime.device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@needs_triton
def test_can_launch_on():
    assert runtime.can_launch("cpu") == runtime.INTERPRET
    if runtime.HAS_GPU:
        assert runtime.can_launch("cuda")
        if not runtime.INTERPRET:
            with pytest.raises(RuntimeError, match="tensors are on the CPU"):
                _double[(1,)](torch.zeros(4), torch.zeros(4), 4, BLOCK=4)


def test_kernels_refuse_inputs_that_require_grad():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="no backward pass"):
        runtime.require_no_grad(torch.zeros(2), None, x)
    runtime.require_no_grad(torch.zeros(2), None)
    with torch.no_grad():
        runtime.require_no_grad(x)


def test_full_gpu_is_said_with_the_size_that_fits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2_000_000_000, 8_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 1_500_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 500_000_000)
    runtime.require_memory(3_000_000_000, "cuda", "the cache", 1_000_000, "tokens")
    with pytest.raises(
        MemoryError, match=r"the cache needs 3\.50 GB and the GPU has 3\.00 GB free: at most 3000 tokens"
    ):
        runtime.require_memory(3_500_000_000, "cuda", "the cache", 1_000_000, "tokens")
    runtime.require_memory(10**15, "cpu", "the cache", 1, "tokens")
