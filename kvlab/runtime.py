"""What this machine can run, and the few things all kernels share.

Three situations: a GPU (kernels are compiled), no GPU (Triton's interpreter runs kernels when asked, at small sizes),
no Triton at all (every kernel falls back to its torch reference). Import this module before triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

HAS_GPU: bool = torch.cuda.is_available()
_TRITON_WAS_LOADED = "triton" in sys.modules
if not HAS_GPU and "TRITON_INTERPRET" not in os.environ and not _TRITON_WAS_LOADED:
    os.environ["TRITON_INTERPRET"] = "1"

HAS_TRITON: bool = importlib.util.find_spec("triton") is not None


class _NoTriton:
    """Stands in for triton and triton.language: decorators return the function, which refuses to be launched."""

    class Kernel:
        """A function decorated without Triton. Source: chapter 02."""

        def __init__(self, fn: Callable[..., Any]) -> None:
            self.fn = fn
            functools.update_wrapper(self, fn)  # type: ignore[arg-type]

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            raise RuntimeError(f"{self.fn.__name__} cannot be launched: triton is not installed on this machine")

    constexpr = staticmethod(lambda value=None: value)

    @classmethod
    def jit(cls, fn: Callable[..., Any] | None = None, **_: Any) -> Any:
        return cls.Kernel(fn) if fn is not None else cls.Kernel

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoTriton()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _NoTriton()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        raise RuntimeError("a kernel cannot be launched: triton is not installed on this machine")


if HAS_TRITON:
    import triton
    import triton.language as tl

    # How triton was loaded, not what the variable says now: its own library is decorated at import, and a variable
    # that changed since leaves kernels of one kind that call a library of the other.
    INTERPRET: bool = type(tl.sum).__name__ == "InterpretedFunction"
else:
    triton = tl = _NoTriton()  # type: ignore[assignment]
    INTERPRET = False

CHECK: bool = os.environ.get("KVLAB_CHECK", "0") == "1"

launches: Counter[str] = Counter()


def device() -> torch.device:
    """The device this machine computes on: the GPU where there is one, else the CPU. Source: chapter 00."""
    return torch.device("cuda" if HAS_GPU else "cpu")


def can_launch(on: torch.device | str | None = None) -> bool:
    """Whether a Triton kernel can run on tensors of this device (default: ``device()``): compiled or interpreted.

    Source: chapter 02."""
    kind = device().type if on is None else torch.device(on).type
    return HAS_TRITON and not _changed_too_late() and (INTERPRET or kind == "cuda")


def _changed_too_late() -> bool:
    return bool(triton.knobs.runtime.interpret) != INTERPRET


def require_launch(name: str, on: torch.device | str | None = None) -> None:
    """Refuse to launch the kernel ``name`` where nothing could run it, and say why and what mends it.

    Raises: RuntimeError.  Source: chapter 02.
    """
    if can_launch(on):
        return
    if not HAS_TRITON:
        why = "triton is not installed; use impl='torch'"
    elif _changed_too_late():
        why = (
            f"TRITON_INTERPRET became {os.environ.get('TRITON_INTERPRET', 'unset')} after triton was imported, which "
            "is too late; restart and import kvlab first (or set it before Python starts), or use impl='torch'"
        )
    elif HAS_GPU:
        why = "its tensors are on the CPU and this machine has a GPU; move them there, or use impl='torch'"
    elif _TRITON_WAS_LOADED:
        why = (
            "triton was imported before kvlab, so its interpreter can no longer be chosen; restart and import kvlab "
            "first (or set TRITON_INTERPRET=1), or use impl='torch'"
        )
    else:
        why = (
            f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')} and there is no GPU; unset it, or use impl='torch'"
        )
    raise RuntimeError(f"{name} cannot be launched: {why}")


@functools.cache
def warn_fallback(name: str) -> None:
    """Say once that ``name`` runs as its torch reference because no kernel can be launched. Source: chapter 02."""
    try:
        require_launch(name)
    except RuntimeError as error:
        warnings.warn(f"{error} (running the torch reference)", RuntimeWarning, stacklevel=3)


class Counted:
    """A kernel whose launches are counted in ``runtime.launches`` under its name.

    Shapes and units: ``kernel[grid](...)`` as in Triton; ``fn`` is the kernel underneath.

    Raises: RuntimeError from ``require_launch`` where nothing could run it.

    Source: chapter 02.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        inner = fn
        while hasattr(inner, "fn"):
            inner = inner.fn
        functools.update_wrapper(self, inner, updated=())  # type: ignore[arg-type]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            require_launch(self.__name__, tensors[0].device if tensors else None)  # type: ignore[attr-defined]
            launches[self.__name__] += 1  # type: ignore[attr-defined]
            return self.fn[grid](*args, **kwargs)

        return launch


def counted(kernel: Any) -> Counted:
    """Decorate a jitted (or autotuned) kernel so that its launches are counted. Source: chapter 02."""
    return Counted(kernel)


def autotune(configs: Sequence[Any], key: Sequence[str], restore_value: Sequence[str] = ()) -> Callable[[Any], Any]:
    """``triton.autotune`` that also works without a GPU, where it takes the first configuration.

    Shapes and units: ``configs`` as Triton's; ``key`` the argument names whose change asks for a new search;
    ``restore_value`` the names of arguments that the kernel changes in place. Those are put back before every trial:
    without that the search itself would run an in-place kernel many times over.

    Raises: ValueError where ``configs`` is empty.

    Source: chapter 03; Triton's documentation.
    """
    if not configs:
        raise ValueError("configs is empty; autotune needs at least one configuration")
    if HAS_TRITON and HAS_GPU and not INTERPRET:
        return triton.autotune(list(configs), key=list(key), restore_value=list(restore_value) or None)
    if not HAS_TRITON:
        return lambda kernel: kernel
    first = configs[0]

    class FirstConfig:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                meta = {**first.kwargs, **kwargs}
                if callable(grid):
                    names = self.fn.arg_names
                    return self.fn[grid({**dict(zip(names, args, strict=False)), **meta})](*args, **meta)
                return self.fn[grid](*args, **meta)

            return launch

    return FirstConfig


_INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def dot(a, b, acc):
    """Matrix product a @ b + acc with float32 accumulation, right on every machine.

    Triton's interpreter multiplies the raw bits of bf16 operands, so there both are widened first. Compiled, float32
    operands stay float32 ("ieee") instead of being cut to TF32.

    Shapes and units: a [M, K], b [K, N], acc [M, N] float32.

    Source: chapter 02.
    """
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


def require_no_grad(*tensors: Tensor | None) -> None:
    """Refuse tensors that require grad: kvlab's kernels have no backward pass.

    Raises: ValueError.  Source: chapter 02.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            "a tensor requires grad and this kernel has no backward pass; use torch.inference_mode(), "
            "or NoCache to train"
        )


def require_memory(nbytes: int, on: torch.device | str, what: str, bytes_per_unit: int, unit: str) -> None:
    """Refuse an allocation that a GPU has no room for, and name the size that would fit.

    Shapes and units: ``nbytes`` wanted; ``bytes_per_unit`` the bytes of one ``unit`` (a word such as "tokens").

    Raises: MemoryError.  Source: chapter 00.
    """
    if torch.device(on).type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(on)
    free += torch.cuda.memory_reserved(on) - torch.cuda.memory_allocated(on)
    if nbytes > free:
        raise MemoryError(
            f"{what} needs {nbytes / 1e9:.2f} GB and the GPU has {free / 1e9:.2f} GB free: "
            f"at most {free // bytes_per_unit} {unit} would fit"
        )
