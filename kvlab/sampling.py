"""From logits to the next token: temperature, truncation, and randomness that depends on nothing but the request.

A sampler has two halves. ``processed_probs`` turns logits into the distribution that is really sampled from;
``sample`` draws from it with one uniform number, which is a hash of (seed, position, purpose). Nothing is left of a
global generator: a request's text is the same alone, in a batch, or after it was preempted and resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from kvlab.batch import as_int, as_ints

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen.

    Shapes and units: ``temperature`` 0 is greedy; ``top_k`` 0 keeps all tokens; ``top_p`` in (0, 1], 1 keeps all;
    ``min_p`` in [0, 1], a fraction of the likeliest token's probability; ``seed`` any 64-bit integer, signed or not;
    ``max_tokens`` new tokens at most, 0 or more; a token of ``stop_token_ids`` ends the text and is its last token.

    Raises: ValueError naming the field out of range or of another type.

    Source: chapter 01; vLLM's SamplingParams; Holtzman et al. 2020 (top-p).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name} is {value!r}; it must be a number")
        for name in ("top_k", "seed", "max_tokens"):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
        object.__setattr__(self, "stop_token_ids", tuple(as_ints(self.stop_token_ids, "stop_token_ids")))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be an integer, 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be over 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be an integer, 0 or more")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be an integer of 64 bits")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids are {self.stop_token_ids}; token ids must be 0 or more")


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int, what: str) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``count`` rows or prompts (``what``): the given ones, or one for all.

    Raises: ValueError for another number of them, or where one is no SamplingParams.  Source: chapter 01.
    """
    every = list(params) if isinstance(params, Sequence) else [params] * count
    if len(every) != count:
        raise ValueError(f"params has {len(every)} entries; there are {count} {what}")
    for one in every:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params holds {one!r}; it must be SamplingParams, or a list of them")
    return every


def _mix(x: int) -> int:
    """The finaliser of SplitMix64: every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: str = "sample") -> float:
    """A number in [0, 1) that depends on (seed, position, purpose) and on nothing else.

    Shapes and units: ``position`` is the place in the sequence of the token being chosen; ``purpose`` keeps draws
    for different ends at one position apart (a draft's own draw, its acceptance). Gives a multiple of 2**-53.

    Raises: ValueError where seed or position is no integer.

    Source: chapter 01; Salmon et al. 2011 (counter-based generators), Steele et al. 2014 (SplitMix64).
    """
    seed, position = as_int(seed, "seed"), as_int(position, "position")  # a NumPy or torch integer would wrap
    tag = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    x = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    x = _mix((x ^ position) + 0x9E3779B97F4A7C15 & _MASK)
    x = _mix((x ^ tag) + 0x9E3779B97F4A7C15 & _MASK)
    return (x >> 11) * 2.0**-53


def check_logits(logits: Tensor, labels: Sequence[object]) -> None:
    """Refuse logits [R, vocab] with a NaN, an infinity above, or a row that allows no token; name the row's label.

    Raises: ValueError, also for logits of another shape or another number of labels.  Source: chapter 01.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits have shape {list(logits.shape)}; it must be [rows, vocab], of one token or more")
    if len(labels) != logits.shape[0]:
        raise ValueError(f"labels has {len(labels)} entries; logits have {logits.shape[0]} rows")
    highest = logits.amax(dim=1)  # NaN spreads through amax
    bad = (~torch.isfinite(highest)).nonzero().flatten().tolist()
    if bad:
        found = ", ".join(f"{labels[row]}: maximum {highest[row].item()}" for row in bad[:4])
        raise ValueError(f"logits are not finite, so no token can be chosen ({found}); the model's output is broken")


def processed_probs(logits: Tensor, params: SamplingParams | Sequence[SamplingParams]) -> Tensor:
    """The distributions that ``sample`` draws from: temperature, then top-k, then top-p, then min-p, renormalised.

    Shapes and units: logits [R, vocab]; one ``params`` for all rows or one each; gives [R, vocab] float32. A greedy
    row is one-hot on its argmax (the lowest id among equals). top-k keeps tokens tied with the k-th; top-p keeps the
    shortest run of likeliest tokens whose probability reaches p; one token always stays.

    Raises: ValueError as ``check_logits``, and where the number of params is not the number of rows.

    Source: chapter 01; the order of Hugging Face's logits processors.
    """
    check_logits(logits, [f"row {r}" for r in range(len(logits))])
    return _processed(logits, one_each(params, len(logits), "rows of logits"))


def _processed(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    """``processed_probs`` of logits that are known to be finite."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    if not rows:
        return torch.zeros_like(logits, dtype=torch.float32)
    vocab = logits.shape[1]
    greedy = torch.tensor([p.temperature == 0 for p in rows], device=logits.device)
    limits = torch.finfo(torch.float32)  # the highest logit becomes 0, so no temperature can make a row overflow
    temperature = column([min(max(p.temperature or 1.0, limits.tiny), limits.max) for p in rows])
    wide = logits if logits.dtype == torch.float64 else logits.float()  # a large float64 would not fit a float32
    scaled = (wide - wide.amax(dim=1, keepdim=True)).float() / temperature
    if any(0 < p.top_k < vocab for p in rows):
        ranks = torch.tensor([min(p.top_k or vocab, vocab) - 1 for p in rows], device=logits.device)[:, None]
        kth = scaled.sort(dim=1, descending=True).values.gather(1, ranks)
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = scaled.softmax(dim=1)
    if any(p.top_p < 1 for p in rows):
        sorted_probs, order = probs.sort(dim=1, descending=True, stable=True)
        before = sorted_probs.cumsum(dim=1) - sorted_probs  # probability of the tokens likelier than this one
        cut = (before >= column([p.top_p for p in rows])) & (column([p.top_p for p in rows]) < 1)
        cut[:, 0] = False
        probs = probs.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)
    if any(p.min_p > 0 for p in rows):
        floor = column([p.min_p for p in rows]) * probs.amax(dim=1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
    probs = probs / probs.sum(dim=1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter(1, logits.argmax(dim=1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, probs)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Invert each row's cumulative distribution at its uniform number.

    Shapes and units: probs [R, vocab], uniforms [R] in [0, 1); gives token ids [R] int64, each of positive
    probability. The cumulative sums are float64.

    Raises: ValueError for a row with a probability that is negative or not finite, or without a positive one, and for
    uniforms outside [0, 1) or of another number.

    Source: chapter 01.
    """
    if uniforms.shape != probs.shape[:1]:
        raise ValueError(f"uniforms have shape {list(uniforms.shape)}; probs have {list(probs.shape)}, one row each")
    bad = ~((probs >= 0) & probs.isfinite()).all(dim=1) | ~(probs > 0).any(dim=1)
    if bool(bad.any()):
        raise ValueError(
            f"probs[{bad.nonzero()[0].item()}] is no distribution; it must be 0 or more, finite, and not all 0"
        )
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"uniforms are {uniforms.tolist()}; each must be in [0, 1)")
    return inverse_cdf(probs, uniforms)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """``draw`` from rows that are known to be distributions, without looking at what they hold.

    Shapes and units: probs [R, vocab], uniforms [R]; gives token ids [R] int64.  Source: chapter 01.
    """
    cumulative = probs.double().cumsum(dim=1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last = probs.shape[1] - 1 - (probs.flip(1) > 0).int().argmax(dim=1)
    return torch.minimum(tokens, last)


def sample(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    purpose: str = "sample",
    labels: Sequence[object] | None = None,
) -> list[int]:
    """Choose one token a row.

    Shapes and units: logits [R, vocab]; ``positions[r]`` is the place in its sequence of the token being chosen;
    ``labels`` name the rows in an error. Gives R token ids.

    Raises: ValueError for logits that are not finite, naming the row, and where lengths disagree.

    Source: chapter 01.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        kind = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits have shape {kind}; it must be a tensor's, [rows, vocab]")
    places = as_ints(positions, "positions")
    if len(places) != len(logits):
        raise ValueError(f"positions has {len(places)} entries; logits have {len(logits)} rows")
    rows = one_each(params, len(logits), "rows of logits")
    if labels is None:
        labels = [f"row {r}, position {p}" for r, p in enumerate(places)]
    if all(p.temperature == 0 for p in rows) and logits.numel() and len(labels) == len(rows):
        finite = torch.isfinite(logits.amax(dim=1))
        tokens, good = torch.stack([logits.argmax(dim=1), finite.long()]).tolist()  # both at once: a GPU is read once
        if all(good):
            return tokens
    check_logits(logits, labels)
    uniforms = [uniform(p.seed, position, purpose) for p, position in zip(rows, places, strict=True)]
    probs = _processed(logits, rows)
    return inverse_cdf(probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device)).tolist()
