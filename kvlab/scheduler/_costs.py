"""How long a step takes: counted on the roofline, or fitted to steps that were timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from kvlab import costs
from kvlab.batch import as_int, as_ints
from kvlab.config import ModelConfig
from kvlab.costs import Hardware
from kvlab.scheduler import _checks as checks
from kvlab.scheduler._step import Step


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that the time of a step depends on.

    Shapes and units: ``decodes`` requests with one new token each, which read ``decode_kv`` tokens of cache in all;
    ``chunks`` parts of prompts with ``chunk_tokens`` new tokens in all, which read ``chunk_kv`` tokens of cache and
    compute ``chunk_pairs`` pairs of a query and a key that it sees.

    Raises: ValueError for a number that is no integer or below 0.

    Source: chapter 06.
    """

    decodes: int
    decode_kv: int
    chunks: int = 0
    chunk_tokens: int = 0
    chunk_kv: int = 0
    chunk_pairs: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int:
                object.__setattr__(self, name, value := as_int(value, name))
            if not 0 <= value < 2**63:
                raise ValueError(f"{name} is {value}; it must be 0 or more, and under 2**63")

    @classmethod
    def of(cls, step: Step) -> StepShape:
        """The shape of a step, to be asked before ``update``. Raises: ValueError for what is none.

        Source: chapter 06."""
        checks.require(step, Step, "step")
        lens = [r.num_tokens for r in step.decodes]
        if not step.prefills:
            return cls(len(lens), sum(lens))
        return cls.build(lens, [(q, r.num_computed_tokens + q) for r, q in step.prefills.items()])

    @classmethod
    def build(cls, decode_lens: Sequence[int], chunks: Sequence[tuple[int, int]] = ()) -> StepShape:
        """The shape of decodes that then have these lengths, and chunks of (new tokens, length once they are computed).

        Raises: ValueError for a length that is no integer or below 1, or a chunk that is no such pair.

        Source: chapter 06.
        """
        lens, parts = as_ints(decode_lens, "decode_lens"), [_chunk(c) for c in checks.entries(chunks, "chunks")]
        if lens and min(lens) < 1:
            raise ValueError(f"decode_lens holds {min(lens)}; a text that decodes has one token or more")
        pairs = sum(costs.visible_pairs(q, kv) for q, kv in parts)
        return cls(len(lens), sum(lens), len(parts), sum(q for q, _ in parts), sum(kv for _, kv in parts), pairs)

    @property
    def num_tokens(self) -> int:
        """New tokens in all. Source: chapter 06."""
        return self.decodes + self.chunk_tokens


_COUNTS = tuple(part.name for part in fields(StepShape))


def _chunk(chunk: Sequence[int]) -> tuple[int, int]:
    found = as_ints(chunk, "chunks: a chunk")
    if len(found) != 2 or not 1 <= found[0] <= found[1]:
        raise ValueError(f"chunks hold {chunk!r}; each must be (new tokens, length), 1 or more and at most the length")
    return found[0], found[1]


class CostModel(Protocol):
    """Anything that says how long a step takes. Source: chapter 06."""

    label: str

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step. Source: chapter 06."""
        ...


class RooflineCost:
    """The least time of a step whose operators run one after another: products with weights, then attention, and each
    takes its bytes or its operations at the hardware's rates, whichever is longer.

    Shapes and units: ``overhead``, in seconds, is added to each step.

    Raises: ValueError for a mixture of experts, whose weights are not read in proportion, a negative overhead, or an
    argument of a wrong type; and, of each method, for what is no StepShape.

    Source: chapter 06; Williams et al. 2009.
    """

    def __init__(self, config: ModelConfig, hardware: Hardware, dtype: str = "bf16", overhead: float = 0.0) -> None:
        checks.require(config, ModelConfig, "config")
        checks.require(hardware, Hardware, "hardware")
        if config.moe is not None:
            raise ValueError(f"config is {config.name}, which has experts; its work is not proportional to its tokens")
        self.hardware, self.overhead = hardware, checks.seconds(overhead, "overhead", least=0)
        self.label = f"roofline of {config.name} on {hardware.name}"
        one, two = costs.forward(config, [1], [1], dtype), costs.forward(config, [1, 1], [1, 1], dtype)
        pair = costs.forward(config, [2], [2], dtype)
        self._weights, self._kv_bytes, self._pair_flops = one.bytes_weights, one.bytes_kv_read, one.flops_attention
        self._token_bytes = one.bytes_kv_write + one.bytes_activations
        self._token_flops = pair.flops_linear - one.flops_linear
        self._head_flops = two.flops_linear - pair.flops_linear  # of one sequence's logits

    def _parts(self, shape: StepShape) -> tuple[tuple[float, float], tuple[float, float]]:
        """(bytes, operations) of the products with weights and what belongs to them, and of attention."""
        checks.require(shape, StepShape, "shape")
        tokens, kv = shape.num_tokens, shape.decode_kv + shape.chunk_kv
        flops = tokens * self._token_flops + (shape.decodes + shape.chunks) * self._head_flops
        pairs = shape.decode_kv + shape.chunk_pairs
        return (self._weights + tokens * self._token_bytes, flops), (kv * self._kv_bytes, pairs * self._pair_flops)

    def work(self, shape: StepShape) -> tuple[float, float]:
        """Bytes and operations of a step. Source: chapter 00."""
        (linear_bytes, linear_flops), (attention_bytes, attention_flops) = self._parts(shape)
        return linear_bytes + attention_bytes, linear_flops + attention_flops

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step, the overhead included. Source: chapter 06."""
        linear, attention = self._parts(shape)
        return self._time(*linear) + self._time(*attention) + self.overhead

    def floor(self, shape: StepShape) -> float:
        """Seconds under which no step runs, its operators overlapping in any way: ``costs.roofline_time`` of the pass.

        Source: Williams et al. 2009."""
        return self._time(*self.work(shape))

    def utilisation(self, shape: StepShape) -> tuple[float, float]:
        """The share of the step's time for which memory and arithmetic are busy. Source: chapter 06."""
        (nbytes, flops), time = self.work(shape), self.seconds(shape)
        return nbytes / self.hardware.bandwidth / time, flops / self.hardware.flops / time

    def _time(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self.hardware.bandwidth, flops / self.hardware.flops)


_TOKENS, _KEYS = (64, 128, 256, 512, 1024, 2048), (30_000, 100_000)  # where a slope may rise
_TERMS = (
    "a step", "a decode", "a token", *(f"a token over {knot}" for knot in _TOKENS), "a key read by a decode",
    *(f"one over {knot}" for knot in _KEYS), "a key read by a chunk", "a pair of a chunk",
)  # fmt: skip


def _terms(shape: StepShape) -> tuple[float, ...]:
    """What each coefficient of a fitted model is multiplied with."""
    checks.require(shape, StepShape, "shape")
    tokens, keys = shape.num_tokens, shape.decode_kv
    over = [max(0, tokens - knot) for knot in _TOKENS]
    more = [max(0, keys - knot) for knot in _KEYS]
    return (1, shape.decodes, tokens, *over, keys, *more, shape.chunk_kv, shape.chunk_pairs)


@dataclass(frozen=True)
class FittedCost:
    """A step time that is a sum of terms, each with a coefficient that is 0 or more, fitted to timed steps.

    A step as such costs something, then each token, each key that is read, each pair of a chunk. What begins free,
    behind the host's launches or one read of the weights, costs more from some number on: a slope may rise, never fall.

    Shapes and units: ``coefficients`` in seconds a unit of each of ``TERMS``, in that order; ``residuals`` are
    (predicted - measured) / measured, of each step fitted.

    Raises: ValueError for another number of coefficients, or a number of a wrong type or out of range.

    Source: chapter 06.
    """

    TERMS = _TERMS
    coefficients: tuple[float, ...]
    residuals: tuple[float, ...] = field(default=(), repr=False)
    label: str = "fitted"

    def __post_init__(self) -> None:
        coefficients = checks.entries(self.coefficients, "coefficients")
        if len(coefficients) != len(self.TERMS):
            raise ValueError(f"coefficients has {len(coefficients)} entries; they must be {len(self.TERMS)}")
        for name, values, least in (
            ("coefficients", coefficients, 0.0), ("residuals", checks.entries(self.residuals, "residuals"), -1.0),
        ):  # fmt: skip
            found = tuple(checks.number(value, f"{name}[{i}]", least) for i, value in enumerate(values))
            object.__setattr__(self, name, found)

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step. Source: chapter 06."""
        return sum([c * x for c, x in zip(self.coefficients, _terms(shape), strict=True) if c])

    @property
    def worst(self) -> float:
        """The largest residual, without its sign; 0 where there are none. Source: chapter 06."""
        return max(map(abs, self.residuals), default=0.0)

    @property
    def typical(self) -> float:
        """The root mean square of the residuals; 0 where there are none. Source: chapter 06."""
        return float(np.sqrt(np.mean(np.square(self.residuals)))) if self.residuals else 0.0


def fit(shapes: Iterable[StepShape], seconds: Iterable[float], label: str = "fitted") -> FittedCost:
    """Fit a model to timed steps: least squares of the relative errors, with no coefficient below 0.

    Shapes and units: one time in seconds for each shape.

    Raises: ValueError where the numbers of them differ, there are none, one is no shape, or a time is not finite and
    positive.

    Source: chapter 06; Lawson and Hanson 1974 (non-negative least squares).
    """
    steps, found = checks.entries(shapes, "shapes"), checks.entries(seconds, "seconds")
    times = np.array([checks.seconds(t, f"seconds[{i}]") for i, t in enumerate(found)], dtype=np.float64)
    if len(steps) != len(times) or not steps:
        raise ValueError(
            f"shapes has {len(steps)} entries and seconds {len(times)}; both must have one a step, 1 or more"
        )
    if (times <= 0).any():
        raise ValueError(f"seconds holds {times.min()}; a step takes a positive time")
    terms = np.array([_terms(shape) for shape in steps], dtype=np.float64)
    scale = np.maximum(terms.max(axis=0), 1e-300)  # coefficients differ by ten orders of magnitude
    coefficients = _non_negative(terms / scale / times[:, None], np.ones(len(times))) / scale
    residuals = terms @ coefficients / times - 1
    return FittedCost(tuple(coefficients.tolist()), tuple(residuals.tolist()), label)


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes a @ x closest to b, by Lawson and Hanson's active sets."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[free] = 0.0
        entering = int(gradient.argmax())
        if gradient[entering] <= 1e-10 * max(1.0, float(abs(a.T @ b).max())):
            break
        free[entering] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            blocked = free & (trial <= 0)
            if not blocked.any():
                x = trial
                break
            room = x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300)
            x = x + room.min() * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            if not free.any():
                break
    return x


def fit_records(records: Iterable[Mapping[str, Any]], label: str = "model fitted to recorded steps") -> FittedCost:
    """Fit a model to records of ``python -m kvlab.bench scheduler --only steps``, as ``figures.records`` gives them.

    Raises: ValueError as ``fit``, or for a record that has no time or lacks a part of the shape.  Source: chapter 06.
    """
    shapes, times = [], []
    for row in checks.entries(records, "records"):
        if not isinstance(row, Mapping) or not isinstance(row.get("shape"), Mapping):
            raise ValueError(f"records hold {row!r:.80}; each must have a shape, and its ms")
        if missing := [name for name in _COUNTS if name not in row["shape"]]:
            raise ValueError(f"records hold a shape without {', '.join(missing)}; a step's has {', '.join(_COUNTS)}")
        shapes.append(StepShape(**{name: row["shape"][name] for name in _COUNTS}))
        times.append(checks.number(row.get("ms"), "records: ms") / 1e3)
    return fit(shapes, times, label)
