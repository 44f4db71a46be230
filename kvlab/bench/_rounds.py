"""Speculative rounds at the speed of the device: passes of fixed shape, captured in CUDA graphs.

``speculative.generate`` reads every token that is drafted, so at batch 1 Python takes longer than a small model. Here
the host does what it must between passes (tables, slots, lengths) and reads the device once a step, for the plain loop
and the speculative one alike, through the same paged cache and the same graphs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab import flash_decoding
from kvlab.batch import Batch
from kvlab.bench._captured import Replayed
from kvlab.bench._timing import measure
from kvlab.model import Decoder
from kvlab.paged import PagedCache
from kvlab.paged._cache import Buffer
from kvlab.speculative import greedy_sample


class Pass:
    """One forward pass over B sequences of ``q_len`` new tokens each, replayed from a graph where there is a GPU.

    Shapes and units: ``tokens`` [B, q_len] int64 is where the new tokens have to stand; ``finish(tokens, logits)``
    turns them and the logits [B, q_len, vocab] float32 into what is wanted, on the device; ``result`` is what it gave
    last.

    Source: chapter 05.
    """

    def __init__(
        self, model: Decoder, cache: PagedCache, batch: int, q_len: int, finish: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.model, self.cache, self.q_len, self.finish = model, cache, q_len, finish
        on = model.device
        self.tokens = torch.zeros(batch, q_len, dtype=torch.int64, device=on)
        self._batch = Batch.build(range(batch), [[0] * q_len] * batch, [0] * batch, device=on, all_logits=True)
        self._batch.token_ids = self.tokens.view(-1)
        self._past = Buffer(np.int64, on)
        self._run = Replayed(self._compute, cache)

    @property
    def result(self) -> Tensor:
        """What ``finish`` gave last. Source: chapter 05."""
        return self._run.result

    def __call__(self, past: Sequence[int]) -> Tensor:
        """Run the pass on ``tokens``, which follow ``past`` tokens of each sequence; gives ``result``.

        Source: chapter 05.
        """
        self._batch.past_lens = list(past)
        self.cache.prepare(self._batch)
        self._past.host(len(past))[:] = past
        self._past.send(len(past))
        return self._run()

    def _compute(self) -> Tensor:
        batch, past = self._batch, self._past.device[: len(self.tokens)]
        batch.positions = (past[:, None] + torch.arange(self.q_len, device=past.device)).view(-1)
        batch.seq_lens = (past + self.q_len).int()
        logits = self.model.logits(self.model.hidden(batch, self.cache))
        return self.finish(self.tokens, logits.view(*self.tokens.shape, -1))


def best(tokens: Tensor, logits: Tensor) -> Tensor:
    """The likeliest token after each of ``tokens``: logits [B, q_len, vocab] to [B, q_len] int64.

    Source: chapter 05.
    """
    return logits.argmax(dim=-1)


def judge(tokens: Tensor, logits: Tensor) -> Tensor:
    """Accepted drafts, their number and the target's token in one tensor, so that it is read at once.

    Shapes and units: tokens [B, 1 + gamma], the newest and its drafts; logits [B, 1 + gamma, vocab]; gives the number
    and then ``Accepted.tokens``, [B, 2 + gamma] int64.

    Source: chapter 05.
    """
    made = greedy_sample(tokens[:, 1:].contiguous(), best(tokens, logits))
    return torch.cat([made.num_accepted[:, None], made.tokens], dim=1)


@dataclass
class Run:
    """What a timed run did: ``texts`` the new tokens of each sequence, ``seconds`` of the loop, ``times`` of its steps.

    ``accepted`` holds the accepted drafts of every sequence and step. Source: chapter 05.
    """

    texts: list[list[int]]
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps. Source: chapter 05."""
        return len(self.times)

    @property
    def step_seconds(self) -> float:
        """The median time of a step, which what else a machine does disturbs least. Source: chapter 05."""
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, all sequences together. Source: chapter 05."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """New tokens that one sequence gets a step. Source: chapter 05."""
        return sum(map(len, self.texts)) / max(1, self.steps * len(self.texts))


class Parts(NamedTuple):
    """Milliseconds of what the loops are made of: a plain step, all drafts of a step, their verification.

    Source: chapter 05.
    """

    plain: float
    drafts: float
    verify: float


class Comparison(NamedTuple):
    """Both loops and the parts of their steps: medians over turns, in each of which all of them were timed.

    Shapes and units: ``plain`` and ``fast`` in seconds a step, without drafts and with them, which give a sequence one
    token and ``tokens_per_step``.

    Source: chapter 05.
    """

    plain: float
    fast: float
    tokens_per_step: float
    parts: Parts

    @property
    def speedup(self) -> float:
        """How many times faster the loop with drafts writes. Source: chapter 05."""
        return self.tokens_per_step * self.plain / self.fast


class Rounds:
    """Greedy decoding of B prompts, plain or with a chain of drafts, after the prompts were read.

    The draft's first pass always reads the last two tokens of a text. One of them may be in its cache already, but the
    shape is the same after every step, whatever was accepted.

    Shapes and units: ``gamma`` draft tokens a step; ``longest`` tokens a text may reach, drafts included; ``imposed``
    is a probability with which drafts are taken to be accepted, whatever they are (with random weights none would be):
    the text is then no model's, but every pass does its work.

    Raises: ValueError where a prompt has fewer than two tokens or is too long.

    Source: chapter 05; Leviathan et al. 2023.
    """

    def __init__(
        self, target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], gamma: int, longest: int, *,
        block_size: int = 16, imposed: float | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        for i, prompt in enumerate(prompts):
            if not 2 <= len(prompt) < longest - gamma:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens; it must have 2 or more, and under {longest - gamma}"
                )
        self.gamma, self.longest, self.imposed, self.rng = gamma, longest, imposed, random.Random(seed)
        self.prompts, self.count = [list(p) for p in prompts], len(prompts)
        self.models = {"target": target, "draft": draft}
        blocks = -(-longest // block_size) * self.count
        self.caches = {
            name: PagedCache(
                model.config, blocks, block_size, attention=flash_decoding.attention, dtype=model.dtype,
                device=model.device,
            )
            for name, model in self.models.items()
        }  # fmt: skip
        self.plain, self.verify = (
            Pass(target, self.caches["target"], self.count, q_len, finish)
            for q_len, finish in ((1, best), (gamma + 1, judge))
        )
        self.draft_first, self.draft_next = (
            Pass(draft, self.caches["draft"], self.count, q_len, best) for q_len in (2, 1)
        )

    def run(self, new: int, *, speculate: bool) -> Run:
        """Write ``new`` tokens or more after each prompt, and time it without the prompts.

        Shapes and units: a sequence that reaches ``new`` first goes on with the others, and what it writes counts.

        Source: chapter 05.
        """
        texts = [list(prompt) for prompt in self.prompts]
        for seq_id in range(self.count):
            for cache in self.caches.values():
                cache.free(seq_id)
        with torch.inference_mode():
            self._read(texts)
            done = Run([])
            step = self._speculative_step if speculate else self._plain_step
            self._wait()
            start = time.perf_counter()
            while min(len(text) - len(prompt) for text, prompt in zip(texts, self.prompts, strict=True)) < new:
                if max(map(len, texts)) + self.gamma + 1 > self.longest:
                    break
                begin = time.perf_counter()
                done.accepted += step(texts)
                done.times.append(time.perf_counter() - begin)  # a step ends with what it reads of the device
            self._wait()
            done.seconds = time.perf_counter() - start
        done.texts = [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]
        return done

    def parts(self, length: int, seconds: float) -> Parts:
        """Time what ``run`` does in a step, each part alone and waited for, on texts of ``length`` tokens.

        Nothing of the host's work is left out, or added: before each part the books are as a step finds them whose last
        drafts were all rejected, and putting them there is off the clock. What the caches hold does not matter.

        Shapes and units: about ``seconds`` of each part; gives milliseconds.

        Raises: ValueError where such texts leave no room for a step.

        Source: chapter 05.
        """
        if not 2 <= length <= self.longest - self.gamma - 1:
            raise ValueError(f"length is {length}; it must be 2 to {self.longest - self.gamma - 1} tokens")
        texts = [[0] * length for _ in self.prompts]
        known = {"target": length - 1, "draft": length + self.gamma - 2}

        def reset() -> None:
            for seq_id, text in enumerate(texts):
                del text[length:]
                for name, cache in self.caches.items():
                    cache.free(seq_id)
                    cache.manager.ensure(seq_id, self.longest)
                    cache.manager.advance(seq_id, known[name])

        def timed(part: Callable[[list[list[int]]], object]) -> float:
            for _ in range(3):  # captured by then
                reset()
                part(texts)
            device = self.models["target"].device
            return measure(
                lambda i: part(texts), device=device, seconds=seconds, min_count=3, max_count=100, host=True,
                reset=reset,
            ).ms  # fmt: skip

        with torch.inference_mode():
            return Parts(*(timed(part) for part in (self._plain_step, self._draft, self._verify)))

    def compare(self, new: int, *, turns: int = 3, seconds: float = 0.1) -> Comparison:
        """Time both loops over ``new`` tokens, and their parts halfway, in turns: the speed of a machine drifts.

        Shapes and units: about ``seconds`` of each part in each turn.

        Raises: ValueError as ``parts``.

        Source: chapter 05.
        """
        for speculate in (False, True):
            self.run(min(new, 8 * (self.gamma + 1)), speculate=speculate)  # warm, and captured
        halfway = max(map(len, self.prompts)) + new // 2
        rows = [
            (self.run(new, speculate=False), self.run(new, speculate=True), self.parts(halfway, seconds))
            for _ in range(turns)
        ]
        plain, fast, parts = zip(*rows, strict=True)
        return Comparison(
            statistics.median(run.step_seconds for run in plain), statistics.median(run.step_seconds for run in fast),
            statistics.mean(run.tokens_per_step for run in fast),
            Parts(*map(statistics.median, zip(*parts, strict=True))),
        )  # fmt: skip

    def _read(self, texts: list[list[int]]) -> None:
        """Put all of the prompts but their last tokens into both caches, and take the blocks of the longest text."""
        for name, cache in self.caches.items():
            known = [text[: -2 if name == "draft" else -1] for text in texts]
            some = [seq_id for seq_id, tokens in enumerate(known) if tokens]
            if some:
                new = [known[seq_id] for seq_id in some]
                self.models[name](Batch.build(some, new, [0] * len(some), device=self.models[name].device), cache)
            self._reserve(name)

    def _reserve(self, name: str) -> None:
        """A captured table must keep its width."""
        self.caches[name].manager.ensure_all(dict.fromkeys(range(self.count), self.longest))

    def _rewind(self, name: str, lengths: Sequence[int]) -> None:
        cache = self.caches[name]
        for seq_id, length in enumerate(lengths):
            if cache.length(seq_id) > length:
                cache.truncate(seq_id, length)
        self._reserve(name)

    def _wait(self) -> None:
        if self.models["target"].device.type == "cuda":
            torch.cuda.synchronize()

    def _plain_step(self, texts: list[list[int]]) -> list[int]:
        self.plain.tokens.copy_(torch.tensor([text[-1:] for text in texts]))
        for text, row in zip(texts, self.plain([len(text) - 1 for text in texts]).tolist(), strict=True):
            text += row
        return []

    def _speculative_step(self, texts: list[list[int]]) -> list[int]:
        self._draft(texts)
        return self._verify(texts)

    def _draft(self, texts: list[list[int]]) -> None:
        """Put the newest token of each text and its drafts where they are verified."""
        past = [len(text) - 1 for text in texts]
        self._rewind("draft", [n - 1 for n in past])
        self.draft_first.tokens.copy_(torch.tensor([text[-2:] for text in texts]))
        self.verify.tokens[:, 0].copy_(self.draft_first.tokens[:, 1])
        newest = self.draft_first([n - 1 for n in past])[:, 1]
        for i in range(1, self.gamma + 1):
            self.verify.tokens[:, i].copy_(newest)
            if i < self.gamma:
                self.draft_next.tokens[:, 0].copy_(newest)
                newest = self.draft_next([n + i for n in past])[:, 0]

    def _verify(self, texts: list[list[int]]) -> list[int]:
        """Append what is accepted and the target's own token; gives the number of accepted drafts of each text."""
        past, accepted = [len(text) - 1 for text in texts], []
        for text, (count, *tokens) in zip(texts, self.verify(past).tolist(), strict=True):
            if self.imposed is not None:
                count = self._imposed_count()
                tokens = [max(token, 0) for token in tokens]
            text += tokens[: count + 1]
            accepted.append(count)
        self._rewind("target", [len(text) - 1 for text in texts])
        return accepted

    def _imposed_count(self) -> int:
        assert self.imposed is not None
        count = 0
        while count < self.gamma and self.rng.random() < self.imposed:
            count += 1
        return count
