"""Chapter 02's parts: the block pool's books, what pages waste, the copy into pages and attention over them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab import paged, reference
from kvlab.bench import Record, Session, measure, rotations
from kvlab.bench._session import device_name
from kvlab.paged import BlockManager, BlockPool

Shape = dict[str, int | float | str]


def run(session: Session) -> Iterator[Record]:
    """Books on the host, then kernels on the device.

    Shapes and units:
        cache.pool      ns a block to allocate and free, in a pool of ``blocks``, ``per_call`` blocks at a time
        cache.waste     tokens of empty slots a sequence, over ``sequences`` of log-normal length, by block size P
        cache.write     GB/s read and written by ``reshape_and_cache`` for T tokens
        cache.decode    ms of a decode's attention, B sequences of L tokens, by block size P

    Source: chapter 02.
    """
    for record in (*_pools(session), *_waste(session)):  # the host's work, whatever the session's device
        yield replace(record, device=device_name(torch.device("cpu")), driver=None)
    yield from _writes(session)
    yield from _decodes(session)


class PlainBlock:
    """A block as an object, for the comparison. Source: chapter 02."""

    def __init__(self, number: int) -> None:
        self.number, self.ref_count = number, 0


class PlainPool:
    """The straightforward manager: block objects in a list when free and in a dict when used.

    Shapes and units: as ``BlockPool``.

    Raises: RuntimeError where no block is free.

    Source: chapter 02.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = [PlainBlock(i) for i in range(num_blocks)]
        self.used: dict[int, PlainBlock] = {}

    def allocate_one(self) -> PlainBlock:
        """Take a free block. Raises: RuntimeError.  Source: chapter 02."""
        if not self.free_blocks:
            raise RuntimeError("no block is free")
        block = self.free_blocks.pop()
        block.ref_count = 1
        self.used[block.number] = block
        return block

    def free_one(self, block: PlainBlock) -> None:
        """Give a block back. Raises: RuntimeError for a free one.  Source: chapter 02."""
        if block.number not in self.used:
            raise RuntimeError(f"block {block.number} is free already")
        block.ref_count -= 1
        if block.ref_count == 0:
            del self.used[block.number]
            self.free_blocks.append(block)

    def allocate(self, count: int) -> list[PlainBlock]:
        """Take ``count`` blocks, one by one. Raises: RuntimeError.  Source: chapter 02."""
        return [self.allocate_one() for _ in range(count)]

    def free(self, blocks: list[PlainBlock]) -> None:
        """Give blocks back, the last first. Raises: RuntimeError for a free one.  Source: chapter 02."""
        for block in reversed(blocks):
            self.free_one(block)


def churn(pool: Any, num_blocks: int, per_call: int, calls: int, seed: int = 0) -> float:
    """Nanoseconds a block to free one random holding and allocate another, in a pool nine tenths full.

    Shapes and units: ``per_call`` blocks a holding, ``calls`` of each kind. The random choices are made beforehand.

    Source: chapter 02.
    """
    held = [pool.allocate(per_call) for _ in range(num_blocks * 9 // 10 // per_call)]
    rng = random.Random(seed)
    picks = [rng.randrange(len(held)) for _ in range(calls)]
    for i in picks:  # once without the clock: the free list is then as mixed as it will be
        pool.free(held[i])
        held[i] = pool.allocate(per_call)
    start = time.perf_counter_ns()
    for i in picks:
        pool.free(held[i])
        held[i] = pool.allocate(per_call)
    return (time.perf_counter_ns() - start) / (calls * per_call)


def _pools(session: Session) -> Iterator[Record]:
    sizes = [1000] if session.quick else [1000, 10_000, 100_000, 1_000_000]
    calls, repeats = (50, 1) if session.quick else (4000, 7)
    for per_call in (1, 16):
        for size in sizes:
            ways: dict[str, Callable[[], Any]] = {
                "BlockPool": lambda size=size: BlockPool(size, 16),  # type: ignore[misc]
                "dict and list of block objects": lambda size=size: PlainPool(size),  # type: ignore[misc]
            }
            for impl, make in ways.items():
                value = min(churn(make(), size, per_call, calls, seed) for seed in range(repeats))
                shape: Shape = {"blocks": size, "per_call": per_call}
                yield session.record("cache.pool", impl, value, "ns", shape=shape, dtype="none", ms=value / 1e6)


def _waste(session: Session) -> Iterator[Record]:
    count = 200 if session.quick else 100_000
    rng = random.Random(0)
    lengths = [max(1, int(rng.lognormvariate(6.0, 1.0))) for _ in range(count)]
    for size in (1, 8, 16, 32, 64, 128, 256):
        manager = BlockManager(BlockPool(sum(-(-n // size) for n in lengths), size))
        for seq_id, length in enumerate(lengths):
            manager.ensure(seq_id, length)
            manager.advance(seq_id, length)
        slots = sum(len(manager.table(s)) for s in manager.seq_ids) * size
        shape: Shape = {"P": size, "sequences": count, "tokens": sum(lengths)}
        yield session.record(
            "cache.waste", "BlockManager", (slots - sum(lengths)) / count, "tokens", shape=shape, dtype="none"
        )


def _writes(session: Session) -> Iterator[Record]:
    heads, size, block_size = (2, 16, 16) if session.quick else (8, 128, 16)
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    for tokens in [64] if session.quick or not session.on_gpu else [1, 32, 512, 8192, 65536]:
        nbytes = 2 * tokens * heads * size * dtype.itemsize
        copies = min(64, rotations(2 * nbytes, session.device)) if session.on_gpu else 2
        blocks = -(-tokens // block_size) + 1
        new = [torch.randn(2, tokens, heads, size, device=session.device, dtype=dtype) for _ in range(copies)]
        pools = [
            torch.zeros(2, blocks, block_size, heads, size, device=session.device, dtype=dtype) for _ in range(copies)
        ]
        order = torch.randperm(blocks * block_size, device=session.device)[:tokens]
        for kind, slots in (("pages", torch.arange(tokens, device=session.device)), ("shuffled", order)):

            def write(i: int, slots: Tensor = slots, new: list = new, pools: list = pools) -> None:
                at = i % len(new)
                (k, v), (k_cache, v_cache) = new[at], pools[at]
                paged.reshape_and_cache(k, v, k_cache, v_cache, slots)

            write(0)
            assert torch.equal(pools[0][0].flatten(0, 1)[slots], new[0][0])
            timing = measure(
                write, device=session.device, seconds=session.seconds(0.2), graph=copies if session.on_gpu else 0
            )
            shape: Shape = {"T": tokens, "H_kv": heads, "D": size, "P": block_size, "slots": kind}
            yield session.record(
                "cache.write", "reshape_and_cache", 2 * nbytes / timing.seconds / 1e9, "GB/s", shape=shape, dtype=dtype,
                timing=timing, error=0.0,
            )  # fmt: skip
        del new, pools


def _decodes(session: Session) -> Iterator[Record]:
    batch, context, heads, kv_heads, size = (
        (2, 20, 4, 2, 16) if session.quick or not session.on_gpu else (32, 8192, 32, 8, 128)
    )
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    torch.manual_seed(0)
    for block_size in [4, 16] if session.quick or not session.on_gpu else [1, 8, 16, 32, 64, 128, 256]:
        per_seq = -(-context // block_size)
        k, v = torch.randn(2, batch * per_seq, block_size, kv_heads, size, device=session.device, dtype=dtype)
        table = torch.randperm(batch * per_seq, device=session.device).to(torch.int32).view(batch, per_seq)
        used = torch.full((batch,), context, dtype=torch.int32, device=session.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=session.device)
        q = torch.randn(batch, heads, size, device=session.device, dtype=dtype)
        common = {"block_table": table, "cu_seqlens_q": starts, "seqused_k": used, "max_seqlen_q": 1}
        truth = reference.attention(
            q[:1], k, v, block_table=table[:1], cu_seqlens_q=starts[:2], seqused_k=used[:1]
        )  # fmt: skip
        assert isinstance(truth, Tensor)
        scale = float(truth.abs().max())

        def kernel(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, common: dict = common) -> Tensor:
            out = paged.attention(q, k, v, **common)
            assert isinstance(out, Tensor)
            return out

        def gathered(
            _: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, table: Tensor = table, used: Tensor = used
        ) -> Tensor:
            keys, values = (paged.gather(x, table, used, context).transpose(1, 2) for x in (k, v))
            group = heads // kv_heads  # a group's heads as query rows: the form in which SDPA reads keys once
            return functional.scaled_dot_product_attention(q.view(batch, kv_heads, group, size), keys, values).view_as(
                q
            )

        ways: dict[str, tuple[Callable[[int], Tensor], SDPBackend | None]] = {"paged.attention": (kernel, None)}
        if session.on_gpu:
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                ways[f"gather + SDPA {backend.name.split('_')[0].lower()}"] = gathered, backend
        else:
            ways["gather + SDPA"] = gathered, None
        for impl, (way, which) in ways.items():
            try:
                with torch.inference_mode(), sdpa_kernel([which] if which else list(_ANY)):
                    error = float((way(0)[:1].double() - truth).abs().max()) / scale
                    timing = measure(way, device=session.device, seconds=session.seconds(0.15), flush=session.on_gpu)
            except RuntimeError as problem:
                session.note(f"  {impl}: skipped, {str(problem).splitlines()[0][:120]}")
                continue
            shape: Shape = {"B": batch, "L": context, "H": heads, "H_kv": kv_heads, "D": size, "P": block_size}
            yield session.record(
                "cache.decode", impl, timing.ms, "ms", shape=shape, dtype=dtype, timing=timing, error=error
            )


_ANY = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
)  # fmt: skip
