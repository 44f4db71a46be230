"""Distributions: do so many draws come from it, and two models whose distributions are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.sampling import SamplingParams, inverse_cdf, processed_probs


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
