"""Chapter 04: attention of one or a few new tokens over a long cache, raced against other libraries.

What is timed is the reading of keys and values, so the unit is GB/s of those that are live, and the ceiling is measured
in the same run. Calls are captured in a CUDA graph over rotated caches: five times the L2 in all, so that none of them
is found there. Each implementation is first compared with float64; one that is wrong is left out and named on stderr.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab import flash_decoding, flash_hopper, paged, reference, runtime
from kvlab.bench import Record, Session, measure, rotations
from kvlab.bench._entrants import Entrant, admit, compete
from kvlab.bench._peers import Call, Peer, find
from kvlab.bench._timing import l2_bytes
from kvlab.bench.ceilings import _read_kernels

Shape = dict[str, int | float | str]
Pool = tuple[Tensor, Tensor]
K = 1024


def run(session: Session) -> Iterator[Record]:
    """Every part, one after the other.

    Shapes and units: ``bytes`` of a shape are those of live K and V, once a KV head; GB/s are of these. ``L`` keys of
    each sequence (the longest, with ``sequences`` "log-normal"), ``P`` the page size and ``q_len`` new tokens.
        decode.read        GB/s of kernels that only read, of several sizes: the best is the ceiling
        decode.table       GB/s of each implementation, replayed in a CUDA graph
        decode.contiguous  the same beside implementations that need a contiguous cache
        decode.splits      GB/s for each ``num_splits``; 0 is the balanced rule
        decode.naive       GB/s beside two matrix products and a softmax on a contiguous cache, heads grouped or copied
        decode.launches    us of a call: "graph replay", "plain launches" and, of the host, "wall clock"

    Source: chapter 04; FlashAttention's and FlashInfer's benchmarks.
    """
    for part in PARTS.values():
        yield from part(session)


# --- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One shape: B sequences of ``length`` keys, or of those in ``lengths``. Source: chapter 04."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block_size: int = 16
    q_len: int = 1
    lengths: tuple[int, ...] = field(default=(), repr=False)

    @property
    def used(self) -> tuple[int, ...]:
        """Keys of each sequence. Source: chapter 04."""
        return self.lengths or (self.length,) * self.batch

    def nbytes(self, itemsize: int) -> int:
        """Bytes of live K and V. Source: chapter 04."""
        return 2 * sum(self.used) * self.kv_heads * self.size * itemsize

    def shape(self, itemsize: int) -> Shape:
        """The shape of its records. Source: chapter 04."""
        ragged: Shape = {"sequences": "log-normal"} if self.lengths else {}
        return {
            "B": self.batch, "L": self.length, "H": self.heads, "H_kv": self.kv_heads, "D": self.size,
            "P": self.block_size, "q_len": self.q_len, **ragged, "bytes": self.nbytes(itemsize),
        }  # fmt: skip


def ragged_lengths(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """``count`` log-normal lengths (the standard deviation of the logarithm is 1), the longest of ``longest`` tokens.

    Raises: ValueError where there is no sequence or no token.  Source: chapter 04.
    """
    if count < 1 or longest < 1:
        raise ValueError(f"count is {count} and longest {longest}; both must be 1 or more")
    rng = random.Random(seed)
    drawn = [rng.lognormvariate(0.0, 1.0) for _ in range(count)]
    return tuple(max(1, round(x / max(drawn) * longest)) for x in drawn)


@dataclass
class Inputs:
    """The tensors of one shape, with as many caches as it takes to leave none in the L2.

    Shapes and units: q [B, q_len, H, D]; pools of k, v [N, P, H_kv, D]; table [B, blocks] and used [B] int32.

    Source: chapter 04.
    """

    work: Work
    q: Tensor
    pools: list[Pool]
    table: Tensor
    used: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of live K and V. Source: chapter 04."""
        return self.work.nbytes(self.q.element_size())

    def call(self, i: int = 0, **options: object) -> Tensor:
        """``flash_decoding.attention`` on the i-th cache; gives [B, q_len, H, D]. Source: chapter 04."""
        k, v = self.pools[i % len(self.pools)]
        out = flash_decoding.attention(
            self.q.flatten(0, 1), k, v, block_table=self.table, cu_seqlens_q=self.starts, seqused_k=self.used,
            max_seqlen_q=self.work.q_len, max_seqlen_k=self.work.length, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.view(self.q.shape)

    @functools.cached_property
    def starts(self) -> Tensor:
        """cu_seqlens_q [B + 1] int32. Source: chapter 04."""
        count = self.work.batch + 1
        return self.work.q_len * torch.arange(count, dtype=torch.int32, device=self.q.device)


def build(session: Session, work: Work, copies: int | None = None) -> Inputs:
    """Random keys and values in shuffled pages. Source: chapter 04."""
    torch.manual_seed(0)
    on, dtype = session.device, torch.bfloat16 if session.on_gpu else torch.float32
    counts = [-(-n // work.block_size) for n in work.used]
    order = torch.randperm(sum(counts), device=on, dtype=torch.int32)
    table = torch.zeros(work.batch, max(counts), dtype=torch.int32, device=on)
    for b, part in enumerate(order.split(counts)):
        table[b, : len(part)] = part
    nbytes = work.nbytes(dtype.itemsize)
    if copies is None:
        copies = 1 if nbytes >= 5 * l2_bytes(on) else rotations(nbytes, on)
    shape = (sum(counts), work.block_size, work.kv_heads, work.size)
    pools = [
        (torch.empty(shape, dtype=dtype, device=on).normal_(), torch.empty(shape, dtype=dtype, device=on).normal_())
        for _ in range(copies if session.on_gpu else 2)
    ]
    q = torch.randn(work.batch, work.q_len, work.heads, work.size, device=on, dtype=dtype)
    return Inputs(work, q, pools, table, torch.tensor(work.used, dtype=torch.int32, device=on))


class Expected:
    """The right output, in float64, for the first, last, longest and shortest sequence on the first cache.

    Shapes and units: inputs as ``build`` makes them.

    Source: chapter 04.
    """

    def __init__(self, inputs: Inputs) -> None:
        used = inputs.work.used
        order = sorted(range(len(used)), key=used.__getitem__)
        self.rows: list[tuple[int, Tensor]] = []
        for b in sorted({0, len(used) - 1, order[0], order[-1]}):
            one = slice(b, b + 1)
            k, v = (paged.gather(x, inputs.table[one], inputs.used[one], used[b])[0] for x in inputs.pools[0])
            group, parts = inputs.work.heads // inputs.work.kv_heads, []
            for h in range(inputs.work.kv_heads):  # a head at a time: in float64 and for every query head it is large
                q = inputs.q[b, :, h * group : (h + 1) * group]
                parts.append(reference.attend_one(q, k[:, h : h + 1], v[:, h : h + 1])[0])
            self.rows.append((b, torch.cat(parts, dim=1)))

    def error(self, out: Tensor) -> float:
        """The largest relative error of one sequence; infinite where out [B, q_len, H, D] is not finite anywhere.

        Source: chapter 04.
        """
        if not bool(out.isfinite().all()):
            return float("inf")
        return max(float((out[b].double() - rows).norm() / rows.norm()) for b, rows in self.rows)


# --- who takes part --------------------------------------------------------------------------------------------------


def own(session: Session) -> dict[str, str]:
    """kvlab's implementations that can run here, by the name in the records. Source: chapter 04."""
    if session.on_gpu:
        hopper = {"kvlab hopper": "hopper"} if flash_hopper.unavailable(session.device) is None else {}
        return {**hopper, "kvlab triton": "triton"}
    kinds = {"kvlab torch": "torch"}
    if session.quick and runtime.can_launch(session.device):
        kinds["kvlab triton"] = "triton"
    return kinds


def _entrants(
    session: Session, peer: Peer, calls: Callable[[], list[Call]], expected: Expected, like: Tensor
) -> list[Entrant]:
    """One implementation that rotates its caches, or none where it is not right on the first."""
    ready: list[Call] = []

    def prepare() -> Call:
        ready.extend(calls())
        return ready[0]

    found = admit(session, peer, prepare, expected, like)
    return [e._replace(fn=lambda i: ready[i % len(ready)].run()) for e in found]


def _own(
    session: Session, inputs: Inputs, expected: Expected, suffix: str = "", but: str = "", **options: object
) -> list[Entrant]:
    found = []
    for name, impl in own(session).items():
        if impl == but:
            continue
        given = {"impl": impl, **options}

        def calls(given: dict[str, object] = given) -> list[Call]:
            return [Call(functools.partial(inputs.call, i, **given)) for i in range(len(inputs.pools))]

        found += _entrants(session, Peer(name + suffix, None), calls, expected, inputs.q)
    return found


@functools.cache
def _peers(session: Session) -> list[Peer]:
    return find(session.device, session.note) if session.peers else []


def _paged_peers(session: Session, inputs: Inputs, expected: Expected) -> list[Entrant]:
    found = []
    for peer in _peers(session):
        if peer.decode is not None:
            calls = functools.partial(peer.decode, inputs.q, inputs.pools, inputs.table, inputs.used)
            found += _entrants(session, peer, calls, expected, inputs.q)
    return found


def _rates(session: Session, bench: str, inputs: Inputs, entrants: Sequence[Entrant], **more: int) -> Iterator[Record]:
    graph = len(inputs.pools) if session.on_gpu else 0
    for name, (entrant, timing) in compete(session, entrants, seconds=0.3, graph=graph).items():
        yield session.record(
            bench, name, inputs.nbytes / timing.seconds / 1e9, "GB/s",
            shape={**inputs.work.shape(inputs.q.element_size()), **more}, dtype=inputs.q.dtype, timing=timing,
            error=entrant.error, version=entrant.version,
        )  # fmt: skip


def _fits(session: Session, work: Work, times: int = 1) -> bool:
    """Whether the caches fit beside what float64 needs to check them."""
    if not session.on_gpu:
        return True
    nbytes = times * work.nbytes(2)
    if nbytes + 10e9 < torch.cuda.mem_get_info(session.device)[0]:
        return True
    session.note(f"  B={work.batch} L={work.length}: skipped, {nbytes / 1e9:.0f} GB do not fit")
    return False


# --- parts -----------------------------------------------------------------------------------------------------------


def _read(session: Session) -> Iterator[Record]:
    """Kernels that only read, the best few of many by one measurement each, raced at several sizes: what no kernel that
    reads as much can be much faster than."""
    sizes = [1 << 18] if session.quick else [1 << 32, 1 << 29, 1 << 27, 1 << 24] if session.on_gpu else [1 << 26]
    seed = torch.randn(min(sizes[0] // 4, 1 << 24), device=session.device)
    source = seed.repeat(sizes[0] // 4 // seed.numel())
    partial = torch.empty(source.numel() // 1024 + 4096, device=session.device)
    ways: dict[str, Callable[[Tensor], object]] = {"torch sum": lambda x: x.sum(), "torch amax": lambda x: x.amax()}
    if runtime.can_launch(session.device) and session.on_gpu:
        found: dict[str, Callable[[Tensor], object]] = {
            name: lambda x, launch=launch: launch(x, partial)  # type: ignore[misc]
            for name, multiple, launch in _read_kernels(session) if sizes[-1] % multiple == 0
        }  # fmt: skip
        times = {
            name: measure(lambda i, way=way: way(source), device=session.device, seconds=0.02, min_count=3).ms  # type: ignore[misc]
            for name, way in found.items()
        }
        ways |= {name: found[name] for name in sorted(times, key=times.__getitem__)[:4]}
    for nbytes in sizes:
        session.note(f"decode.read {nbytes} bytes")
        parts = source.split(nbytes // 4)[: rotations(nbytes, session.device)]
        entrants = [
            Entrant(name, torch.__version__ if "torch" in name else None,
                    lambda i, way=way, parts=parts: way(parts[i % len(parts)]), 0.0)  # type: ignore[misc, arg-type]
            for name, way in ways.items()
        ]  # fmt: skip
        graph = len(parts) if session.on_gpu else 0
        for name, (entrant, timing) in compete(session, entrants, seconds=0.2, graph=graph).items():
            yield session.record(
                "decode.read", name, nbytes / timing.seconds / 1e9, "GB/s", shape={"bytes": nbytes}, dtype="float32",
                timing=timing, version=entrant.version,
            )  # fmt: skip


def _each(
    session: Session, bench: str, works: Sequence[Work], one: Callable[[Session, Work], Iterator[Record]],
    times: int = 1,
) -> Iterator[Record]:  # fmt: skip
    """Measure shape after shape, those whose caches fit so many times over."""
    for work in works:
        session.note(f"{bench} {work}")
        if _fits(session, work, times):
            yield from one(session, work)
        if session.on_gpu:
            torch.cuda.empty_cache()


def _sized(session: Session, works: Sequence[Work], quick: Work | None = None) -> Sequence[Work]:
    """These shapes, or a small one where there is no GPU, and a tiny one in a quick session."""
    if session.quick:
        return [quick or Work(1, 40, 4, 2, 16)]
    return works if session.on_gpu else [Work(1, 1024, 8, 2, 64)]


def works(session: Session) -> list[Work]:
    """The rows of the table. Source: chapter 04."""
    if session.quick:
        ragged = ragged_lengths(3, 40)
        return [Work(1, 48, 4, 2, 16), Work(2, 20, 4, 2, 16, 8, 3), Work(3, 40, 4, 2, 16, lengths=ragged)]
    if not session.on_gpu:
        return [Work(1, 1024, 8, 2, 64), Work(4, 512, 8, 2, 64)]
    plain = [Work(1, 4 * K), Work(8, 4 * K), Work(1, 32 * K), Work(1, 128 * K), Work(4, 32 * K), Work(32, 32 * K),
             Work(128, 2 * K)]  # fmt: skip
    heads = [Work(32, 32 * K, 32, 1), Work(8, 32 * K, 28, 4), Work(8, 32 * K, size=64)]
    pages = [Work(8, 32 * K, block_size=n) for n in (1, 16, 64, 256)]
    ragged = ragged_lengths(64, 128 * K)
    return [*plain, *heads, *pages, Work(64, 128 * K, lengths=ragged), Work(8, 32 * K, q_len=5)]


def _table(session: Session) -> Iterator[Record]:
    yield from _each(session, "decode.table", works(session), _table_one, times=2)


def _table_one(session: Session, work: Work) -> Iterator[Record]:
    inputs = build(session, work)
    expected = Expected(inputs)
    entrants = [*_own(session, inputs, expected), *_paged_peers(session, inputs, expected)]
    k, v = inputs.pools[0]
    choice = flash_decoding.explain(
        inputs.q.flatten(0, 1), k, v, block_table=inputs.table, cu_seqlens_q=inputs.starts, seqused_k=inputs.used,
        max_seqlen_q=work.q_len, max_seqlen_k=work.length,
    )  # fmt: skip
    session.note(f"  {choice}")
    yield from _rates(session, "decode.table", inputs, entrants)


def _dense_pools(inputs: Inputs) -> list[Pool]:
    """Each cache laid out contiguously, [B, L, H_kv, D]."""
    length = inputs.work.length
    return [
        (paged.gather(k, inputs.table, inputs.used, length), paged.gather(v, inputs.table, inputs.used, length))
        for k, v in inputs.pools
    ]


def _contiguous(session: Session) -> Iterator[Record]:
    shapes = [Work(1, 4 * K), Work(8, 4 * K), Work(1, 32 * K), Work(8, 32 * K), Work(1, 128 * K)]
    yield from _each(session, "decode.contiguous", _sized(session, shapes), _contiguous_one, times=2)


def _contiguous_one(session: Session, work: Work) -> Iterator[Record]:
    inputs = build(session, work)
    expected = Expected(inputs)
    entrants = _own(session, inputs, expected)
    pools = _dense_pools(inputs)

    def calls(dense: Callable[..., Call]) -> list[Call]:
        return [dense(inputs.q, *pool, False) for pool in pools]

    for peer in _peers(session):
        if peer.dense is not None:
            entrants += _entrants(session, peer, functools.partial(calls, peer.dense), expected, inputs.q)
    yield from _rates(session, "decode.contiguous", inputs, entrants)


def _splits(session: Session) -> Iterator[Record]:
    shapes = [Work(b, n * K) for b in (1, 4, 16, 64) for n in (2, 8, 32, 128)]
    yield from _each(session, "decode.splits", _sized(session, shapes), _splits_one)


def _splits_one(session: Session, work: Work) -> Iterator[Record]:
    numbers = [0, 1, 3] if session.quick else [0, 1, 2, 4, 8, 16, 32, 64, 128] if session.on_gpu else [0, 1, 4]
    inputs = build(session, work)
    expected = Expected(inputs)
    entrants = {n: _own(session, inputs, expected, f", {n} splits", "hopper", num_splits=n) for n in numbers}
    by_name = {e.name: n for n, found in entrants.items() for e in found}
    for record in _rates(session, "decode.splits", inputs, [e for found in entrants.values() for e in found]):
        name, _, _ = record.impl.partition(",")
        shape = {**record.shape, "num_splits": by_name[record.impl]}
        yield Record(**{**vars(record), "impl": name, "shape": shape})


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decode as the formula reads: a matrix product, a softmax, a matrix product, on caches with heads first.

    Shapes and units: q [B, q_len, H, D], k and v [B, H_kv, L, D], every key visible; gives [B, q_len, H, D].

    Source: chapter 04.
    """
    batch, q_len, heads, size = q.shape
    kv_heads = k.shape[1]
    rows = q.view(batch, q_len, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    weights = ((rows * size**-0.5) @ k.transpose(2, 3)).softmax(-1)
    return (weights @ v).view(batch, kv_heads, -1, q_len, size).permute(0, 3, 1, 2, 4).reshape(q.shape)


def copying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decode as model code often has it: keys and values copied for every query head, the softmax in float32.

    Shapes and units: as ``naive``.

    Source: chapter 04; ``repeat_kv`` in transformers.
    """
    group = q.shape[2] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    weights = (q.transpose(1, 2) @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1, dtype=torch.float32)
    return (weights.to(q.dtype) @ v).transpose(1, 2)


def _naive(session: Session) -> Iterator[Record]:
    shapes = [Work(b, n * K) for b in (1, 8, 32, 128) for n in (2, 8, 32, 128)]
    yield from _each(session, "decode.naive", _sized(session, shapes, Work(2, 40, 4, 2, 16)), _naive_one, times=3)


def _naive_one(session: Session, work: Work) -> Iterator[Record]:
    inputs = build(session, work)
    expected = Expected(inputs)
    entrants = _own(session, inputs, expected)
    pools = [[x.transpose(1, 2).contiguous() for x in pool] for pool in _dense_pools(inputs)]

    def calls(way: Callable[..., Tensor]) -> list[Call]:
        return [Call(functools.partial(way, inputs.q, *pool)) for pool in pools]

    ways = {"naive (torch)": naive}
    if _fits(session, work, 4 + work.heads // work.kv_heads):  # the copies come on top
        ways["naive, heads copied (torch)"] = copying
    for name, way in ways.items():
        peer = Peer(name, torch.__version__)
        entrants += _entrants(session, peer, functools.partial(calls, way), expected, inputs.q)
    yield from _rates(session, "decode.naive", inputs, entrants)


def _launches(session: Session) -> Iterator[Record]:
    shapes = [Work(1, 4 * K), Work(8, 4 * K), Work(1, 32 * K), Work(32, 32 * K)]
    yield from _each(session, "decode.launches", _sized(session, shapes), _launches_one)


def _launches_one(session: Session, work: Work) -> Iterator[Record]:
    inputs = build(session, work)
    expected = Expected(inputs)
    for entrant in [*_own(session, inputs, expected), *_paged_peers(session, inputs, expected)]:
        ways: dict[str, dict[str, int]] = {"plain launches": {}, "wall clock": {"host": True}}
        if session.on_gpu:
            ways["graph replay"] = {"graph": len(inputs.pools)}
        for way, options in ways.items():
            timing = measure(
                entrant.fn, device=session.device, seconds=session.seconds(0.2), **options,  # type: ignore[arg-type]
            )  # fmt: skip
            yield session.record(
                "decode.launches", f"{entrant.name}, {way}", 1e3 * timing.ms, "us",
                shape=work.shape(inputs.q.element_size()), dtype=inputs.q.dtype, timing=timing, error=entrant.error,
                version=entrant.version,
            )  # fmt: skip


PARTS: dict[str, Callable[[Session], Iterator[Record]]] = {
    "read": _read,
    "table": _table,
    "contiguous": _contiguous,
    "splits": _splits,
    "naive": _naive,
    "launches": _launches,
}


# --- what is printed after the table ---------------------------------------------------------------------------------


def ratios(records: Sequence[Record]) -> list[tuple[Record, float, float | None]]:
    """Each of kvlab's rates in the table: the record, its ratio to the best peer of its race, and its share of the best
    read rate of the run (None where that was not measured).

    Source: chapter 04.
    """
    ceiling = max((r.value for r in records if r.bench == "decode.read"), default=None)
    races: dict[tuple, list[Record]] = {}
    for r in records:
        if r.bench == "decode.table":
            races.setdefault(tuple(r.shape.items()), []).append(r)
    found = []
    for members in races.values():
        best = max((r.value for r in members if not r.impl.startswith("kvlab")), default=None)
        found += [
            (r, r.value / best, None if ceiling is None else r.value / ceiling)
            for r in members if r.impl.startswith("kvlab") and best is not None
        ]  # fmt: skip
    return found


def summary(records: Sequence[Record]) -> str:
    """The ratios as plain text, "" where no peer was measured. Source: chapter 04."""
    lines = []
    for r, ratio, share in ratios(records):
        about = " ".join(f"{key}={value}" for key, value in r.shape.items() if key != "bytes")
        of_read = "" if share is None else f"  {100 * share:5.1f} % of the read rate"
        lines.append(f"{about:<72}{r.impl:<14}{r.value:8.0f} GB/s  {ratio:6.3f} of the best peer{of_read}")
    return "\n".join(lines)
