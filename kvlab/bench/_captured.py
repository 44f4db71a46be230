"""Forward passes at the speed of the device: launches captured in CUDA graphs, and replayed.

From Python a launch takes longer than a small kernel runs, and a pass of a large model has hundreds of them. A graph
holds them all; what changes from pass to pass lies in buffers of fixed address.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.batch import Batch, as_count, as_ints
from kvlab.cache import take_back
from kvlab.config import ModelConfig
from kvlab.model import Decoder
from kvlab.paged import PagedCache
from kvlab.paged._cache import Buffer

WARM = 2  # calls until kernels are compiled for these sizes, and tiles are chosen


class Replayed:
    """A function of fixed buffers: called as it is at first, then captured and replayed where there is a GPU.

    Shapes and units: ``function`` takes nothing and gives a tensor, which the next call may overwrite; of ``cache`` it
    reads what ``prepare`` filled in. When that has moved, or a table has another width, it is captured anew. Graphs
    that share a ``pool`` share the memory of their results.

    Source: chapter 05; chapter 07 captures whole steps.
    """

    def __init__(self, function: Callable[[], Tensor], cache: PagedCache, pool: Any = None) -> None:
        self.function, self.cache, self.pool = function, cache, pool
        self.result = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[int] = []  # what the graph has in it of the cache: its buffers, and the width of its table
        self._calls = 0

    @property
    def captured(self) -> bool:
        """Whether the next call is a replay, as long as nothing moves. Source: chapter 05."""
        return self._graph is not None

    def __call__(self) -> Tensor:
        """Run it, once the cache is prepared; gives its result. Source: chapter 05."""
        if self.cache.k.device.type != "cuda":
            self.result = self.function()
            return self.result
        places = [buffer.device.data_ptr() for buffer in self.cache._buffers.values()] + [self.cache._columns]
        if places != self._places:  # another pass may have made them larger
            self._graph, self._places, self._calls = None, places, 0
        self._calls += 1
        if self._graph is None and self._calls > WARM:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self.result = self.function()
            self._graph = graph
        if self._graph is None:
            self.result = self.function()
        else:
            self._graph.replay()
        return self.result


@dataclass(frozen=True)
class Size:
    """The shape of a captured pass: ``tokens`` new ones, of ``rows`` sequences, of which each may have ``longest``.

    Source: chapter 06.
    """

    tokens: int
    rows: int
    longest: int

    @property
    def one_each(self) -> bool:
        """Whether it is of decodes, a token for each row. Source: chapter 06."""
        return self.longest == 1 and self.tokens == self.rows


class CapturedDecoder:
    """A decoder over a paged cache whose passes are padded to one of a few sizes and replayed; larger ones run as ever.

    It is called as the decoder is, and takes its place in ``serve``: ``device`` says where batches are to be built, on
    the host, whence all that is new about a pass travels in one copy. Spare tokens belong to no sequence's text: they
    are written nowhere and attend to nothing.

    Shapes and units: passes of sequences with a new token each are padded to the next number in ``decodes``; others to
    the next number of new tokens in ``tokens``, among ``rows`` sequences. Logits are [R, vocab] float32, and the next
    call may overwrite them. ``replayed`` and ``plain`` count the passes of either kind.

    Raises: ValueError where the cache has no ``max_model_len``, so that its tables change their width, the model's
    angles depend on the lengths of sequences, there is no size, or one is no integer, 1 or more.

    Source: chapter 06; vLLM's full CUDA graphs, which pad likewise.
    """

    device = torch.device("cpu")

    def __init__(
        self, model: Decoder, cache: PagedCache, *, decodes: Iterable[int], tokens: Iterable[int], rows: int
    ) -> None:
        if cache.max_model_len is None:
            raise ValueError("cache has no max_model_len; a captured pass needs tables of one width")
        if model.rope.needs_lengths:
            raise ValueError(f"{model.config.name} has {model.rope.rope.kind} angles, which depend on lengths")
        self.model, self.cache, self.rows = model, cache, as_count(rows, "rows", 1)
        self.alone, self.mixed = (
            sorted({as_count(n, name, 1) for n in as_ints(sizes, name)})
            for name, sizes in (("decodes", decodes), ("tokens", tokens))
        )
        if not self.alone and not self.mixed:
            raise ValueError("decodes and tokens are empty; there must be a size to capture")
        self.replayed = self.plain = 0
        on = model.device
        self._numbers = Buffer(np.int64, on)
        self._numbers.host(max(2 * size.tokens + size.rows for size in self.sizes))  # it moves no more
        self._pool = torch.cuda.graph_pool_handle() if on.type == "cuda" else None
        self._passes: dict[Size, Replayed] = {}

    @property
    def config(self) -> ModelConfig:
        """The decoder's. Source: chapter 01."""
        return self.model.config

    @property
    def sizes(self) -> list[Size]:
        """All sizes, largest first: so they are captured best, the smaller in the memory of the larger.

        Source: chapter 06."""
        found = [Size(n, self.rows, n) for n in self.mixed] + [Size(n, n, 1) for n in self.alone]
        return sorted(found, key=lambda size: size.tokens, reverse=True)

    def capture(self, most_tokens: int = 1) -> None:
        """Capture every size, over spare rows, and make room for passes of ``most_tokens`` that are not captured.

        Raises: ValueError for a number of tokens that is no integer, 1 or more.  Source: chapter 06."""
        most_tokens = as_count(most_tokens, "most_tokens", 1)
        with torch.inference_mode():
            self.cache.prepare(_spare(Size(most_tokens, 1, most_tokens)))  # no buffer moves from here on
            for size in self.sizes:
                for _ in range(WARM + 1):
                    self._run(size, _spare(size))

    def __call__(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Logits of a batch that was built on the host, over the cache it was captured with.

        Raises: ValueError for another cache, or tensors that do not fit the batch's lengths; what the decoder raises.

        Source: chapter 06."""
        if cache is not self.cache:
            raise ValueError("cache is not the one that the passes were captured with")
        total, wanted = batch.num_tokens, batch.logits_indices
        if any(x.device.type != "cpu" for x in (batch.token_ids, batch.positions, wanted)):
            raise ValueError(f"batch is on {batch.token_ids.device}; it must be built on the host, as device says")
        for name, x in (("token_ids", batch.token_ids), ("positions", batch.positions)):
            if x.shape != (total,) or x.dtype != torch.int64:
                raise ValueError(
                    f"{name} is {x.dtype} {list(x.shape)}; it must be torch.int64 [{total}], as q_lens say"
                )
        if wanted.ndim != 1 or wanted.dtype != torch.int64:
            raise ValueError(f"logits_indices is {wanted.dtype} {list(wanted.shape)}; it must be torch.int64 [R]")
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < total:
            raise ValueError(f"logits_indices holds {wanted.tolist()}; each must be 0 to {total - 1}")
        size = self.size_of(batch)
        if size is None:
            logits = self.model(_moved(batch, self.model.device), cache)
            self.plain += 1
        else:
            logits = self._run(size, batch)[: len(wanted)]
            self.replayed += 1
        return logits

    def size_of(self, batch: Batch) -> Size | None:
        """The size that a batch is padded to; None where it is too large. Source: chapter 06."""
        count, total = len(batch.q_lens), batch.num_tokens
        if batch.tree_mask is not None or len(batch.logits_indices) > count:
            return None
        if max(batch.q_lens, default=0) <= 1 and total == count and (n := _next(self.alone, total)) is not None:
            return Size(n, n, 1)
        n = _next(self.mixed, total)
        if n is None or count + (n > total) > self.rows:  # spare tokens want a row
            return None
        return Size(n, self.rows, n)

    def _run(self, size: Size, batch: Batch) -> Tensor:
        spare_rows, spare = size.rows - len(batch.q_lens), size.tokens - batch.num_tokens
        more = [1] * spare if size.one_each else [spare, *[0] * spare_rows][:spare_rows]
        padded = replace(
            batch, seq_ids=[*batch.seq_ids, *[None] * spare_rows], q_lens=[*batch.q_lens, *more],
            past_lens=[*batch.past_lens, *[0] * spare_rows], max_seqlen_q=size.longest,
        )  # fmt: skip
        self.cache.prepare(padded)
        try:
            self._send(size, batch)
            parts = [size.tokens, size.tokens, size.rows]
            padded.token_ids, padded.positions, padded.logits_indices = self._numbers.device[: sum(parts)].split(parts)
            if size not in self._passes:  # the first batch of a size has all that a replay reads: buffers
                compute = functools.partial(self._compute, padded)
                self._passes[size] = Replayed(compute, self.cache, self._pool)
            return self._passes[size]()
        except BaseException:
            take_back(self.cache, batch.seq_ids, batch.past_lens)
            raise

    def _compute(self, padded: Batch) -> Tensor:
        return self.model.logits(self.model.hidden(padded, self.cache)[padded.logits_indices])

    def _send(self, size: Size, batch: Batch) -> None:
        """Copy tokens, positions and the rows whose logits are wanted to the device, all of them in one."""
        whole = self._numbers.host(2 * size.tokens + size.rows)
        whole[:] = 0
        starts = (0, size.tokens, 2 * size.tokens)
        for start, new in zip(starts, (batch.token_ids, batch.positions, batch.logits_indices), strict=True):
            whole[start : start + len(new)] = new.numpy()
        self._numbers.send(len(whole))


def _next(sizes: Sequence[int], least: int) -> int | None:
    i = bisect.bisect_left(sizes, least)
    return sizes[i] if i < len(sizes) else None


def _spare(size: Size) -> Batch:
    """A batch that is padding and nothing else, of one sequence or of one token each."""
    count = size.rows if size.one_each else 1
    return Batch.build([None] * count, [[0] * (size.tokens // count)] * count, [0] * count)


def _moved(batch: Batch, on: torch.device) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved: dict[str, Any] = {name: x.to(on) for name, x in values.items() if isinstance(x, Tensor)}
    return replace(batch, **moved)
