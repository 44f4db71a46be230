"""Chapters 03 and 03b: attention over whole prompts, dense, ragged and from pages, raced against other libraries.

All implementations of one shape take turns in one race (``kvlab.bench.race``), because the clock of a loaded GPU falls.
Each is first compared with float64 on blocks of rows; one that is wrong or raises is left out and named on stderr.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab import flash, reference, runtime
from kvlab.bench import Record, Session, measure, rotations
from kvlab.bench._entrants import Entrant
from kvlab.bench._entrants import admit as _admit
from kvlab.bench._entrants import compete as _race
from kvlab.bench._peers import Call, Peer, find, first_line

Shape = dict[str, int | float | str]
BASELINE = "FlashAttention-3"


def run(session: Session) -> Iterator[Record]:
    """Every part, one after the other.

    Shapes and units: FLOPs are 4·H·D for each pair of a query and a key it sees, counted exactly: L (L + 1) / 2 pairs a
    causal sequence, the diagonal included. ``causal`` is 1 or 0; ``P`` is the page size in tokens.
        prefill.dense            TFLOP/s of B sequences of L tokens; "materialised (torch)" ran by itself
        prefill.ragged           TFLOP/s of sequences of log-normal length laid end to end
        prefill.paged            TFLOP/s from pages, beside "..., dense" on the same sequence laid out densely
        prefill.paged_vs_gather  ms of the last q_len tokens of L, "through the table" and "gather then dense", and
                                 what ``bytes`` and ``flops`` of the shape predict at this run's ceilings
        prefill.ceiling          GB/s of a copy (read and written) and TFLOP/s of a matrix product
        prefill.materialised     GB/s of each step over one head's L x L scores; flash attention beside them
        prefill.memory           MB a call allocates at its peak beyond inputs and output (GPU only)

    Source: chapters 03 and 03b; FlashAttention's benchmarks.
    """
    for part in PARTS.values():
        yield from part(session)


# --- what is compared ------------------------------------------------------------------------------------------------


def own(session: Session) -> list[Peer]:
    """kvlab's implementations that can run here: the reference on a CPU, and interpreted Triton in a quick run.

    Source: chapter 03.
    """
    if session.on_gpu:
        names = ["hopper", "triton"]
    else:
        names = ["torch", "triton"] if session.quick and runtime.can_launch(session.device) else ["torch"]
    return [_own(name) for name in names]


def _own(impl: str) -> Peer:
    def only(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        return Call(lambda: only(flash.flash_attn_func(q, k, v, causal=causal, impl=impl)))

    def ragged(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Call:
        lengths = (starts, starts, longest, longest)
        return Call(lambda: only(flash.flash_attn_varlen_func(q, k, v, *lengths, causal=True, impl=impl)))

    def from_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Call:
        batch, length = q.shape[:2]
        rows, room = q.flatten(0, 1), table.shape[1] * k.shape[1]
        starts = length * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        return Call(
            lambda: only(
                flash.attention(
                    rows, k, v, block_table=table, cu_seqlens_q=starts, seqused_k=used, max_seqlen_q=length,
                    max_seqlen_k=room, impl=impl,
                )
            ).view(q.shape)
        )  # fmt: skip

    return Peer(f"kvlab {impl}", None, dense, ragged, from_pages)


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention as the formula reads: all scores are written to memory, and their softmax too.

    Shapes and units: q [B, L, H, D], k and v [B, L, H_kv, D]; gives [B, L, H, D].

    Source: chapter 03.
    """
    length, heads, size = q.shape[1:]
    group = heads // k.shape[2]
    rows = (q * size**-0.5).unflatten(2, (k.shape[2], group)).permute(0, 2, 3, 1, 4)  # [B, H_kv, G, L, D]
    keys, values = (x.permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))  # [B, H_kv, 1, L, D]
    scores = rows @ keys.transpose(3, 4)
    if causal:
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return (scores.softmax(-1) @ values).permute(0, 3, 1, 2, 4).reshape(q.shape)


class Expected:
    """Blocks of rows of the right output in float64, to hold an implementation's output against.

    Shapes and units: qkv are q [T, H, D], k and v [T_k, H_kv, D], sequences end to end from ``q_starts`` and
    ``k_starts``. Kept are, of the first, last, longest and shortest sequence, ``blocks`` blocks of ``rows`` query rows
    evenly spaced from the first row to the last.

    Source: chapter 03.
    """

    def __init__(
        self, qkv: Sequence[Tensor], q_starts: Sequence[int], k_starts: Sequence[int], causal: bool, rows: int = 16,
        blocks: int = 9,
    ) -> None:  # fmt: skip
        q, k, v = qkv
        lengths = [stop - start for start, stop in itertools.pairwise(q_starts)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.blocks: list[tuple[int, Tensor]] = []
        for s in sorted({0, len(lengths) - 1, order[0], order[-1]}):
            q_len, k_len = lengths[s], k_starts[s + 1] - k_starts[s]
            count = min(rows, q_len)
            for first in sorted({i * (q_len - count) // (blocks - 1) for i in range(blocks)}):
                seen = k_len - q_len + first + count if causal else k_len
                at, keys = q_starts[s] + first, slice(k_starts[s], k_starts[s] + seen)
                self.blocks.append((at, reference.attend_one(q[at : at + count], k[keys], v[keys], causal=causal)[0]))

    def error(self, out: Tensor) -> float:
        """The largest relative error of a block; infinite where any element of out [..., H, D] is not finite.

        Source: chapter 03.
        """
        if not bool(out.isfinite().all()):
            return float("inf")
        flat = out.reshape(-1, *out.shape[-2:])
        return max(float((flat[at : at + len(rows)].double() - rows).norm() / rows.norm()) for at, rows in self.blocks)


def _rates(
    session: Session, bench: str, entrants: Sequence[Entrant], flops: int, shape: Shape, dtype: torch.dtype
) -> Iterator[Record]:
    for name, (entrant, timing) in _race(session, entrants).items():
        yield session.record(
            bench, name, flops / timing.seconds / 1e12, "TFLOP/s", shape=dict(shape), dtype=dtype, timing=timing,
            error=entrant.error, version=entrant.version,
        )  # fmt: skip


@functools.cache
def _peers(session: Session) -> list[Peer]:
    return find(session.device, session.note) if session.peers else []


def _random(session: Session, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    return torch.randn(shape, device=session.device, dtype=dtype)


def _clear(session: Session) -> None:
    if session.on_gpu:
        torch.cuda.empty_cache()


def _room(session: Session) -> float:
    """Bytes that can still be allocated; none counts as too many on a CPU."""
    return torch.cuda.mem_get_info(session.device)[0] if session.on_gpu else float("inf")


# --- dense and ragged ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """B sequences of L tokens: one shape of prefill.dense. Source: chapter 03."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    causal: bool = True

    @property
    def flops(self) -> int:
        """Operations, by the pairs of a query and a key it sees. Source: chapter 03."""
        return self.batch * _flops(self.length, self.heads, self.size, self.causal)

    @property
    def shape(self) -> Shape:
        """The shape of its records. Source: chapter 03."""
        return {
            "B": self.batch, "L": self.length, "H": self.heads, "H_kv": self.kv_heads, "D": self.size,
            "causal": int(self.causal),
        }  # fmt: skip


def _flops(length: int, heads: int, size: int, causal: bool = True) -> int:
    return 4 * heads * size * (length * (length + 1) // 2 if causal else length**2)


def _works(session: Session) -> list[Work]:
    if session.quick:
        return [Work(2, 24, 2, 1, 16), Work(1, 24, 4, 2, 16, causal=False)]
    if not session.on_gpu:
        return [Work(1, 512, 8, 2, 64), Work(1, 512, 8, 2, 64, causal=False)]
    causal = [Work(16, 1024), Work(4, 4096), Work(2, 8192), Work(1, 16384), Work(1, 32768)]
    return [*causal, Work(1, 16384, causal=False), Work(2, 8192, size=64), Work(2, 8192, size=256)]


def _dense(session: Session) -> Iterator[Record]:
    for work in _works(session):
        session.note(f"prefill.dense {work.shape}")
        yield from _dense_one(session, work)
        _clear(session)


def _dense_one(session: Session, work: Work) -> Iterator[Record]:
    q, k, v = _inputs(session, work)
    starts = range(0, (work.batch + 1) * work.length, work.length)
    expected = Expected(_rows(q, k, v), starts, starts, work.causal)
    entrants = []
    for peer in [*own(session), *_peers(session)]:
        if peer.dense is not None and (peer.sizes is None or work.size in peer.sizes):
            entrants += _admit(session, peer, functools.partial(peer.dense, q, k, v, work.causal), expected, q)
    for name in (e.name.removeprefix("kvlab ") for e in entrants if e.name.startswith("kvlab ")):
        session.note(f"  {flash.explain(q, k, v, causal=work.causal, impl=name)}")
    yield from _rates(session, "prefill.dense", entrants, work.flops, work.shape, q.dtype)
    entrants.clear()
    _clear(session)
    plain = Peer("materialised (torch)", torch.__version__)
    if 5 * work.batch * work.heads * work.length**2 < _room(session):  # scores and weights, two bytes each
        call = Call(functools.partial(materialised, q, k, v, work.causal))
        alone = _admit(session, plain, lambda: call, expected, q)
        yield from _rates(session, "prefill.dense", alone, work.flops, work.shape, q.dtype)
    else:
        session.note(f"  {plain.name}: skipped, its scores do not fit")


def _inputs(session: Session, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = _random(session, work.batch, work.length, work.heads, work.size)
    k, v = (_random(session, work.batch, work.length, work.kv_heads, work.size) for _ in range(2))
    return q, k, v


def _rows(*tensors: Tensor) -> list[Tensor]:
    """[B, L, H, D] as [B · L, H, D]."""
    return [x.flatten(0, 1) for x in tensors]


def lengths(count: int, total: int, seed: int = 0) -> list[int]:
    """``count`` log-normal lengths (the standard deviation of the logarithm is 1) of ``total`` tokens in all.

    Raises: ValueError where there are fewer tokens than sequences.  Source: chapter 03.
    """
    if not 1 <= count <= total:
        raise ValueError(f"count is {count} and total {total}; each sequence needs a token")
    rng = random.Random(seed)
    drawn = [rng.lognormvariate(0.0, 1.0) for _ in range(count)]
    found = [1 + int(x / sum(drawn) * (total - count)) for x in drawn]
    found[found.index(max(found))] += total - sum(found)
    return found


def _ragged(session: Session) -> Iterator[Record]:
    count, total, heads, kv_heads, size = (64, 32768, 32, 8, 128) if session.on_gpu else (8, 1024, 8, 2, 64)
    if session.quick:
        count, total, heads, kv_heads, size = 4, 60, 2, 1, 16
    each = lengths(count, total)
    session.note(f"prefill.ragged {count} sequences, {total} tokens")
    torch.manual_seed(0)
    q = _random(session, total, heads, size)
    k, v = (_random(session, total, kv_heads, size) for _ in range(2))
    starts = torch.tensor([0, *each], device=session.device).cumsum(0).to(torch.int32)
    places = starts.tolist()
    expected = Expected((q, k, v), places, places, causal=True)
    entrants = []
    for peer in [*own(session), *_peers(session)]:
        if peer.ragged is not None and (peer.sizes is None or size in peer.sizes):
            entrants += _admit(session, peer, functools.partial(peer.ragged, q, k, v, starts, max(each)), expected, q)
    flops = sum(_flops(length, heads, size) for length in each)
    shape: Shape = {
        "sequences": count, "tokens": total, "longest": max(each), "H": heads, "H_kv": kv_heads, "D": size,
    }  # fmt: skip
    yield from _rates(session, "prefill.ragged", entrants, flops, shape, q.dtype)


# --- pages -----------------------------------------------------------------------------------------------------------


def into_pages(k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in shuffled pages: k_cache, v_cache [N, P, H_kv, D] and table [B, blocks] int32.

    Shapes and units: k, v [B, L, H_kv, D], L a multiple of ``block_size`` (tokens). Pages in no table hold NaN.

    Raises: ValueError where L is none.

    Source: chapter 02.
    """
    batch, length = k.shape[:2]
    if block_size < 1 or length % block_size:
        raise ValueError(f"k has {length} tokens; it must be a multiple of block_size {block_size}")
    used = batch * length // block_size
    order = torch.randperm(used + 3, device=k.device)[:used]
    caches = []
    for x in (k, v):
        cache = torch.full((used + 3, block_size, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
        cache[order] = x.reshape(used, block_size, *x.shape[2:])
        caches.append(cache)
    return caches[0], caches[1], order.to(torch.int32).view(batch, -1)


def _paged(session: Session) -> Iterator[Record]:
    work = Work(1, 16384) if session.on_gpu else Work(1, 512, 8, 2, 64)
    if session.quick:
        work = Work(1, 32, 2, 1, 16)
    for block_size in (4,) if session.quick else (16, 64):
        session.note(f"prefill.paged {work.shape}, pages of {block_size}")
        yield from _paged_one(session, work, block_size)
        _clear(session)


def _paged_one(session: Session, work: Work, block_size: int) -> Iterator[Record]:
    q, k, v = _inputs(session, work)
    k_cache, v_cache, table = into_pages(k, v, block_size)
    used = torch.full((work.batch,), work.length, dtype=torch.int32, device=session.device)
    starts = (0, work.length)
    expected = Expected(_rows(q, k, v), starts, starts, causal=True)
    entrants = []
    for peer in [*own(session), *_peers(session)]:
        if peer.paged is not None and (peer.sizes is None or work.size in peer.sizes):
            prepare = functools.partial(peer.paged, q, k_cache, v_cache, table, used)
            entrants += _admit(session, peer, prepare, expected, q)
        if peer.dense is not None and peer.name.startswith(("kvlab", BASELINE)):
            entrants += _admit(session, peer, functools.partial(peer.dense, q, k, v, True), expected, q, ", dense")
    yield from _rates(session, "prefill.paged", entrants, work.flops, {**work.shape, "P": block_size}, q.dtype)


def _ceilings(session: Session) -> Iterator[Record]:
    """What a copy and a matrix product reach on this machine, in this run."""
    source = _random(session, (1 << 30) if session.on_gpu else (1 << 16) if session.quick else (1 << 24))
    target, n = torch.empty_like(source), 8192 if session.on_gpu else 64 if session.quick else 1024
    a, b = _random(session, n, n), _random(session, n, n)
    works: list[tuple[str, Callable[[int], object], float, str, Shape]] = [
        ("copy", lambda i: target.copy_(source), 2 * source.nbytes / 1e9, "GB/s", {"bytes": 2 * source.nbytes}),
        ("matmul", lambda i: a @ b, 2 * n**3 / 1e12, "TFLOP/s", {"M": n, "N": n, "K": n}),
    ]
    for name, fn, amount, unit, shape in works:
        timing = measure(fn, device=session.device, seconds=session.seconds(0.2), min_count=3)
        yield session.record(
            "prefill.ceiling", name, amount / timing.seconds, unit, shape=shape, dtype=a.dtype, timing=timing,
            version=torch.__version__,
        )  # fmt: skip


THROUGH, GATHER = ", through the table", ", gather then dense"


def _paged_vs_gather(session: Session) -> Iterator[Record]:
    copy, matmul = ceilings = list(_ceilings(session))
    yield from ceilings
    _clear(session)
    work, block_size, batches, q_lens = Work(1, 16384), 16, [1, 16], [4**e for e in range(8)]
    if session.quick:
        work, block_size, batches, q_lens = Work(1, 32, 2, 1, 16), 4, [2], [1, 32]
    elif not session.on_gpu:
        work, batches, q_lens = Work(1, 1024, 8, 2, 64), [1], [1, 16, 256, 1024]
    for batch in batches:
        for q_len in q_lens:
            session.note(f"prefill.paged_vs_gather B={batch} q_len={q_len}")
            context = replace(work, batch=batch)
            yield from _vs_gather_one(session, context, q_len, block_size, copy.value, matmul.value)
            _clear(session)


def _vs_gather_one(
    session: Session, work: Work, q_len: int, block_size: int, copy: float, matmul: float
) -> Iterator[Record]:
    """The last q_len tokens of each sequence, both ways; ``copy`` in GB/s and ``matmul`` in TFLOP/s."""
    q, k, v = _inputs(session, work)
    q = q[:, -q_len:].contiguous()
    k_cache, v_cache, table = into_pages(k, v, block_size)
    kv_bytes = k.nbytes + v.nbytes
    copies = min(8, rotations(kv_bytes, session.device)) if session.on_gpu else 2
    pools = [(k_cache, v_cache), *((k_cache.clone(), v_cache.clone()) for _ in range(copies - 1))]
    used = torch.full((work.batch,), work.length, dtype=torch.int32, device=session.device)
    q_starts, k_starts = (range(0, (work.batch + 1) * n, n) for n in (q_len, work.length))
    expected = Expected(_rows(q, k, v), q_starts, k_starts, causal=True)
    entrants = []
    for peer in own(session):
        for suffix, way in ((THROUGH, _through), (GATHER, _gathered)):
            ways = [way(peer, q, *pool, table, used) for pool in pools]
            for entrant in _admit(session, peer, functools.partial(Call, ways[0]), expected, q, suffix):
                entrants.append(entrant._replace(fn=_rotating(ways)))
    pairs = work.batch * (q_len * (work.length - q_len) + q_len * (q_len + 1) // 2)
    flops, once = 4 * work.heads * work.size * pairs, kv_bytes + 2 * q.nbytes
    needed = {THROUGH: once, GATHER: once + 2 * kv_bytes}
    shape: Shape = {
        "B": work.batch, "q_len": q_len, "L": work.length, "H": work.heads, "H_kv": work.kv_heads, "D": work.size,
        "P": block_size, "flops": flops,
    }  # fmt: skip
    graph = copies if session.on_gpu and work.batch * q_len <= 16384 else 0  # larger work hides its launches
    for name, (entrant, timing) in _race(session, entrants, seconds=0.12, graph=graph).items():
        yield session.record(
            "prefill.paged_vs_gather", name, timing.ms, "ms", shape={**shape, "bytes": needed[name[name.index(",") :]]},
            dtype=q.dtype, timing=timing, error=entrant.error,
        )  # fmt: skip
    attend = max(once / (1e9 * copy), flops / (1e12 * matmul))
    for suffix, more in ((THROUGH, 0), (GATHER, 2 * kv_bytes)):
        yield session.record(
            "prefill.paged_vs_gather", "predicted" + suffix, 1e3 * (attend + more / (1e9 * copy)), "ms",
            shape={**shape, "bytes": needed[suffix]}, dtype=q.dtype,
        )  # fmt: skip


def _through(peer: Peer, q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Callable[[], Tensor]:
    assert peer.paged is not None
    return peer.paged(q, k, v, table, used).run


def _gathered(peer: Peer, q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Callable[[], Tensor]:
    """The cheapest gather there is, one pass over whole pages, then the same kernel on dense keys and values."""
    pages, dense = table.flatten(), peer.dense
    assert dense is not None

    def run() -> Tensor:
        keys, values = (x.index_select(0, pages).view(q.shape[0], -1, *x.shape[2:]) for x in (k, v))
        return dense(q, keys, values, True).run()

    return run


def _rotating(ways: list[Callable[[], Tensor]]) -> Callable[[int], Tensor]:
    return lambda i: ways[i % len(ways)]()


# --- what materialising costs ----------------------------------------------------------------------------------------


def _materialised(session: Session) -> Iterator[Record]:
    work = Work(1, 32768, 1, 1, 128, causal=False) if session.on_gpu else Work(1, 1024, 1, 1, 64, causal=False)
    if session.quick:
        work = Work(1, 64, 1, 1, 16, causal=False)
    session.note(f"prefill.materialised, one head, L={work.length}")
    q, k, v = _inputs(session, work)
    rows, keys, values = ((q * work.size**-0.5)[0, :, 0], k[0, :, 0], v[0, :, 0])
    scores = torch.empty(work.length, work.length, dtype=q.dtype, device=q.device)
    weights, out = torch.empty_like(scores), torch.empty_like(rows)
    square, line = scores.nbytes, rows.nbytes
    steps: list[tuple[str, Callable[[int], Tensor], int]] = [  # with the bytes that each has to move
        ("scores", lambda i: torch.mm(rows, keys.T, out=scores), square + 2 * line),
        ("softmax", lambda i: torch.softmax(scores, -1, out=weights), 2 * square),
        ("weights times V", lambda i: torch.mm(weights, values, out=out), square + 2 * line),
    ]

    def together(i: int) -> Tensor:
        for _, step, _ in steps:
            last = step(i)
        return last

    starts = (0, work.length)
    expected = Expected(_rows(q, k, v), starts, starts, causal=False)
    entrants = _admit(
        session, Peer("all three", torch.__version__), lambda: Call(lambda: together(0).view(q.shape)), expected, q
    )
    entrants += [Entrant(name, e.version, fn, e.error) for e in entrants for name, fn, _ in steps]
    for peer in own(session):
        if peer.dense is not None:
            entrants += _admit(session, peer, functools.partial(peer.dense, q, k, v, False), expected, q)
    needed = {"all three": sum(nbytes for *_, nbytes in steps), **{name: nbytes for name, _, nbytes in steps}}
    for name, (entrant, timing) in _race(session, entrants, seconds=0.15).items():
        nbytes = needed.get(name, 4 * line)
        shape: Shape = {"L": work.length, "D": work.size, "heads": 1, "bytes": nbytes, "elements": work.length**2}
        yield session.record(
            "prefill.materialised", name, nbytes / timing.seconds / 1e9, "GB/s", shape=shape, dtype=q.dtype,
            timing=timing, error=entrant.error, version=entrant.version,
        )  # fmt: skip


def _memory(session: Session) -> Iterator[Record]:
    if not session.on_gpu:
        session.note("prefill.memory: skipped, it reads the GPU's allocator")
        return
    for exponent in range(10, 12 if session.quick else 18):
        _clear(session)
        session.note(f"prefill.memory L={2**exponent}")
        yield from _memory_one(session, Work(1, 2**exponent))


def _memory_one(session: Session, work: Work) -> Iterator[Record]:
    q, k, v = _inputs(session, work)
    k_cache, v_cache, table = into_pages(k, v, 16)
    used = torch.full((1,), work.length, dtype=torch.int32, device=session.device)
    shape: Shape = {**work.shape, "inputs_and_output": 2 * q.nbytes + k.nbytes + v.nbytes}
    calls: dict[str, Callable[[], Tensor]] = {}
    for peer in own(session):
        if peer.dense is not None and peer.paged is not None:
            calls[peer.name] = peer.dense(q, k, v, True).run
            calls[f"{peer.name}, from pages"] = peer.paged(q, k_cache, v_cache, table, used).run
    if 5 * work.heads * work.length**2 < _room(session):
        calls["materialised (torch)"] = functools.partial(materialised, q, k, v, True)
    else:
        session.note("  materialised (torch): skipped, its scores do not fit")
    for name, call in calls.items():
        try:
            extra = _extra(call)
        except Exception as problem:
            session.note(f"  {name}: skipped, {first_line(problem)}")
            continue
        about = {**shape, "P": 16} if name.endswith("from pages") else dict(shape)
        yield session.record("prefill.memory", name, extra / 1e6, "MB", shape=about, dtype=q.dtype)


def _extra(run: Callable[[], Tensor]) -> int:
    """Bytes that a call has allocated at its peak beyond what was there before and its output."""
    run()  # what is compiled, tuned or cached once is not part of it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - out.untyped_storage().nbytes())


# --- the parts, and what is printed after the table ------------------------------------------------------------------

PARTS: dict[str, Callable[[Session], Iterator[Record]]] = {
    "dense": _dense,
    "ragged": _ragged,
    "paged": _paged,
    "paged_vs_gather": _paged_vs_gather,
    "materialised": _materialised,
    "memory": _memory,
}


def ratios(records: Sequence[Record]) -> list[tuple[Record, float]]:
    """Each speed that has FlashAttention-3 in its race, over the fastest FlashAttention-3 there.

    Where a race holds both pages and dense inputs, the baseline is FlashAttention-3 on dense ones.

    Source: chapter 03b.
    """
    races: dict[tuple, list[Record]] = {}
    for r in records:
        if r.unit == "TFLOP/s" and r.bench != "prefill.ceiling":
            races.setdefault((r.bench, r.dtype, *r.shape.items()), []).append(r)
    found = []
    for race_records in races.values():
        threes = [r for r in race_records if r.impl.startswith(BASELINE)]
        dense = [r for r in threes if r.impl.endswith(", dense")]
        if threes and (dense or not race_records[0].bench.endswith(".paged")):
            best = max(r.value for r in dense or threes)
            found += [(r, r.value / best) for r in race_records]
    return found


def summary(records: Sequence[Record]) -> str:
    """The ratios as plain text, "" where FlashAttention-3 was not measured. Source: chapter 03b."""
    lines, last = [], ""
    for r, ratio in ratios(records):
        about = f"{r.bench} " + " ".join(f"{key}={value}" for key, value in r.shape.items())
        if about != last:
            lines.append(about)
            last = about
        lines.append(f"  {r.impl:<36}{r.value:8.1f} TFLOP/s  {ratio:6.3f} of {BASELINE}")
    return "\n".join(lines)
