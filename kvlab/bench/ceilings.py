"""What this machine's memory and matrix units really reach, and the energy that it takes.

A datasheet's rates are never met. Every percentage in the book is of the rates measured here.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.bench import Record, Session, Timing, measure
from kvlab.bench._session import output
from kvlab.runtime import tl, triton

GB = 1e9


@runtime.counted
@triton.jit
def read_blocks(source, partial, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sum STEPS neighbouring blocks and write one number: as near to only reading as a kernel can be.

    Shapes and units: source float32, a multiple of BLOCK * STEPS elements; partial [programs] float32.

    Source: chapter 00.
    """
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(source + start + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(partial + program, tl.sum(total, axis=0))


@runtime.counted
@triton.jit
def read_strided(source, partial, num_blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The same with as many programs as fit: each walks the buffer in strides of the whole grid.

    Shapes and units: source float32, num_blocks * BLOCK elements; partial [programs] float32.

    Source: chapter 00.
    """
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(program, num_blocks, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(source + block * tl.full([], BLOCK, tl.int64) + tl.arange(0, BLOCK))
    tl.store(partial + program, tl.sum(total, axis=0))


def run(session: Session) -> Iterator[Record]:
    """Copy, read and matmul rates over several sizes, then energy where it can be read.

    Shapes and units: records in GB/s, TFLOP/s, W, pJ/byte and pJ/FLOP; ``shape["bytes"]`` is one buffer's size.

    Source: chapter 00.
    """
    yield from _copy(session)
    yield from _read(session)
    yield from _matmul(session)
    yield from _energy(session)


def _call(fn: Callable[..., object], *args: object, **options: object) -> Callable[[int], object]:
    """fn(*args) as a repetition that ``measure`` can count."""
    return lambda i: fn(*args, **options)


def _sizes(session: Session) -> list[int]:
    if session.quick:
        return [1 << 16] if not session.on_gpu else [1 << 24]
    return [2**e for e in range(28, 34)] if session.on_gpu else [2**e for e in range(20, 29, 2)]


def _buffer(session: Session, nbytes: int) -> Tensor:
    """Random float32 of nbytes bytes; drawn once for 64 MiB and repeated, which is quick and as good for memory."""
    numel = nbytes // 4
    seed = torch.randn(min(numel, 1 << 24), device=session.device)
    return seed.repeat(numel // seed.numel())


def _copy(session: Session) -> Iterator[Record]:
    for nbytes in _sizes(session):
        source = _buffer(session, nbytes)
        target = torch.empty_like(source)
        ways: dict[str, Callable[[int], object]] = {
            "torch copy_": _call(target.copy_, source),
            "torch mul": _call(torch.mul, source, 2.0, out=target),
        }
        for impl, fn in ways.items():
            timing = measure(fn, device=session.device, seconds=session.seconds(0.2), flush=session.on_gpu)
            rate = 2 * nbytes / timing.seconds / GB
            yield session.record(
                "ceilings.copy", impl, rate, "GB/s", shape={"bytes": nbytes}, dtype=source.dtype, timing=timing,
                version=torch.__version__,
            )  # fmt: skip
        del source, target, ways


def _read_kernels(session: Session) -> Iterator[tuple[str, int, Callable[[Tensor, Tensor], object]]]:
    """(name, bytes that a buffer must be a multiple of, launcher(source, partial))."""
    for block, steps, warps in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8), (4, 8)):
        if 2 * block * steps <= 1 << 17 and block // (32 * warps) <= 32:

            def blocks(source: Tensor, partial: Tensor, block=block, steps=steps, warps=warps) -> object:
                grid = (source.numel() // (block * steps),)
                return read_blocks[grid](source, partial, BLOCK=block, STEPS=steps, num_warps=warps)

            yield f"triton blocks {block}x{steps} warps {warps}", 4 * block * steps, blocks
    units = torch.cuda.get_device_properties(session.device).multi_processor_count if session.on_gpu else 2
    for block, stages, warps, per_unit in itertools.product((2048, 4096, 8192), (1, 4), (4, 8), (4, 8)):
        if warps * per_unit <= 64:

            def strided(
                source: Tensor, partial: Tensor, block=block, stages=stages, warps=warps, programs=units * per_unit
            ) -> object:
                return read_strided[(programs,)](
                    source, partial, source.numel() // block, BLOCK=block, STAGES=stages, num_warps=warps
                )

            yield f"triton strided {block} stages {stages} warps {warps} x{per_unit}", 4 * block, strided


def _read(session: Session) -> Iterator[Record]:
    device, sizes = session.device, _sizes(session)
    tuning_size = sizes[min(2, len(sizes) - 1)]  # every kernel at one size, the best few at all
    results: dict[str, tuple[float, Callable[[Tensor, Tensor], object]]] = {}
    source = _buffer(session, tuning_size)
    partial = torch.empty(source.numel() // 1024 + 4096, device=device)
    exact = source.double().sum().item()
    scale = source.double().abs().sum().item()

    def one(impl: str, fn: Callable[[int], object], value: Callable[[], float] | None, nbytes: int) -> Record:
        error = None if value is None else abs(value() - exact) / scale
        timing = measure(fn, device=device, seconds=session.seconds(0.06), flush=session.on_gpu)
        rate = nbytes / timing.seconds / GB
        version = torch.__version__ if impl.startswith("torch") else None
        return session.record(
            "ceilings.read", impl, rate, "GB/s", shape={"bytes": nbytes}, dtype="float32", timing=timing, error=error,
            version=version,
        )  # fmt: skip

    for impl, reduce in (("torch sum", torch.sum), ("torch amax", torch.amax)):
        value = (lambda: source.sum().item()) if reduce is torch.sum else None
        yield one(impl, _call(reduce, source), value, tuning_size)
    with_triton = runtime.can_launch(device) and (session.on_gpu or session.quick)
    for impl, multiple, launch in _read_kernels(session) if with_triton else ():
        if tuning_size % multiple or (session.quick and len(results) >= 2 and "strided" not in impl):
            continue
        if session.quick and sum("strided" in name for name in results) >= 2:
            break

        def value(launch=launch) -> float:
            partial.zero_()
            launch(source, partial)
            return partial.double().sum().item()

        record = one(impl, _call(launch, source, partial), value, tuning_size)
        results[impl] = (record.value, launch)
        yield record
    best = sorted(results, key=lambda impl: -results[impl][0])[:3]
    for nbytes in sizes:
        if nbytes == tuning_size:
            continue
        del source
        source = _buffer(session, nbytes)
        partial = torch.empty(source.numel() // 1024 + 4096, device=device)
        for impl, reduce in (("torch sum", torch.sum), ("torch amax", torch.amax)):
            yield one(impl, _call(reduce, source), None, nbytes)
        for impl in best:
            launch = results[impl][1]
            yield one(impl, _call(launch, source, partial), None, nbytes)


def _matmul(session: Session) -> Iterator[Record]:
    device = session.device
    if session.on_gpu and not session.quick:
        shapes = [(8192, 8192, 8192), (16384, 8192, 8192), (4096, 4096, 4096)]
        modes = ["bfloat16", "float16", "tf32", "float32"]
    else:
        shapes, modes = [(64, 64, 64)] if session.quick else [(1024, 1024, 1024), (2048, 2048, 2048)], ["float32"]
        modes += ["bfloat16"] if session.on_gpu else []
    before = torch.backends.cuda.matmul.allow_tf32
    for (rows, inner, columns), mode in itertools.product(shapes, modes):
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(mode, torch.float32)
        a = torch.randn(rows, inner, device=device, dtype=dtype)
        b = torch.randn(inner, columns, device=device, dtype=dtype)
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        multiply = _call(torch.matmul, a, b, out=out)
        timings: dict[str, Timing] = {}
        try:
            timings["torch matmul"] = measure(
                multiply, device=device, seconds=session.seconds(1.0 if session.on_gpu else 0.3), flush=session.on_gpu
            )
            if session.on_gpu:  # rested, and over before the power limit slows the clock: what a short kernel meets
                time.sleep(0.5)
                timings["torch matmul, burst"] = measure(
                    multiply, device=device, min_count=10, max_count=10, flush=True
                )
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        truth = a[:4].double() @ b.double()
        error = ((out[:4].double() - truth).norm() / truth.norm()).item()
        for impl, timing in timings.items():
            yield session.record(
                "ceilings.matmul", impl, 2 * rows * inner * columns / timing.seconds / 1e12, "TFLOP/s",
                shape={"M": rows, "K": inner, "N": columns}, dtype=mode, timing=timing, error=error,
                version=torch.__version__,
            )  # fmt: skip


@dataclass
class Meter:
    """Reads, and only reads, a GPU's energy: NVML's counter in joules where there is one, else sampled power.

    Shapes and units: ``joules()`` since some moment, or None; ``watts()`` now, or None.

    Source: chapter 00; NVIDIA's NVML.
    """

    device: torch.device

    def __post_init__(self) -> None:
        self._nvml = self._handle = None
        try:
            import pynvml  # only where it is installed

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception:  # absent, refused or another API: then power is read through nvidia-smi
            self._nvml = None

    def joules(self) -> float | None:
        """Energy counter in joules, None where the card has none. Source: NVML."""
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def watts(self) -> float | None:
        """Power drawn now, in watts, None where it cannot be read. Source: NVML."""
        if self._nvml is not None:
            try:
                return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
            except self._nvml.NVMLError:
                return None
        found = output("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
        try:
            return float(found.splitlines()[self.device.index or 0]) if found else None
        except ValueError:
            return None


def _sustain(body: Callable[[], object] | None, seconds: float, chunk: int) -> tuple[int, float]:
    """Keep the GPU busy with ``body`` for that long, never letting its queue run dry; gives (calls, seconds)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    if body is None:
        time.sleep(seconds)
        return 0, time.perf_counter() - start
    calls, previous = 0, None
    while time.perf_counter() - start < seconds:
        for _ in range(chunk):
            body()
        calls += chunk
        event = torch.cuda.Event()
        event.record()
        if previous is not None:
            previous.synchronize()
        previous = event
    torch.cuda.synchronize()
    return calls, time.perf_counter() - start


def _energy(session: Session) -> Iterator[Record]:
    if not session.on_gpu:
        session.note("  energy: skipped, it is read from an NVIDIA GPU and this run is on a CPU")
        return
    meter = Meter(session.device)
    if meter.watts() is None:
        session.note("  energy: skipped, neither NVML nor nvidia-smi tells the power drawn here")
        return
    nbytes, size = (1 << 32, 8192) if not session.quick else (1 << 24, 512)
    seconds, settle = (4.0, 1.0) if not session.quick else (0.3, 0.05)
    source = _buffer(session, nbytes)
    target, partial = torch.empty_like(source), torch.empty(1 << 20, device=session.device)
    a, b = (torch.randn(size, size, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def read() -> object:
        if not runtime.can_launch(session.device):
            return source.sum()
        return read_blocks[(source.numel() // 8192,)](source, partial, BLOCK=4096, STEPS=2, num_warps=8)

    work: list[tuple[str, Callable[[], object] | None, float, str, str]] = [
        ("idle", None, 0.0, "", "none"),
        ("read", read, float(nbytes), "byte", "float32"),
        ("copy", lambda: target.copy_(source), 2.0 * nbytes, "byte", "float32"),
        ("matmul", lambda: torch.matmul(a, b, out=out), 2.0 * size**3, "FLOP", "bfloat16"),
    ]
    idle_watts = 0.0
    for name, body, amount, unit, dtype in work:
        _sustain(body, settle if body else 2 * settle, 8)  # warm, and past the counter's lag
        samples: list[float] = []
        stop = threading.Event()

        def watch(samples=samples, stop=stop) -> None:
            while not stop.wait(0.1):
                samples.append(meter.watts() or 0.0)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        before = meter.joules()
        calls, elapsed = _sustain(body, seconds, 8)
        after = meter.joules()
        stop.set()
        thread.join()
        sampled = statistics.mean(samples) if samples else meter.watts() or 0.0
        counted = None if before is None or after is None or after <= before else (after - before) / elapsed
        watts = sampled if counted is None else counted
        shape: dict[str, int | float | str] = {
            "work": name, "seconds": round(elapsed, 3), "calls": calls,
            "source": "power samples" if counted is None else "energy counter",
        }  # fmt: skip
        yield session.record("ceilings.energy", name, watts, "W", shape=shape, dtype=dtype, ms=1e3 * elapsed)
        yield session.record("ceilings.power_sampled", name, sampled, "W", shape=shape, dtype=dtype)
        if body is None:
            idle_watts = watts
            continue
        rate = calls * amount / elapsed
        scaled = rate / (GB if unit == "byte" else 1e12)
        sustained = "GB/s" if unit == "byte" else "TFLOP/s"
        yield session.record("ceilings.sustained", name, scaled, sustained, shape=shape, dtype=dtype)
        yield session.record("ceilings.energy", name, 1e12 * watts / rate, f"pJ/{unit}", shape=shape, dtype=dtype)
        above = 1e12 * (watts - idle_watts) / rate
        yield session.record("ceilings.energy_above_idle", name, above, f"pJ/{unit}", shape=shape, dtype=dtype)
