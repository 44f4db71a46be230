"""Attention over pages: the small inputs on which real kernels were once wrong."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab import reference
from kvlab.testing._close import assert_close


@dataclass(frozen=True)
class AttentionCase:
    """A small hostile input of the one attention signature.

    Shapes and units: for each of B sequences ``q_lens`` new tokens out of ``kv_lens`` in the cache; sizes as in the
    notation. ``content`` is "random", or the one value that all scaled scores have ("200", "-60000"). ``padding`` is
    what stands in the block table past a sequence's last block: -1, or "garbage". ``strided`` stores each head's D
    numbers of the caches beside as many poisoned ones, and q's heads beside as many poisoned heads, as in the output
    of one projection. ``far`` lays the pages so far apart in memory that the offset of a page in use, counted in
    elements, passes 2**31; 2**32 elements are allocated (17 GB in float32), and nearly none is touched. ``tree`` draws
    a random tree for each sequence's new tokens. ``options`` are further keyword arguments of the call.

    Source: chapter 02.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    content: str = "random"
    padding: str = "-1"
    strided: bool = False
    far: bool = False
    sinks: bool = False
    tree: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_gpu(self) -> bool:
        """Whether the case is too large for the memory of a small machine. Source: chapter 02."""
        return self.far

    def build(
        self, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", fill: float = float("nan"),
        seed: int = 0,
    ) -> AttentionInputs:  # fmt: skip
        """Make the tensors. Pages are shuffled and not consecutive; unused slots and pages hold ``fill``.

        Shapes and units: the same ``seed`` gives the same q, keys, values and pages whatever ``fill`` is.

        Source: chapter 02.
        """
        rng = torch.Generator().manual_seed(seed)
        num_q, v_dim = sum(self.q_lens), self.v_head_dim or self.head_dim
        counts = [-(-length // self.block_size) for length in self.kv_lens]
        num_blocks = 2 * sum(counts) + 3
        pages = torch.randperm(num_blocks, generator=rng).tolist()
        wide = 2 if self.strided else 1

        def full(*shape: int) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        if self.far:
            pages.remove(num_blocks - 1)
            pages.append(num_blocks - 1)  # the page farthest off is the first to be used
            k_cache, v_cache = _far_pools(self, num_blocks, dtype, device)
            k_cache.fill_(fill)
            v_cache.fill_(fill)
        else:
            shape = (num_blocks, self.block_size, self.num_kv_heads)
            k_cache = full(*shape, self.head_dim * wide)[..., : self.head_dim]
            v_cache = full(*shape, v_dim * wide)[..., :v_dim]
        past_end = {"-1": -1, "garbage": 2**31 - 1}[self.padding]
        table = torch.full((len(counts), max([*counts, 0]) + 2), past_end, dtype=torch.int32)
        q = torch.randn(num_q, self.num_heads, self.head_dim, generator=rng)
        if self.content != "random":  # q · k · D^-0.5 is the same everywhere
            q = torch.full_like(q, float(self.content) * self.head_dim**-0.5)
        for b, (count, length) in enumerate(zip(counts, self.kv_lens, strict=True)):
            table[b, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
            keys = torch.randn(length, self.num_kv_heads, self.head_dim, generator=rng)
            values = torch.randn(length, self.num_kv_heads, v_dim, generator=rng)
            if self.content != "random":
                keys = torch.ones_like(keys)
            at = torch.arange(length)
            page, slot = table[b, at // self.block_size].long().to(device), (at % self.block_size).to(device)
            k_cache[page, slot], v_cache[page, slot] = keys.to(device, dtype), values.to(device, dtype)
        new = full(num_q, self.num_heads * wide, self.head_dim)[:, : self.num_heads]
        new.copy_(q)
        starts = [0, *itertools.accumulate(self.q_lens)]
        options = dict(self.options)
        if self.sinks:
            options["sinks"] = torch.randn(self.num_heads, generator=rng)
        if self.tree:
            options["tree_mask"] = torch.tensor([m for n in self.q_lens for m in _random_tree(n, rng)]).long()

        def place(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        return AttentionInputs(
            q=new, k_cache=k_cache, v_cache=v_cache, block_table=place(table),
            cu_seqlens_q=place(torch.tensor(starts, dtype=torch.int32)),
            seqused_k=place(torch.tensor(self.kv_lens, dtype=torch.int32)),
            kwargs={name: place(value) for name, value in options.items()},
        )  # fmt: skip


def _far_pools(
    case: AttentionCase, num_blocks: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """k_cache and v_cache as views into one buffer that is never filled.

    The last page begins 2**31 elements or more behind the first. The first stands as far into the buffer, so that an
    offset that wrapped at 32 bits reads wrong numbers, not memory of another.
    """
    rows, k_dim, v_dim = case.block_size * case.num_kv_heads, case.head_dim, case.v_head_dim or case.head_dim
    stride = -(-(2**31) // (num_blocks - 1) // 128) * 128
    flat = torch.empty(2**31 + (num_blocks - 1) * stride + rows * (k_dim + v_dim), dtype=dtype, device=device)

    def pool(size: int, start: int) -> Tensor:
        shape = (num_blocks, case.block_size, case.num_kv_heads, size)
        return flat.as_strided(shape, (stride, case.num_kv_heads * size, size, 1), 2**31 + start)

    return pool(k_dim, 0), pool(v_dim, rows * k_dim)


@dataclass
class AttentionInputs:
    """The tensors of one attention call.

    Shapes and units: as the one attention signature; ``kwargs`` holds window_size, softcap, sinks, tree_mask, causal
    where a case sets them.

    Source: chapter 02.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    kwargs: dict[str, Any]

    def call(self, attention: Callable[..., Any], **extra: Any) -> Any:
        """Call a function of the one attention signature with these inputs. Source: chapter 02."""
        return attention(
            self.q, self.k_cache, self.v_cache, block_table=self.block_table, cu_seqlens_q=self.cu_seqlens_q,
            seqused_k=self.seqused_k, **{**self.kwargs, **extra},
        )  # fmt: skip

    def alone(self, seq: int) -> AttentionInputs:
        """One sequence of the batch by itself: its own rows, table and length, the same cache. Source: chapter 04."""
        start, stop = self.cu_seqlens_q[seq : seq + 2].tolist()
        options = dict(self.kwargs)
        if options.get("tree_mask") is not None:
            options["tree_mask"] = options["tree_mask"][start:stop].contiguous()
        ends = torch.tensor([0, stop - start], dtype=torch.int32, device=self.q.device)
        table, used = self.block_table[seq : seq + 1], self.seqused_k[seq : seq + 1]
        return AttentionInputs(self.q[start:stop], self.k_cache, self.v_cache, table, ends, used, options)

    def oracle(self) -> tuple[Tensor, Tensor]:
        """out [total_q, H, Dv] and lse [H, total_q] in float64. Source: chapter 01."""
        return self.call(reference.attention, return_lse=True)

    def plain(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of a plain PyTorch run in the inputs' own precision, or in ``dtype``. Source: chapter 01."""
        return self.call(reference.attention, return_lse=True, dtype=dtype)


def check_attention(
    attention: Callable[..., Any],
    case: AttentionCase,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fills: Sequence[float] = (float("nan"), 1e4),
    lse: bool = True,
    **extra: Any,
) -> float:
    """Run one case through an attention function and hold it to the float64 oracle; gives its largest error.

    The output lands in memory that was NaN; it may not depend on what unused slots hold, not in one bit; inputs may
    not change. ``lse`` asks for the log-sum-exp as well; ``extra`` is passed on (``impl="triton"``). A case that needs
    a GPU is not run on a CPU: a warning says so, and the error is NaN; ``cases`` leaves such a case out.

    Shapes and units: ``fills`` are the values of unused slots, one run each.

    Raises: AssertionError that names the case; ValueError where ``fills`` is empty.

    Source: chapter 02.
    """
    if not fills:
        raise ValueError("fills is empty; it must hold the value of unused slots of one run or more")
    if case.needs_gpu and torch.device(device).type != "cuda":
        warnings.warn(f"{case.name}: not run, it needs a GPU; take the cases from testing.cases(device)", stacklevel=2)
        return float("nan")
    outs = []
    worst = 0.0
    for fill in fills:
        inputs = case.build(dtype=dtype, device=device, fill=fill)
        given = {name: x for name, x in {**vars(inputs), **inputs.kwargs}.items() if isinstance(x, Tensor)}
        before = {name: x.clone() for name, x in given.items()}
        (want, want_lse), (plain, _) = inputs.oracle(), inputs.plain()
        out = torch.full(want.shape, float("nan"), dtype=dtype, device=device)
        result = inputs.call(attention, out=out, **({"return_lse": True} if lse else {}), **extra)
        got, got_lse = result if lse else (result, None)
        where = f"{case.name} (unused slots {fill:g})"
        for name, old in before.items():
            assert _same_bits(given[name], old), f"{where}: {name} was written to"
        worst = max(worst, assert_close(got, want, plain, dtype, f"{where}: out"))
        assert got.data_ptr() == out.data_ptr(), f"{where}: the result is not the tensor given as out"
        if got_lse is not None:
            assert got_lse.dtype == torch.float32, f"{where}: lse is {got_lse.dtype}; it must be torch.float32"
            single = inputs.plain(torch.float32)[1]
            assert_close(got_lse, want_lse, single, torch.float32, f"{where}: lse")
        outs.append(got.clone())
        del inputs, given  # before the next are built: far pages are large
    for fill, other in zip(fills[1:], outs[1:], strict=True):
        assert _same_bits(outs[0], other), (
            f"{case.name}: out changes when unused slots hold {fill:g} instead of {fills[0]:g}"
        )
    return worst


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b).all())


def _random_tree(num_tokens: int, rng: torch.Generator) -> list[int]:
    """Bit masks of a random tree: each token sees itself and its ancestors."""
    masks: list[int] = []
    for i in range(num_tokens):
        parent = int(torch.randint(-1, i, (1,), generator=rng)) if i else -1
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


ATTENTION: tuple[AttentionCase, ...] = (
    AttentionCase("lengths 0 and 1", (0, 1, 1, 1), (0, 0, 1, 17)),
    AttentionCase("nothing to do", (0, 0), (0, 5)),
    AttentionCase("page edge, decode", (1, 1, 1), (15, 16, 17)),
    AttentionCase("page edge, prefill", (15, 16, 17), (15, 16, 17)),
    AttentionCase("page of one token", (1, 3), (5, 4), block_size=1),
    AttentionCase("page longer than the sequence", (2, 1), (5, 40), block_size=128),
    AttentionCase("table with garbage past the end", (1, 4), (33, 20), padding="garbage"),
    AttentionCase("no multiple of any tile", (113, 1), (113, 113)),
    AttentionCase("more queries than keys", (5, 2), (2, 5)),
    AttentionCase("chunk that ends in mid-page", (7, 3), (23, 19)),
    AttentionCase("prompt found whole in the cache", (1, 0), (32, 32)),
    AttentionCase("decode and prefill in one batch", (1, 40, 1, 3), (50, 40, 1, 35)),
    AttentionCase("short and long together", (1, 1, 1, 1), (1, 5, 17, 300)),
    AttentionCase("group 5", (3, 1), (21, 18), num_heads=10),
    AttentionCase("group 7", (3, 1), (21, 18), num_heads=7, num_kv_heads=1),
    AttentionCase("one KV head a query head", (3, 1), (21, 18), num_heads=3, num_kv_heads=3),
    AttentionCase("head size 80", (5, 1), (21, 18), head_dim=80),
    AttentionCase("head size 96 beside another head", (5, 1), (21, 18), head_dim=96, strided=True),
    AttentionCase("head size 128", (5, 1), (21, 18), head_dim=128),
    AttentionCase("values of another size", (5, 1), (21, 18), v_head_dim=32),
    AttentionCase("all scores 200", (1, 2), (40, 300), content="200"),
    AttentionCase("all scores -60000", (1, 2), (4, 40), content="-60000"),
    AttentionCase("not causal", (6, 1), (21, 18), options={"causal": False}),
    AttentionCase("window of 4", (20, 1), (37, 50), options={"window_size": (3, -1)}),
    AttentionCase("window of 1", (3, 1), (17, 16), options={"window_size": (0, -1)}),
    AttentionCase("window to both sides", (20, 1), (37, 18), options={"causal": False, "window_size": (5, 2)}),
    AttentionCase("window to the right alone", (6, 1), (21, 18), options={"causal": False, "window_size": (-1, 2)}),
    AttentionCase("window to the left alone", (6, 1), (21, 18), options={"causal": False, "window_size": (5, 0)}),
    AttentionCase("softcap", (6, 1), (21, 18), options={"softcap": 1.0}),
    AttentionCase("sinks", (6, 1, 1), (21, 0, 18), sinks=True),
    AttentionCase(
        "window, softcap and sinks", (20, 1), (37, 18), sinks=True, options={"window_size": (7, -1), "softcap": 5.0}
    ),
    AttentionCase("window and softcap", (20, 1), (37, 18), options={"window_size": (7, -1), "softcap": 5.0}),
    AttentionCase(
        "softcap and sinks, not causal", (6, 1), (21, 18), sinks=True, options={"causal": False, "softcap": 1.0}
    ),
    AttentionCase("tree", (7, 1, 0), (30, 16, 3), tree=True),
    AttentionCase("tree with a window", (7, 3), (30, 3), tree=True, options={"window_size": (4, -1)}),
    AttentionCase(
        "tree with branches longer than its window", (40, 9), (51, 9), tree=True, options={"window_size": (1, 0)}
    ),
    AttentionCase("tree, softcap and sinks", (7, 3), (30, 3), tree=True, sinks=True, options={"softcap": 1.0}),
    AttentionCase("scale of its own", (3, 1), (21, 18), options={"softmax_scale": 0.5}),
    AttentionCase("offsets past 2**31", (3, 1), (21, 50), far=True),
)


def cases(device: torch.device | str) -> tuple[AttentionCase, ...]:
    """The cases of ``ATTENTION`` that a device can run: all of them on a GPU with 24 GB, the small ones elsewhere.

    Source: chapter 02.
    """
    on = torch.device(device)
    roomy = on.type == "cuda" and torch.cuda.get_device_properties(on).total_memory > 2**34 + 2**32
    return tuple(case for case in ATTENTION if roomy or not case.needs_gpu)
