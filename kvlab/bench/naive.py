"""Chapter 01's two ways to generate: recompute everything, or keep keys and values in contiguous rows.

Weights are random: speed does not depend on them. Keys and values of a long context are random too, so that a step at
16K tokens need not wait for a 16K prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from kvlab import config as configs
from kvlab.batch import Batch
from kvlab.bench import Record, Session, measure
from kvlab.cache import KVCache, NoCache
from kvlab.config import ModelConfig
from kvlab.generate import stream
from kvlab.model import Decoder
from kvlab.naive import NaiveCache
from kvlab.sampling import SamplingParams


def run(session: Session) -> Iterator[Record]:
    """Decode step against context and batch, total time of a text, memory of a step.

    Shapes and units:
        naive.step      ms of a decode step at B sequences of L tokens each, by the wall's clock, with Python's share
        naive.device    ms of the same forward pass replayed from a CUDA graph: the GPU's share alone
        naive.memory    bytes that a step takes beside weights and cache
        naive.total     seconds for N new tokens after a prompt of ``prompt`` tokens

    Source: chapter 01.
    """
    if session.quick:
        lengths, batches, batch_lengths, total = [16, 32], [1, 2], [16], 8
        models = ["stdlib-1m"]
    elif session.on_gpu:
        lengths, batches, batch_lengths = [2**e for e in range(7, 15)], [2**e for e in range(7)], [1024, 8192]
        models, total = ["llama-3.2-1b", "stdlib-7m"], 1024
    else:
        lengths, batches, batch_lengths, total = [2**e for e in range(5, 11)], [1, 2, 4, 8], [128, 512], 256
        models = ["stdlib-7m"]
    for name in models:
        config = configs.get(name)
        dtype = torch.bfloat16 if session.on_gpu else torch.float32
        torch.manual_seed(0)
        model = Decoder(config, dtype=dtype, device=session.device)
        possible = [length for length in lengths if length < config.max_seq_len]
        yield from _steps(session, model, possible)
        yield from _batches(session, model, batches, [length for length in batch_lengths if length in possible])
        yield from _totals(session, model, total)
        del model


def filled(config: ModelConfig, num_seqs: int, length: int, dtype: torch.dtype, device: torch.device) -> NaiveCache:
    """A NaiveCache in which sequences 0 .. num_seqs-1 hold ``length`` random tokens each, with room for one more.

    Raises: MemoryError where they do not fit.  Source: chapter 01.
    """
    cache = NaiveCache(config, num_seqs, length + 1, dtype=dtype, device=device)
    cache.k.normal_()
    cache.v.normal_()
    cache.prepare(Batch.build(list(range(num_seqs)), [[0] * length] * num_seqs, [0] * num_seqs))
    return cache


class Step:
    """One decode step of B sequences of L tokens, undone afterwards: ``build`` its batch, run ``forward``, choose.

    Shapes and units: as ``Batch`` and ``Decoder``.

    Source: chapter 01.
    """

    def __init__(self, model: Decoder, cache: KVCache, num_seqs: int, length: int) -> None:
        self.model, self.cache, self.ids = model, cache, list(range(num_seqs))
        self.past = length if isinstance(cache, NaiveCache) else 0
        self.new = [[1] * (length + 1 - self.past)] * num_seqs

    def build(self) -> Batch:
        """The batch of the step. Source: chapter 01."""
        return Batch.build(self.ids, self.new, [self.past] * len(self.ids), device=self.model.device)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, vocab]; the cache is left as it was. Source: chapter 01."""
        logits = self.model(batch, self.cache)
        for seq_id in self.ids:
            self.cache.truncate(seq_id, self.past)
        return logits

    def __call__(self, i: int = 0) -> list[int]:
        """The whole step: B token ids. Source: chapter 01."""
        return self.forward(self.build()).argmax(1).tolist()


def _timed(session: Session, model: Decoder, cache: KVCache, b: int, length: int) -> Iterator[Record]:
    step, impl = Step(model, cache, b, length), type(cache).__name__
    shape: dict[str, int | float | str] = {"model": model.config.name, "B": b, "L": length}
    with torch.inference_mode():
        timing = measure(
            step, device=session.device, seconds=session.seconds(0.3), min_count=3, max_count=40, host=True
        )
        yield session.record("naive.step", impl, timing.ms, "ms", shape=shape, dtype=model.dtype, timing=timing)
        if session.on_gpu:
            batch = step.build()
            device = measure(
                lambda i: step.forward(batch), device=session.device, seconds=session.seconds(0.1), min_count=3, graph=1
            )
            yield session.record("naive.device", impl, device.ms, "ms", shape=shape, dtype=model.dtype, timing=device)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(0)
            peak = torch.cuda.max_memory_allocated() - before
            yield session.record("naive.memory", impl, peak, "bytes", shape=shape, dtype=model.dtype)


def _steps(session: Session, model: Decoder, lengths: list[int]) -> Iterator[Record]:
    for length in lengths:
        yield from _timed(session, model, NoCache(model.config), 1, length)
        cache = filled(model.config, 1, length, model.dtype, session.device)
        yield from _timed(session, model, cache, 1, length)


def _batches(session: Session, model: Decoder, batches: list[int], lengths: list[int]) -> Iterator[Record]:
    for length in lengths:
        for b in batches:
            if b == 1:
                continue  # measured above
            try:
                cache = filled(model.config, b, length, model.dtype, session.device)
            except MemoryError as error:
                session.note(f"  naive.step B={b} L={length}: skipped, {error}")
                break
            yield from _timed(session, model, cache, b, length)
            del cache


def _totals(session: Session, model: Decoder, total: int, limit_s: float = 15.0) -> Iterator[Record]:
    """The wall time of generating 1, 2, 4, ... tokens in one go; stops after ``limit_s`` seconds."""
    prompt = [1] * 8
    ways: list[tuple[str, KVCache]] = [
        ("NoCache", NoCache(model.config)),
        (
            "NaiveCache",
            NaiveCache(model.config, 1, len(prompt) + total, dtype=model.dtype, device=session.device),
        ),
    ]
    for impl, cache in ways:
        for _ in stream(model, cache, prompt, SamplingParams(max_tokens=2)):
            pass  # warm
        start = time.perf_counter()
        tokens = stream(model, cache, prompt, SamplingParams(max_tokens=total))
        for count, _ in enumerate(tokens, 1):
            elapsed = time.perf_counter() - start
            if count & (count - 1) == 0:
                shape: dict[str, int | float | str] = {
                    "model": model.config.name, "B": 1, "N": count, "prompt": len(prompt),
                }  # fmt: skip
                yield session.record(
                    "naive.total", impl, elapsed, "s", shape=shape, dtype=model.dtype, ms=1e3 * elapsed
                )
            if elapsed > limit_s:
                session.note(f"  naive.total {impl}: stopped after {count} tokens and {elapsed:.0f} s")
                break
        cache.free(0)
