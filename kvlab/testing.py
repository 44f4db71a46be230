"""What every cache and every kernel of the book must survive, how close is close enough, and proof that tests bite.

``HOSTILE`` is one table of cases: small inputs on which real systems were once wrong. A chapter runs all of it::

    for case in testing.cases(device):
        testing.check_attention(paged.attention, case, device=device, impl="triton")
    for case in testing.CACHES:
        testing.run_cache_case(NaiveCache, case)

``assert_close`` is the one tolerance rule. ``planted`` makes a copy of a function with one mistake in it, and
``assert_caught`` asserts that a check notices.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab import reference
from kvlab import source as sources
from kvlab.batch import Batch
from kvlab.cache import CacheFull, KVCache
from kvlab.config import ModelConfig
from kvlab.sampling import SamplingParams, inverse_cdf, processed_probs

# --- how close is close enough ---------------------------------------------------------------------------------------


def tolerance(dtype: torch.dtype, oracle: Tensor, plain: Tensor | None) -> float:
    """The largest absolute error that a result in ``dtype`` may have.

    Twice the error of a plain PyTorch run in the same precision, plus a rounding allowance of four units in the last
    place of the largest element. Why so: a kernel may round as often as plain code does, but in another order, so no
    fixed number is right for all shapes; twice the plain error is. The allowance is for results that plain code happens
    to hit exactly, and for the final rounding. A wrong mask or a lost rescale is wrong by far more.

    Shapes and units: ``oracle`` (float64) and ``plain`` (the plain run; None counts as exact) have the result's shape.

    Source: chapter 03; FlashAttention's tests.
    """
    scale = max(_largest(oracle), 2.0**-10)
    allowance = 4 * torch.finfo(dtype).eps * scale
    return allowance if plain is None else 2 * _largest(plain.double() - oracle.double()) + allowance


def assert_close(
    out: Tensor, oracle: Tensor, plain: Tensor | None, dtype: torch.dtype | None = None, what: str = "out"
) -> float:
    """Assert that a result is as close to the float64 oracle as ``tolerance`` asks; gives its largest error.

    Shapes and units: all tensors have one shape; ``dtype`` defaults to the result's. Infinities must agree exactly and
    NaN is never right.

    Raises: AssertionError naming the place of the largest error; ValueError where the oracle is not float64 or holds
    NaN, or the plain run has another shape.

    Source: chapter 03.
    """
    if oracle.dtype != torch.float64:
        raise ValueError(f"oracle is {oracle.dtype}; it must be float64")
    if bool(oracle.isnan().any()):
        raise ValueError(f"oracle is NaN in {int(oracle.isnan().sum())} places; it says what is right nowhere there")
    if plain is not None and plain.shape != oracle.shape:
        raise ValueError(f"plain has shape {list(plain.shape)}; it must be the oracle's, {list(oracle.shape)}")
    assert out.shape == oracle.shape, f"{what} has shape {list(out.shape)}; it must be {list(oracle.shape)}"
    if out.numel() == 0:
        return 0.0
    got, want = out.detach().cpu().double(), oracle.cpu()
    nan = got.isnan()
    assert not bool(nan.any()), f"{what} is NaN in {int(nan.sum())} places, first at {nan.nonzero()[0].tolist()}"
    infinite = want.isinf() | got.isinf()
    wrong = infinite & (got != want)
    assert not bool(wrong.any()), (
        f"{what} is {got[wrong][0].item()} at {wrong.nonzero()[0].tolist()}; it must be {want[wrong][0].item():g}"
    )
    error = (got - want).masked_fill(infinite, 0.0).abs()
    bound = tolerance(dtype or out.dtype, want, None if plain is None else plain.detach().cpu())
    worst = float(error.max())
    if worst > bound:
        at = (error == error.max()).nonzero()[0].tolist()
        raise AssertionError(
            f"{what} is off by {worst:.3g} at {at} (allowed {bound:.3g}): {got[tuple(at)].item():g} "
            f"instead of {want[tuple(at)].item():g}"
        )
    return worst


def assert_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None, **options: Any,
) -> float:  # fmt: skip
    """Assert that ``out`` is attention of q over k and v, of one sequence or of many laid end to end; gives its error.

    Shapes and units: out [total_q, H, Dv], q [total_q, H, D], k [total_k, H_kv, D], v [total_k, H_kv, Dv]; ``q_lens``
    and ``kv_lens`` are the sequences' lengths, None for one; ``options`` as ``reference.attend_one`` takes them.

    Raises: AssertionError as ``assert_close``; ValueError for lengths of which there are not as many, or that do not
    add up.

    Source: chapter 03.
    """
    new, cached = list(q_lens or [len(q)]), list(kv_lens or [len(k)])
    for name, rows, each in (("out", out, new), ("q", q, new), ("k", k, cached), ("v", v, cached)):
        if sum(each) != len(rows) or len(each) != len(new):
            raise ValueError(f"{name} has {len(rows)} rows; the lengths are {each}, and there are {len(new)} sequences")
    worst = 0.0
    for i, (got, *qkv) in enumerate(zip(out.split(new), q.split(new), k.split(cached), v.split(cached), strict=True)):
        oracle, plain = (reference.attend_one(*qkv, dtype=dtype, **options)[0] for dtype in (torch.float64, None))
        worst = max(worst, assert_close(got, oracle, plain, what=f"sequence {i} of out"))
    return worst


def _largest(x: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    finite = x.double()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


# --- attention over pages --------------------------------------------------------------------------------------------


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


# --- caches ----------------------------------------------------------------------------------------------------------

Step = tuple[Any, ...]


@dataclass(frozen=True)
class CacheCase:
    """A script of operations that any ``KVCache`` must carry out as a list of tensors would.

    Shapes and units: lengths and sizes in tokens. The steps are written for pages of 4 tokens and mean something to a
    cache without pages too:

        ("append", {seq_id: num_tokens, ...})    one pass over these sequences, in this order; None is a spare row
        ("tree", seq_id, [mask, ...])            one pass whose new tokens form a tree
        ("read", {seq_id: num_tokens, ...})      the same, and each layer attends a second time, without k and v
        ("twice", seq_id)                        prepare a batch that holds the sequence twice
        ("fork", parent, child)   ("truncate", seq_id, length)   ("free", seq_id)   ("keep", seq_id, base, indices)
        ("preempt", seq_id)   ("resume", seq_id)    free it; later compute all of its tokens again in one pass
        ("refuse", step, Error)                  the step raises this and changes nothing

    ``window`` is the model's sliding window in tokens.

    Source: chapter 01.
    """

    name: str
    steps: tuple[Step, ...]
    max_num_seqs: int = 4
    max_seq_len: int = 24
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    window: int | None = None

    @property
    def config(self) -> ModelConfig:
        """The shape of the two-layer model that the cache is made for. Source: chapter 01."""
        return ModelConfig(
            "hostile", num_layers=2, hidden_size=self.num_heads * self.head_dim, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, intermediate_size=16, vocab_size=16,
            max_seq_len=self.max_seq_len, sliding_window=self.window,
        )  # fmt: skip


CACHES: tuple[CacheCase, ...] = (
    CacheCase("lengths 0 and 1", (("append", {0: 0, 1: 1, 2: 3}), ("append", {0: 1, 1: 0, 2: 1}))),
    CacheCase("page edge", (("append", {0: 3, 1: 4, 2: 5}), *[("append", {0: 1, 1: 1, 2: 1})] * 6)),
    CacheCase("chunk that ends in mid-page", (("append", {0: 6}), ("append", {0: 3, 1: 7}), ("append", {1: 2, 0: 6}))),
    CacheCase(
        "order of the batch changes",
        (("append", {2: 5, 0: 2}), ("append", {0: 3, 2: 1}), ("append", {1: 1, 2: 2, 0: 1})),
    ),
    CacheCase(
        "to the last slot",
        (("append", {0: 24, 1: 23}), ("append", {1: 1}), ("truncate", 0, 20), ("append", {0: 4})),
    ),
    CacheCase(
        "spare rows of a captured graph",
        (("append", {0: 3, None: 1}), ("append", {None: 1, 0: 1, 1: 4}), ("append", {1: 1, 0: 2, None: 3})),
    ),
    CacheCase("group 5", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), num_heads=10),
    CacheCase("group 7", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), num_heads=7, num_kv_heads=1),
    CacheCase("head size 80", (("append", {0: 5, 1: 3}), ("append", {0: 2, 1: 1})), head_dim=80),
    CacheCase("window", (("append", {0: 9, 1: 2}), ("append", {0: 1, 1: 5}), ("append", {0: 6})), window=5),
    CacheCase(
        "fork of a half-full block",
        (("append", {0: 6}), ("fork", 0, 1), ("append", {0: 1, 1: 1}), ("append", {1: 3}), ("append", {0: 2, 1: 1})),
    ),
    CacheCase(
        "fork of a full block",
        (("append", {0: 8}), ("fork", 0, 1), ("append", {1: 1, 0: 1}), ("append", {0: 4, 1: 5})),
    ),
    CacheCase(
        "fork of a fork, the parents gone",
        (
            ("append", {0: 6}), ("fork", 0, 1), ("fork", 1, 2), ("append", {1: 1}), ("free", 0),
            ("append", {2: 3, 1: 2}), ("free", 1), ("append", {2: 1, 3: 9}),
        ),
    ),
    CacheCase("fork of an empty sequence", (("append", {0: 0}), ("fork", 0, 1), ("append", {1: 2, 0: 3}))),
    CacheCase(
        "prompt found whole in the cache: its last token again",
        (("append", {0: 8}), ("fork", 0, 1), ("truncate", 1, 7), ("append", {1: 1}), ("append", {0: 1, 1: 1})),
    ),
    CacheCase(
        "rewind over a page",
        (("append", {0: 10, 1: 4}), ("truncate", 0, 3), ("append", {0: 6, 1: 1}), ("truncate", 0, 8),
         ("append", {0: 1})),
    ),
    CacheCase(
        "rewind of a fork leaves its parent",
        (("append", {0: 7}), ("fork", 0, 1), ("append", {1: 4}), ("truncate", 1, 5), ("append", {1: 2}),
         ("append", {0: 1})),
    ),
    CacheCase("rewind to nothing", (("append", {0: 5}), ("truncate", 0, 0), ("append", {0: 2}))),
    CacheCase(
        "preempt and resume",
        (("append", {0: 4, 1: 6}), ("append", {0: 1, 1: 1}), ("preempt", 0), ("append", {1: 1, 2: 9}), ("resume", 0),
         ("append", {0: 1, 1: 1, 2: 1})),
    ),
    CacheCase("an id is used again", (("append", {0: 7}), ("free", 0), ("append", {0: 3, 1: 2}), ("append", {0: 2}))),
    CacheCase(
        "freed pages come back in another order",
        (("append", {0: 9, 1: 9, 2: 5}), ("free", 1), ("free", 0), ("append", {3: 13, 2: 4}),
         ("append", {3: 1, 2: 1, 0: 6})),
    ),
    CacheCase(
        "one path of a tree is kept",
        (("append", {0: 6}), ("tree", 0, [0b1, 0b11, 0b101, 0b1001, 0b10101]), ("keep", 0, 6, [0, 2, 4]),
         ("append", {0: 2})),
    ),
    CacheCase(
        "a path kept behind a fork leaves its parent",
        (("append", {0: 6}), ("fork", 0, 1), ("append", {1: 3}), ("keep", 1, 5, [0, 3]), ("append", {0: 1, 1: 1})),
    ),
    CacheCase("keep in another order", (("append", {0: 9}), ("keep", 0, 2, [6, 0, 3]), ("append", {0: 1}),
                                       ("truncate", 0, 4), ("append", {0: 1}))),
    CacheCase("keep nothing", (("append", {0: 9}), ("keep", 0, 5, []), ("append", {0: 1}))),
    CacheCase(
        "refusals change nothing",
        (
            ("append", {0: 6, 1: 2}), ("refuse", ("truncate", 0, -1), ValueError),
            ("refuse", ("truncate", 0, 7), ValueError), ("refuse", ("fork", 0, 1), ValueError),
            ("refuse", ("fork", 9, 2), ValueError), ("refuse", ("keep", 0, 4, [2]), ValueError),
            ("refuse", ("keep", 0, 4, [0, 0]), ValueError), ("refuse", ("append", {0: 1, 1: 1}, {1: 5}), ValueError),
            ("refuse", ("append", {2: 1}, {2: 3}), ValueError), ("refuse", ("twice", 0), ValueError),
            ("append", {0: 1, 1: 1}), ("truncate", 0, 0),
        ),
    ),
    CacheCase(
        "numbers that are no integers",
        (
            ("append", {0: 6}), ("refuse", ("truncate", 0, 2.5), ValueError),
            ("refuse", ("truncate", 0, float("nan")), ValueError), ("refuse", ("truncate", 0, True), ValueError),
            ("refuse", ("keep", 0, 2.0, [0]), ValueError), ("refuse", ("keep", 0, 2, [0.0]), ValueError),
            ("refuse", ("keep", 0, 2, torch.tensor([1, 1])), ValueError), ("refuse", ("fork", 0, None), ValueError),
            ("refuse", ("fork", 0, 1.5), ValueError), ("truncate", 0, torch.tensor(5)), ("append", {0: 1}),
            ("keep", 0, torch.tensor(2), torch.tensor([3, 1])), ("append", {0: 1}),
        ),
    ),
    CacheCase("read without storing", (("append", {0: 6, 1: 3}), ("read", {1: 2, 0: 1}), ("read", {0: 4}))),
    CacheCase(
        "full",
        (("append", {0: 8, 1: 8}), ("refuse", ("append", {2: 1}), CacheFull), ("truncate", 1, 7), ("append", {1: 1}),
         ("free", 0), ("append", {2: 8})),
        max_num_seqs=2, max_seq_len=8,
    ),
    CacheCase(
        "room for one of two",
        (("append", {0: 8}), ("refuse", ("append", {1: 8, 2: 8}), CacheFull), ("append", {3: 8})),
        max_num_seqs=2, max_seq_len=8,
    ),
    CacheCase(
        "freed twice",
        (("append", {0: 8}), ("free", 0), ("free", 0), ("append", {1: 8, 2: 8}), ("free", 1), ("append", {3: 4}),
         ("truncate", 2, 7)),
        max_num_seqs=2, max_seq_len=8,
    ),
)  # fmt: skip

HOSTILE: tuple[AttentionCase | CacheCase, ...] = (*ATTENTION, *CACHES)


class _Dense:
    """The specification: each sequence is a list of (k, v), one pair [layers, H_kv, D] a token."""

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.preempted: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def stacked(self, seq_id: int, layer: int) -> tuple[Tensor, Tensor]:
        pairs = self.kept[seq_id]
        return torch.stack([k[layer] for k, _ in pairs]), torch.stack([v[layer] for _, v in pairs])


def poison(cache: Any) -> None:
    """Fill every floating-point tensor that a new cache holds with NaN, so that reading an unused slot shows.

    Source: chapter 02.
    """
    for value in vars(cache).values():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))


def run_cache_case(
    make_cache: Callable[..., KVCache],
    case: CacheCase,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> KVCache:
    """Drive a cache through a case beside a list of tensors, comparing every output and length; gives the cache.

    Shapes and units: ``make_cache(config, max_num_seqs, max_seq_len, dtype=..., device=...)`` gives a new cache with
    room for ``max_num_seqs`` sequences of ``max_seq_len`` tokens; ``NaiveCache`` is such a function.

    Raises: AssertionError that names the case and its step.

    Source: chapter 01.
    """
    config, rng = case.config, torch.Generator().manual_seed(0)
    cache = make_cache(config, case.max_num_seqs, case.max_seq_len, dtype=dtype, device=device)
    poison(cache)
    dense = _Dense()
    steps = [*case.steps, ("last",)]
    for number, step in enumerate(steps):
        if step == ("last",):  # one more token a sequence reads everything that is left
            room = {s: 1 for s, kept in dense.kept.items() if len(kept) < case.max_seq_len}
            step = ("append", room)
        where = f"{case.name}, step {number} {step}"
        if step[0] == "refuse":
            try:
                _carry_out(cache, _Dense(), step[1], config, rng, dtype, device, where)
            except step[2]:
                pass
            else:
                raise AssertionError(f"{where}: it must raise {step[2].__name__} and raised nothing")
        else:
            _carry_out(cache, dense, step, config, rng, dtype, device, where)
        for seq_id in {*dense.kept, *dense.preempted, 0, 1, 2, 3}:
            length, wanted = cache.length(seq_id), len(dense.kept.get(seq_id, []))
            assert type(length) is int, f"{where}: length({seq_id}) is of type {type(length).__name__}; it must be int"
            assert length == wanted, f"{where}: length({seq_id}) is {length}; it must be {wanted}"
    return cache


def _carry_out(
    cache: KVCache, dense: _Dense, step: Step, config: ModelConfig, rng: torch.Generator, dtype: torch.dtype,
    device: torch.device | str, where: str,
) -> None:  # fmt: skip
    kind, *args = step
    if kind in ("append", "read"):
        pretended = args[1] if len(args) > 1 else {}
        _forward(cache, dense, args[0], None, pretended, config, rng, dtype, device, where, again=kind == "read")
    elif kind == "twice":
        batch = Batch.build([args[0], args[0] + 1], [[1], [1]], [cache.length(args[0])] * 2, device=device)
        batch.seq_ids = [args[0], args[0]]
        cache.prepare(batch)
    elif kind == "tree":
        _forward(cache, dense, {args[0]: len(args[1])}, args[1], {}, config, rng, dtype, device, where)
    elif kind == "resume":
        _forward(cache, dense, {args[0]: len(dense.preempted[args[0]])}, None, {}, config, rng, dtype, device, where)
    elif kind == "fork":
        cache.fork(args[0], args[1])
        dense.kept[args[1]] = list(dense.kept[args[0]])
    elif kind == "truncate":
        cache.truncate(args[0], args[1])
        del dense.kept[args[0]][args[1] :]
    elif kind == "keep":
        cache.keep(*args)
        seq_id, base, indices = args
        tail = dense.kept[seq_id][base:]
        dense.kept[seq_id][base:] = [tail[i] for i in indices]
    elif kind == "free":
        cache.free(args[0])
        dense.kept.pop(args[0], None)
    elif kind == "preempt":
        cache.free(args[0])
        dense.preempted[args[0]] = dense.kept.pop(args[0])
    else:
        raise ValueError(f"step {step} is none that a case can have")


def _forward(
    cache: KVCache, dense: _Dense, new: Mapping[int | None, int], tree: Sequence[int] | None,
    pretended: Mapping[int, int],
    config: ModelConfig, rng: torch.Generator, dtype: torch.dtype, device: torch.device | str, where: str,
    again: bool = False,
) -> None:  # fmt: skip
    """One pass: prepare, then attend in each layer, held against the dense sequences. ``pretended``: false lengths."""
    if not new:
        return
    past = {s: 0 if s is None else pretended.get(s, cache.length(s)) for s in new}
    batch = Batch.build(
        list(new), [[1] * n for n in new.values()], list(past.values()), device=device,
        tree_mask=None if tree is None else [tree],
    )  # fmt: skip
    cache.prepare(batch)
    for seq_id, count in new.items():
        if seq_id is None:
            continue
        resumed = dense.preempted.pop(seq_id, [])
        kept = dense.kept.setdefault(seq_id, [])
        for i in range(count):
            shape = (config.num_layers, config.num_kv_heads, config.head_dim)
            fresh = (torch.randn(shape, generator=rng), torch.randn(shape, generator=rng))
            kept.append(resumed[i] if resumed else (fresh[0].to(dtype), fresh[1].to(dtype)))
    for layer in range(config.num_layers):
        q = torch.randn(sum(new.values()), config.num_heads, config.head_dim, generator=rng).to(dtype)
        empty = torch.empty(0, config.num_kv_heads, config.head_dim, dtype=dtype)
        spare = torch.full((config.num_layers, *empty.shape[1:]), float("nan"), dtype=dtype)
        parts = [[(spare, spare)] * n if s is None else dense.kept[s][len(dense.kept[s]) - n :] for s, n in new.items()]
        k = torch.stack([p[0][layer] for part in parts for p in part]) if len(q) else empty
        v = torch.stack([p[1][layer] for part in parts for p in part]) if len(q) else empty
        with torch.inference_mode():
            out = cache.attend(layer, q.to(device), k.to(device), v.to(device)).cpu()
            if again:
                out = cache.attend(layer, q.to(device), None, None).cpu()
        assert out.shape == q.shape, f"{where}: attend gave {list(out.shape)}; it must give {list(q.shape)}"
        start = 0
        for seq_id, count in new.items():
            rows = slice(start, start + count)
            start += count
            if seq_id is None:
                assert not bool(out[rows].any()), f"{where}: layer {layer}, the spare row must be 0"
            elif count:
                keys, values = dense.stacked(seq_id, layer)
                mask = None if tree is None else torch.tensor(tree)
                shared: dict[str, Any] = {"window_size": config.window_size(layer), "tree_mask": mask}
                want, _ = reference.attend_one(q[rows], keys, values, **shared)
                plain, _ = reference.attend_one(q[rows], keys, values, dtype=None, **shared)
                assert_close(out[rows], want, plain, dtype, f"{where}: layer {layer}, sequence {seq_id}")


# --- distributions ---------------------------------------------------------------------------------------------------


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """How likely counts at least this far from ``probs`` are, if they were drawn from it: Pearson's test.

    Cells of which fewer than 5 are expected are taken together, as the test's approximation needs. A count where the
    probability is 0 gives 0.

    Shapes and units: counts [cells] of whole numbers, probs [cells] that add up to 1; gives a p-value, 0 to 1.

    Raises: ValueError where the shapes differ, nothing was counted, or the probabilities do not add up to 1.

    Source: chapter 05; Pearson 1900.
    """
    counts, probs = counts.detach().cpu().double().flatten(), probs.detach().cpu().double().flatten()
    if counts.shape != probs.shape or not counts.sum() > 0:
        raise ValueError(f"counts has shape {list(counts.shape)}; it must be that of probs, {list(probs.shape)}, not 0")
    if not bool((probs >= 0).all()) or abs(float(probs.sum()) - 1) > 1e-4:
        raise ValueError(f"probs add up to {float(probs.sum())}; they must be 0 or more and add up to 1")
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    few = expected < 5
    cells = [(counts[~few], expected[~few]), (counts[few].sum()[None], expected[few].sum()[None])]
    seen, wanted = (torch.cat(parts) for parts in zip(*cells, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) < 2:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2))


class MarkovPair:
    """A target and a draft that look at one token only, so that every probability of what they write is known.

    Shapes and units: ``target`` and ``draft`` [vocab, vocab] float32, the processed distributions after each token;
    ``params`` is how both are processed, greedy excluded; ``closeness`` 1 makes the two equal, 0 unrelated.

    Raises: ValueError for greedy params.

    Source: chapter 05.
    """

    def __init__(self, vocab: int, params: SamplingParams, *, closeness: float = 0.5, seed: int = 0) -> None:
        if params.temperature == 0:
            raise ValueError("params are greedy; a distribution to be tested needs a temperature")
        self.rng = torch.Generator().manual_seed(seed)
        logits, other = (2 * torch.randn(vocab, vocab, generator=self.rng) for _ in range(2))
        self.vocab, self.params = vocab, params
        self.target = processed_probs(logits, params)
        self.draft = processed_probs(closeness * logits + (1 - closeness) * other, params)

    def joint(self, length: int, start: int = 0) -> Tensor:
        """The probability of every text of ``length`` tokens after ``start``: [vocab ** length] float64.

        Source: chapter 05.
        """
        probs, last = torch.ones(1, dtype=torch.float64), torch.tensor([start])
        for _ in range(length):
            probs = (probs[:, None] * self.target[last].double()).flatten()
            last = torch.arange(self.vocab).repeat(len(last))
        return probs

    def write(
        self, sampler: Callable[..., Any], count: int, length: int, parents: Sequence[int], *, certain: bool = False,
        start: int = 0,
    ) -> Tensor:  # fmt: skip
        """Write ``count`` texts by speculation, and count how often each comes: [vocab ** length] int64.

        Shapes and units: ``sampler`` has the signature of ``speculative.rejection_sample`` and gives its ``tokens``;
        ``parents`` is the shape of a proposal, as ``speculative.Tree`` has it. Siblings are drawn from the draft
        without replacement; with ``certain`` they are its likeliest tokens instead, and draft_probs is None.

        Raises: AssertionError where the sampler gives a text no token, or one outside the vocabulary.

        Source: chapter 05; Chen et al. 2024 (Sequoia).
        """
        texts = torch.full((count, length + 1), -1)  # the last column takes what is over
        done = torch.zeros(count, dtype=torch.int64)
        last = torch.full((count,), start)
        table = torch.tensor(parents, dtype=torch.int32)
        while len(going := (done < length).nonzero()[:, 0]):
            tokens, given = self._draft(last[going], parents, certain)
            target = self.target[torch.cat([last[going, None], tokens.clamp(min=0)], dim=1)]
            uniforms = [
                torch.rand(len(going), n, generator=self.rng, dtype=torch.float64)
                for n in (len(parents), len(parents) + 1)
            ]
            made = sampler(
                tokens, None if certain else given, target, *uniforms, parents=table.expand(len(going), -1)
            ).tokens
            emitted = (made >= 0).sum(dim=1)
            assert int(emitted.min()) > 0, "a sequence got no token; every step must give one or more"
            assert int(made.max()) < self.vocab, f"token {int(made.max())} came out; the vocabulary has {self.vocab}"
            at = (done[going, None] + torch.arange(made.shape[1])).clamp(max=length)
            texts[going[:, None], at.masked_fill(made < 0, length)] = made
            done[going] += emitted
            last[going] = made.gather(1, emitted[:, None] - 1)[:, 0]
        place = torch.zeros(count, dtype=torch.int64)
        for j in range(length):
            place = place * self.vocab + texts[:, j]
        return torch.bincount(place, minlength=self.vocab**length)

    def _draft(self, last: Tensor, parents: Sequence[int], certain: bool) -> tuple[Tensor, Tensor]:
        """Draft tokens [count, N], -1 where the draft has no more, and what each was drawn from [count, N, vocab]."""
        tokens: list[Tensor] = []
        given: list[Tensor] = []
        left: dict[int, Tensor] = {}  # of each node, and of the root, what its next child is drawn from
        for parent in parents:
            if parent not in left:
                left[parent] = self.draft[last if parent < 0 else tokens[parent].clamp(min=0)]
            q = left[parent]
            there = (q.sum(dim=1) > 0) & (torch.tensor(True) if parent < 0 else tokens[parent] >= 0)
            uniforms = torch.rand(len(q), generator=self.rng, dtype=torch.float64)
            token = q.argmax(dim=1) if certain else inverse_cdf(q, uniforms)
            given.append(q)
            tokens.append(token.where(there, -1))
            rest = q.scatter(1, token[:, None], 0.0)
            left[parent] = rest / rest.sum(dim=1, keepdim=True).clamp(min=1e-30)
        return torch.stack(tokens, dim=1), torch.stack(given, dim=1)


# --- planted bugs ----------------------------------------------------------------------------------------------------

Replacement = tuple[str, str] | Sequence[tuple[str, str]]

_planted_files: tempfile.TemporaryDirectory[str] | None = None
_planted_count = itertools.count()


def planted(fn: Any, replace: Replacement, *, give: str | None = None) -> Any:
    """A copy of a function, kernel or method with text of its source replaced: the same code with one mistake in it.

    The copy of the whole module lies in a file of its own, so that Triton can read it, and everything in that module
    that calls the function calls the changed one. A function defined in a notebook is copied alone.

    Shapes and units: ``fn`` as ``kvlab.show`` takes it, or the text of a module; ``replace`` is (old, new) or a list of
    such pairs, each old text standing exactly once in the function's source; ``give`` names what to return from the
    changed module (default: the function itself), such as the public function around a kernel.

    Raises: ValueError where an old text does not stand exactly once, or changes nothing, or ``give`` is not there.

    Source: chapter 02.
    """
    single = isinstance(replace, tuple) and len(replace) == 2 and isinstance(replace[0], str)
    pairs: list[Any] = [replace] if single else list(replace)
    if not pairs:
        raise ValueError("replace is empty; a planted bug needs at least one (old, new) pair")
    seeded: dict[str, Any] = {}
    if isinstance(fn, str):
        if give is None:
            raise ValueError("give is None; for the text of a module it must name what to return")
        changed, name, path = _replaced(fn, pairs, "the module's text"), give, Path("text.py")
    else:
        inner = sources.unwrap(fn)
        name = give or inner.__qualname__.split(".")[0]
        try:
            lines, first = inspect.getsourcelines(inner)
        except (OSError, TypeError):
            raise ValueError(
                f"source not available for {inner.__qualname__}; define it in a file or a notebook"
            ) from None
        span = "".join(lines)
        new = _replaced(span, pairs, f"the source of {inner.__qualname__}")
        path = Path(inspect.getsourcefile(inner) or "")
        if path.exists() and not path.name.startswith("ipykernel_"):
            whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
            start = max(first - 1, 0)
            changed = "".join([*whole[:start], new, *whole[start + len(lines) :]])
        else:
            changed, seeded, path = textwrap.dedent(new), dict(inner.__globals__), Path("cell.py")
    module = _module(changed, path.stem, seeded)
    if not hasattr(module, name):
        raise ValueError(f"the changed module has no {name!r}; give must name one of its functions or classes")
    return getattr(module, name)


def assert_caught(check: Callable[[Any], Any], fn: Any, bugs: Mapping[str, Any], *, give: str | None = None) -> None:
    """Assert that a check passes on the original and fails, by an AssertionError, on each planted bug.

    Shapes and units: ``check`` takes the function under test; ``bugs`` maps a bug's name to its ``replace`` (see
    ``planted``), or to a variant made already; ``give`` as in ``planted``.

    Raises: AssertionError naming the bugs that go unnoticed; ValueError as ``planted``, or where there are no bugs.

    Source: chapter 02.
    """
    if not bugs:
        raise ValueError("bugs is empty; name at least one")
    original = fn
    if give is not None and not isinstance(fn, str):
        original = getattr(sys.modules[sources.unwrap(fn).__module__], give)
    elif not isinstance(fn, str) and "." in sources.unwrap(fn).__qualname__:
        inner = sources.unwrap(fn)
        original = getattr(sys.modules[inner.__module__], inner.__qualname__.split(".")[0])
    elif isinstance(fn, str):
        original = getattr(_module(fn, "text", {}), give or "")
    check(original)
    unnoticed = []
    for name, bug in bugs.items():
        variant = planted(fn, bug, give=give) if isinstance(bug, tuple | list) else bug
        try:
            check(variant)
        except AssertionError:
            continue
        unnoticed.append(name)
    assert not unnoticed, f"planted bugs that the check does not notice: {', '.join(unnoticed)}"


def _replaced(text: str, pairs: Iterable[tuple[str, str]], what: str) -> str:
    for old, new in pairs:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {what}; it must stand exactly once")
        if old == new:
            raise ValueError(f"replacing {old!r} by itself changes nothing")
        text = text.replace(old, new)
    return text


def _module(text: str, stem: str, seeded: dict[str, Any]) -> types.ModuleType:
    global _planted_files
    if _planted_files is None:
        _planted_files = tempfile.TemporaryDirectory(prefix="kvlab-planted-")
    name = f"kvlab_planted_{stem}_{next(_planted_count)}"
    file = Path(_planted_files.name) / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update({k: v for k, v in seeded.items() if not (k.startswith("__") and k.endswith("__"))})
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
