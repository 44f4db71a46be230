"""Other libraries' attention behind one small interface: used where they can be imported, never required."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab import paged


class Call(NamedTuple):
    """One implementation, ready to run on inputs that were laid out for it.

    Shapes and units: ``run()`` gives the output, heads and head size last; ``how`` says in a few words what was chosen,
    "" where there was nothing to choose.

    Source: chapter 03.
    """

    run: Callable[[], Tensor]
    how: str = ""


@dataclass(frozen=True)
class Peer:
    """An implementation of attention: its name, its version, and for each kind of input what prepares a ``Call``.

    Shapes and units:
        dense(q, k, v, causal)              q [B, L, H, D], k and v [B, L, H_kv, D]
        ragged(q, k, v, starts, longest)    q [T, H, D], k and v [T, H_kv, D], starts [sequences + 1] int32; causal
        paged(q, k, v, table, used)         q [B, L, H, D], the last of used [B] int32 tokens in pages k and v
                                            [N, P, H_kv, D] that table [B, blocks] int32 lists; causal
        decode(q, pools, table, used)       q [B, L, H, D] of few tokens, pools a list of such (k, v): one Call for each
    None where it has no such kind. ``sizes`` are the head sizes worth measuring, None for all: some libraries compile
    for a minute for each. What is copied, planned or compiled there is not part of the time.

    Source: chapter 03.
    """

    name: str
    version: str | None
    dense: Callable[[Tensor, Tensor, Tensor, bool], Call] | None = None
    ragged: Callable[[Tensor, Tensor, Tensor, Tensor, int], Call] | None = None
    paged: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Call] | None = None
    sizes: tuple[int, ...] | None = None
    decode: Callable[[Tensor, list[tuple[Tensor, Tensor]], Tensor, Tensor], list[Call]] | None = None


def find(device: torch.device, note: Callable[[str], None]) -> list[Peer]:
    """The peers that this machine has; ``note`` is told which were looked for and are not there. Source: chapter 03."""
    if device.type != "cuda":
        kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        return [Peer("torch SDPA", torch.__version__, dense=functools.partial(_sdpa, kinds))]
    return [
        *flash_attention_3(note),
        Peer(
            "cuDNN (torch)",
            f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
            dense=functools.partial(_sdpa, [SDPBackend.CUDNN_ATTENTION]),
        ),
        Peer(
            "FlashAttention-2 (torch)",
            torch.__version__,
            dense=functools.partial(_sdpa, [SDPBackend.FLASH_ATTENTION]),
            ragged=_flash_attention_2_ragged,
        ),
        Peer("FlexAttention (torch)", torch.__version__, dense=_flex_dense, ragged=_flex_ragged),
        *flashinfer(note),
    ]


def _load(name: str, note: Callable[[str], None]) -> Any:
    """A module, or None where it is missing or does not load on this machine."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a wheel for another torch or CUDA fails in ways of its own
        if not (isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0])):
            note(f"  {name}: does not load, {first_line(error)}")
        return None


def first_line(error: BaseException) -> str:
    """The type of an error and the beginning of what it says, for a note. Source: chapter 03."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


# --- FlashAttention-3 ------------------------------------------------------------------------------------------------

_FA3 = {  # module: the distributions it may come from
    "fa3_fwd_interface": ("fa3-fwd",),
    "flash_attn_interface": ("tokenspeed-fa3", "flash-attn-3", "flash_attn_3", "hopper"),
    "flash_attn_3.flash_attn_interface": ("flash-attn-3", "flash_attn_3"),
}


def flash_attention_3(note: Callable[[str], None]) -> list[Peer]:
    """FlashAttention-3 from every wheel there is; the first one is called that, others carry their wheel's name.

    All share one interface: ``flash_attn_func`` and ``flash_attn_varlen_func`` on [B, L, H, D] and [T, H, D], and
    ``flash_attn_with_kvcache(..., cache_seqlens=, page_table=)`` on pages, which some wheels leave out (fa3-fwd 0.0.3
    does: it then raises).

    Source: chapter 03; Shah et al. 2024.
    """
    found: list[Peer] = []
    for name, wheels in _FA3.items():
        if (module := _load(name, note)) is None:
            continue
        wheel, version = _version(wheels)
        if any(peer.version == f"{wheel} {version}" for peer in found):
            continue  # the same wheel by another name
        title = "FlashAttention-3" if not found else f"FlashAttention-3 ({wheel})"
        found.append(_flash_attention_3(module, title, f"{wheel} {version}"))
    if not found:
        note(f"  FlashAttention-3: none of {', '.join(_FA3)} can be imported")
    return found


def _version(wheels: tuple[str, ...]) -> tuple[str, str]:
    for wheel in wheels:
        try:
            return wheel, importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return wheels[0], "of unknown version"


def _flash_attention_3(module: Any, name: str, version: str) -> Peer:
    def only(out: Any) -> Tensor:
        return out[0] if isinstance(out, tuple) else out  # some versions add the lse

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        return Call(lambda: only(module.flash_attn_func(q, k, v, causal=causal)))

    def ragged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Call:
        return Call(lambda: only(module.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)))

    def from_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Call:
        return Call(
            lambda: only(module.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, page_table=table, causal=True))
        )

    def decode(q: Tensor, pools: list[tuple[Tensor, Tensor]], table: Tensor, used: Tensor) -> list[Call]:
        return [from_pages(q, *pool, table, used) for pool in pools]

    return Peer(name, version, dense, ragged, from_pages, decode=decode)


# --- PyTorch's own ---------------------------------------------------------------------------------------------------


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, L, D] in memory, the layout these kernels take by default."""
    return tuple(x.transpose(1, 2).contiguous() for x in tensors)


def _sdpa(backends: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """scaled_dot_product_attention by one backend; K and V are expanded to all heads where it has no grouped heads."""
    q, k, v = _heads_first(q, k, v)

    def run(k: Tensor = k, v: Tensor = v, grouped: bool = True) -> Tensor:
        with sdpa_kernel(backends):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    try:
        run()
        return Call(run, "enable_gqa")
    except RuntimeError:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return Call(functools.partial(run, k, v, False), "K and V expanded to all heads")


def _flash_attention_2_ragged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Call:
    """The operator under torch.nn.attention.varlen, whose own signature differs between releases."""
    kernel = torch.ops.aten._flash_attention_forward
    return Call(lambda: kernel(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0])


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # each shape is compiled for itself, whatever came before
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = _heads_first(q, k, v)
    return Call(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2), "compiled")


def _flex_dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    length = q.shape[1]

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = create_block_mask(rule, None, None, length, length, device=q.device) if causal else None
    return _flex(q, k, v, mask)


def _flex_ragged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    total = q.shape[0]
    owner = torch.searchsorted(starts[1:].contiguous(), torch.arange(total, device=q.device), right=True)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (owner[i] == owner[j]) & (i >= j)

    call = _flex(q[None], k[None], v[None], create_block_mask(rule, None, None, total, total, device=q.device))
    return Call(lambda: call.run()[0], call.how)


# --- FlashInfer ------------------------------------------------------------------------------------------------------


def flashinfer(note: Callable[[str], None]) -> list[Peer]:
    """FlashInfer's batch prefill, ragged and paged, keys as [tokens, heads, size]; empty where it is not there.

    It compiles a kernel for each head size at first use, about a minute with nvcc, so that only size 128 is measured.

    Source: chapter 03; Ye et al. 2025.
    """
    if (module := _load("flashinfer", note)) is None:
        note("  FlashInfer: cannot be imported")
        return []

    def planned(wrapper: Any, q: Tensor, *plan: Any, causal: bool, run: Callable[[], Tensor]) -> Call:
        wrapper.plan(*plan, causal=causal, q_data_type=q.dtype, kv_data_type=q.dtype)
        return Call(run, f"backend {getattr(wrapper, '_backend', 'auto')}")

    def tokens(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, causal: bool) -> Call:
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD", backend="auto")
        sizes = (q.shape[1], k.shape[1], q.shape[2])
        return planned(wrapper, q, starts, starts, *sizes, causal=causal, run=lambda: wrapper.run(q, k, v))

    def ragged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Call:
        return tokens(q, k, v, starts, True)

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        batch, length = q.shape[:2]
        starts = length * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        call = tokens(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, causal)
        return Call(lambda: call.run().view(q.shape), call.how)

    def from_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Call:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD", backend="auto")
        rows, block_size = q.flatten(0, 1), k.shape[1]
        starts = q.shape[1] * torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        plan = (starts, *paged.to_flashinfer(table, used, block_size), q.shape[2], k.shape[2], q.shape[3], block_size)
        return planned(wrapper, q, *plan, causal=True, run=lambda: wrapper.run(rows, (k, v)).view(q.shape))

    def decode(q: Tensor, pools: list[tuple[Tensor, Tensor]], table: Tensor, used: Tensor) -> list[Call]:
        """Planned once: the wrapper for single tokens by tensor cores, the one for prompts where there are more."""
        (batch, q_len, heads, size), (_, block_size, kv_heads, _) = q.shape, pools[0][0].shape
        pages = paged.to_flashinfer(table, used, block_size)
        buffers = [x.clone() for x in pages]
        types = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        if q_len == 1:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(q.device), "NHD", use_cuda_graph=True, use_tensor_cores=True,
                paged_kv_indptr_buffer=buffers[0], paged_kv_indices_buffer=buffers[1],
                paged_kv_last_page_len_buffer=buffers[2],
            )  # fmt: skip
            wrapper.plan(*pages, heads, kv_heads, size, block_size, **types)
        else:
            starts = q_len * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
                _workspace(q.device), "NHD", use_cuda_graph=True, qo_indptr_buf=starts.clone(),
                paged_kv_indptr_buf=buffers[0], paged_kv_indices_buf=buffers[1],
                paged_kv_last_page_len_buf=buffers[2],
            )  # fmt: skip
            wrapper.plan(starts, *pages, heads, kv_heads, size, block_size, causal=True, **types)
        rows, how = q.flatten(0, 1), f"backend {getattr(wrapper, '_backend', 'auto')}"
        return [Call(lambda pool=pool: wrapper.run(rows, pool).view(q.shape), how) for pool in pools]  # type: ignore[misc]

    version = str(getattr(module, "__version__", "unknown"))
    return [Peer("FlashInfer", version, dense, ragged, from_pages, (128,), decode)]


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)
