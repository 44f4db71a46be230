"""What this machine can run, and the few things all kernels share.

Three situations: a GPU (kernels are compiled), no GPU (Triton's interpreter runs kernels when asked, at small sizes),
no Triton at all (every kernel falls back to its torch reference). Import this module before triton.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoTriton()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _NoTriton()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        raise RuntimeError("a kernel cannot be launched: triton is not installed on this machine")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; on the host, where Triton's own takes as long as a launch. Source: chapter 02."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is n or more, 1 or more; on the host, as ``cdiv``. Source: chapter 02."""
    return 1 << max(n - 1, 0).bit_length()


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


@functools.cache
def multiprocessors(on: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere 4, for grids worth a look in the interpreter. Source: chapter 03b."""
    return torch.cuda.get_device_properties(on).multi_processor_count if on.type == "cuda" else 4


@functools.cache
def capability(on: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, (major, minor); asked at every launch. Source: chapter 03b."""
    return torch.cuda.get_device_capability(on)


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


def require_tensor(name: str, value: object) -> None:
    """Refuse what is no dense tensor.

    Raises: ValueError that names the argument.  Source: chapter 05.
    """
    if not isinstance(value, Tensor):
        _refuse(name, f"a {type(value).__name__}", "a tensor")
    if value.layout != torch.strided:
        _refuse(name, f"of layout {value.layout}", "a dense tensor")


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


# --- what every attention kernel shares ------------------------------------------------------------------------------


@triton.jit
def load_rows(ptr, offsets, mask):
    """Load a tile whose masked places are 0, whatever memory holds there: an unused slot may be NaN, and 0 times NaN
    would be NaN.

    Shapes and units: offsets (64-bit where they reach into a cache) and mask broadcast to the tile's shape.

    Source: chapter 02.
    """
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def count_bits(x):
    """The number of bits set in each int64 below 2**63; any shape. Source: chapter 05; Warren, Hacker's Delight."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return x & 0x7F


@triton.jit
def visible(q_index, k_index, q_bits, k_bits, q_len, kv_len, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
            RIGHT: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """Which keys of a tile each query of a tile sees: the rule of ``reference.visible_keys``, for one sequence.

    Shapes and units: q_index [M] counts the sequence's new tokens, k_index [N] its slots; q_bits [M] and k_bits [N] are
    the tree masks of those tokens (read only with TREE); LEFT and RIGHT in tokens, -1 unlimited; gives bool [M, N].

    Source: chapter 02.
    """
    past = kv_len - q_len
    seen = (q_index < q_len)[:, None] & (k_index < kv_len)[None, :]
    q_pos = past + q_index
    k_pos = k_index
    if TREE:
        new = k_index - past
        q_pos = past + count_bits(q_bits).to(tl.int32) - 1
        k_pos = tl.where(new < 0, k_index, past + count_bits(k_bits).to(tl.int32) - 1)
        shift = tl.minimum(tl.maximum(new, 0), 62).to(tl.int64)
        seen = seen & ((new < 0)[None, :] | (((q_bits[:, None] >> shift[None, :]) & 1) != 0))
    elif CAUSAL:
        seen = seen & (k_pos[None, :] <= q_pos[:, None])
    if LEFT >= 0:
        seen = seen & (k_pos[None, :] >= q_pos[:, None] - LEFT)
    if RIGHT >= 0:
        seen = seen & (k_pos[None, :] <= q_pos[:, None] + RIGHT)
    return seen


@triton.jit
def key_range(q_start, q_count, q_len, kv_len, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              TREE: tl.constexpr):  # fmt: skip
    """First and one past the last slot that any of a tile's queries can see; the others need not be read.

    Shapes and units: the tile's queries are q_start .. q_start + q_count of the sequence's q_len new tokens.

    Source: chapter 02.
    """
    past = kv_len - q_len
    last = tl.minimum(q_start + q_count, q_len) - 1
    low = 0
    high = kv_len
    if TREE:  # depths lie between past and the last slot
        if LEFT >= 0:
            low = tl.maximum(past - LEFT, 0)
    else:
        if CAUSAL:
            high = tl.minimum(high, past + last + 1)
        if RIGHT >= 0:
            high = tl.minimum(high, past + last + 1 + RIGHT)
        if LEFT >= 0:
            low = tl.maximum(past + q_start - LEFT, 0)
    return low, tl.maximum(high, low)


@triton.jit
def cap(scores, softcap):
    """softcap · tanh(scores / softcap), by its series near 0 and through exp elsewhere; any shape.

    Source: Gemma 2, 2024; the series of tanh.
    """
    x = scores / softcap
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)  # loses digits where x is small
    return softcap * tl.where(square < 0.09, near, far)


@triton.jit
def finish(acc, total, peak):
    """Close a softmax: the output rows, and the log of the denominator; a row that saw nothing gives 0 and -inf.

    Shapes and units: acc [M, Dv] weighted sum, total [M] sum of exp(score - peak), peak [M]; natural log.

    Source: chapter 02.
    """
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    return out, lse


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None = None, softmax_scale: float | None = None, causal: bool = True,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Refuse arguments of the one attention signature that do not fit together, before anything is launched.

    Reads shapes, dtypes, devices and strides only; with ``KVLAB_CHECK=1`` in the environment also what the tensors
    hold, which waits for the device.

    Shapes and units: as ``reference.attention``.

    Raises: ValueError that names the argument, what it is and what it must be.

    Source: chapter 02.
    """

    always = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "cu_seqlens_q": cu_seqlens_q,
              "seqused_k": seqused_k}  # fmt: skip
    tensors = always | {n: x for n, x in (("sinks", sinks), ("tree_mask", tree_mask), ("out", out)) if x is not None}
    for name, tensor in tensors.items():
        require_tensor(name, tensor)
        if tensor.device != q.device:
            _refuse(name, f"on {tensor.device}", f"on {q.device}, as q")
    if q.ndim != 3:
        _refuse("q", f"of shape {list(q.shape)}", "[total_q, H, D]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 4:
            _refuse(name, f"of shape {list(cache.shape)}", "[num_blocks, block_size, H_kv, D]")
        if cache.dtype != q.dtype:
            _refuse(name, cache.dtype, f"{q.dtype}, as q")
        if not (cache.stride(3) == 1 or cache.shape[3] < 2):
            _refuse(name, f"strided by {cache.stride(3)} within a head", "contiguous there")
    if not q.is_floating_point():
        _refuse("q", q.dtype, "a floating-point tensor")
    if not (q.stride(2) == 1 or q.shape[2] < 2):
        _refuse("q", f"strided by {q.stride(2)} within a head", "contiguous there")
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    if not (heads > 0 and q.shape[2] > 0):
        _refuse("q", f"of shape {list(q.shape)}", "of one head and one number or more")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        _refuse("v_cache", f"of shape {list(v_cache.shape)}", f"like k_cache, {list(k_cache.shape)}, but for D")
    if k_cache.shape[3] != q.shape[2]:
        _refuse("k_cache", f"of head size {k_cache.shape[3]}", f"{q.shape[2]}, as q")
    if not (kv_heads > 0 and heads % kv_heads == 0):
        _refuse("q", f"of {heads} heads", f"a multiple of the {kv_heads} KV heads")
    if not (k_cache.shape[1] > 0):
        _refuse("block_size", k_cache.shape[1], "1 or more")
    batch = seqused_k.shape[0] if seqused_k.ndim == 1 else -1
    if not (batch >= 0):
        _refuse("seqused_k", f"of shape {list(seqused_k.shape)}", "[B]")
    if not (batch > 0 or q.shape[0] == 0):
        _refuse("q", f"of {q.shape[0]} tokens and no sequence", "empty, where there is none")
    if not (block_table.ndim == 2 and block_table.shape[0] == batch):
        _refuse("block_table", f"of shape {list(block_table.shape)}", f"[{batch}, max_blocks]")
    if cu_seqlens_q.shape != (batch + 1,):
        _refuse("cu_seqlens_q", f"of shape {list(cu_seqlens_q.shape)}", f"[{batch + 1}]")
    for name, tensor in (("block_table", block_table), ("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)):
        if tensor.dtype != torch.int32:
            _refuse(name, tensor.dtype, "torch.int32")
        if not (tensor.shape[-1] < 2 or tensor.stride(-1) == 1):
            _refuse(name, f"strided by {tensor.stride(-1)}", "contiguous")
    if sinks is not None:
        if not (sinks.shape == (heads,) and sinks.is_contiguous()):
            _refuse("sinks", f"of shape {list(sinks.shape)}", f"[{heads}], contiguous")
        if sinks.dtype != torch.float32:
            _refuse("sinks", sinks.dtype, "torch.float32")
    if tree_mask is not None:
        if not (tree_mask.shape == (q.shape[0],) and tree_mask.is_contiguous()):
            _refuse("tree_mask", f"of shape {list(tree_mask.shape)}", f"[{q.shape[0]}], contiguous")
        if tree_mask.dtype != torch.int64:
            _refuse("tree_mask", tree_mask.dtype, "torch.int64")
    if out is not None:
        want = (q.shape[0], heads, v_cache.shape[3])
        if not (out.shape == want and out.dtype == q.dtype):
            _refuse("out", f"{out.dtype} {list(out.shape)}", f"{q.dtype} {list(want)}")
        if not (out.stride(2) == 1 or want[2] < 2):
            _refuse("out", f"strided by {out.stride(2)} within a head", "contiguous there")
        reach = 1  # elements that the dimensions of smaller strides span
        for stride, n in sorted((stride, n) for n, stride in zip(out.shape, out.stride(), strict=True) if n > 1):
            if stride < reach:
                _refuse("out", f"overlapping itself, strides {list(out.stride())}", "memory of its own for each row")
            reach += stride * (n - 1)
    wide = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not (wide and all(_is_number(w, int) and w >= -1 for w in window_size)):
        _refuse("window_size", window_size, "two integers, -1 or more")
    if not isinstance(causal, bool):
        _refuse("causal", repr(causal), "True or False")
    if not (_is_number(softcap) and softcap >= 0):
        _refuse("softcap", softcap, "a finite number in float32, 0 (off) or more")
    if not (softmax_scale is None or _is_number(softmax_scale)):
        _refuse("softmax_scale", softmax_scale, "a finite number in float32, or None")
    if max_seqlen_q is not None:
        right = _is_number(max_seqlen_q, int) and max_seqlen_q >= 0 and max_seqlen_q * batch >= q.shape[0]
        if not right:
            _refuse(
                "max_seqlen_q", max_seqlen_q, f"an integer that bounds the {q.shape[0]} new tokens of {batch} sequences"
            )
    require_no_grad(q, k_cache, v_cache, sinks, out)
    if CHECK:
        check_contents(k_cache, q.shape[0], block_table, cu_seqlens_q, seqused_k, tree_mask)


def _refuse(name: str, what: object, must: str) -> NoReturn:
    raise ValueError(f"{name} is {what}; it must be {must}")


_FLOAT32_MAX = torch.finfo(torch.float32).max


def _is_number(value: object, kind: type = float) -> bool:
    wanted = int if kind is int else (int, float)
    return isinstance(value, wanted) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX  # not NaN either


def check_contents(
    k_cache: Tensor, total_q: int, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    tree_mask: Tensor | None,
) -> None:  # fmt: skip
    """Refuse an attention call whose tables and lengths do not fit; reads the device, and so waits for it.

    Shapes and units: as ``check_attention``.

    Raises: ValueError that names the argument and the sequence.

    Source: chapter 02.
    """
    num_blocks, block_size = k_cache.shape[:2]
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    if starts[0] != 0 or starts[-1] != total_q or any(b < a for a, b in itertools.pairwise(starts)):
        raise ValueError(f"cu_seqlens_q is {starts}; it must rise from 0 to total_q, {total_q}")
    for b, length in enumerate(lengths):
        needed, new = -(-length // block_size), starts[b + 1] - starts[b]
        if length < 0 or needed > block_table.shape[1]:
            raise ValueError(f"seqused_k[{b}] is {length}; it must be 0 to {block_table.shape[1] * block_size}")
        if tree_mask is not None and length:
            if new > min(63, length):
                raise ValueError(
                    f"sequence {b} has {new} new tokens of {length} in a tree; a tree holds 63 at most, all of them"
                )
            for i, bits in enumerate(tree_mask[starts[b] : starts[b + 1]].tolist()):
                if bits < 0 or bits >> new:
                    raise ValueError(
                        f"tree_mask[{starts[b] + i}] is {bits:#x}; its bits must be among the lowest {new}"
                    )
        pages = block_table[b, :needed].tolist()
        if pages and not 0 <= min(pages) <= max(pages) < num_blocks:
            raise ValueError(f"block_table[{b}] begins {pages}; its pages must be 0 to {num_blocks - 1}")


def choose(impl: str | None, on: torch.device, name: str) -> str:
    """Which implementation a function of this name runs: "triton" on a GPU, "torch" on a CPU unless asked otherwise.

    Raises: ValueError for another ``impl``; RuntimeError where "triton" was asked for and cannot be launched.

    Source: chapter 02.
    """
    if impl not in (None, "torch", "triton"):
        raise ValueError(f'impl is {impl!r}; it must be "torch", "triton" or None')
    if impl == "triton":
        require_launch(name, on)
    if impl is None and on.type == "cuda" and not can_launch(on):
        warn_fallback(name)
    return impl or ("triton" if on.type == "cuda" and can_launch(on) else "torch")
