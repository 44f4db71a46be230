"""The generation loop: send the cache what it has not seen, choose a token, repeat.

The loop asks the cache how many tokens it keeps and sends the rest. With ``NoCache`` that is everything, each time;
with a cache it is the prompt once and then one token a step. Nothing else distinguishes the two.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.batch import Batch, as_int, as_ints
from kvlab.cache import KVCache, take_back
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams, one_each, sample


@dataclass
class Generation:
    """What came of one request.

    Shapes and units: ``prompt`` and ``tokens`` are token ids; ``tokens`` holds the new ones only. ``finish_reason``
    is "stop" (a stop token, which is the last of ``tokens``), or "length" (max_tokens, the model's context, or all
    that a sequence's row in the cache holds).

    Source: chapter 01; the names of the OpenAI and vLLM interfaces.
    """

    prompt: list[int]
    tokens: list[int]
    finish_reason: str | None = None


def check_prompt(model: Decoder, prompt: Sequence[int], name: str = "prompt") -> list[int]:
    """A prompt's token ids as a list of Python ints.

    Raises: ValueError where it is empty, fills the model's context, or holds what is no id of the vocabulary.

    Source: chapter 01.
    """
    prompt = as_ints(prompt, name)
    limit, vocab = model.config.max_seq_len, model.config.vocab_size
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty; it must hold one token or more")
    if len(prompt) >= limit:
        raise ValueError(
            f"{name} has {len(prompt)} tokens; with room for one more it must be under {limit}, the model's context"
        )
    for i, token in enumerate(prompt):
        if not 0 <= token < vocab:
            raise ValueError(f"{name}[{i}] is {token}; a token id must be an integer between 0 and {vocab - 1}")
    return prompt


def _known(cache: KVCache, seq_id: int) -> bool:
    contains = getattr(cache, "__contains__", None)  # knows an empty sequence too, where a cache has it
    return cache.length(seq_id) > 0 or (contains is not None and contains(seq_id))


def begin(model: Decoder, cache: KVCache, prompt: Sequence[int], name: str, seq_id: int) -> Generation:
    """The request of a prompt that the model and the cache can take, under an id that is not in the cache.

    Shapes and units: ``prompt`` is a list of token ids, ``name`` what an error calls it.

    Raises: ValueError as ``check_prompt``, for a prompt longer than a sequence of the cache, or an id in use.

    Source: chapter 01.
    """
    ids, row = check_prompt(model, prompt, name), getattr(cache, "max_seq_len", None)
    if row is not None and len(ids) > row:
        raise ValueError(f"{name} has {len(ids)} tokens; a sequence of this cache holds {row} at most (max_seq_len)")
    _require_unknown(cache, seq_id)
    return Generation(ids, [])


def _require_unknown(cache: KVCache, seq_id: int) -> None:
    if _known(cache, seq_id):
        raise ValueError(
            f"seq_id {seq_id} is already in the cache with {cache.length(seq_id)} tokens; choose another, or free it"
        )


def finish_reason(model: Decoder, cache: KVCache, request: Generation, params: SamplingParams) -> str | None:
    """Why a request is done: "stop", "length", or None where it goes on; its newest token is not stored yet.

    Source: chapter 01.
    """
    if request.tokens and request.tokens[-1] in params.stop_token_ids:
        return "stop"
    if len(request.tokens) >= params.max_tokens:
        return "length"
    length, row = len(request.prompt) + len(request.tokens), getattr(cache, "max_seq_len", None)
    if length >= model.config.max_seq_len or (row is not None and length > row):  # the newest token is not stored yet
        return "length"
    return None


@torch.inference_mode()
def step(
    model: Decoder, cache: KVCache, requests: dict[int, Generation], params: dict[int, SamplingParams]
) -> dict[int, int]:
    """One forward pass over all requests and one new token for each, which is appended to its ``tokens``.

    Shapes and units: both dictionaries are keyed by sequence id; gives {sequence id: token id}.

    Raises: ValueError where a request has no params or nothing to compute (no tokens, or all of them cached), and what
    the cache and the sampler raise. Then no request has changed, and the cache has what it had; a sequence of no tokens
    is freed.

    Source: chapter 01.
    """
    seq_ids = [as_int(s, "a key of requests") for s in requests]
    for s in seq_ids:
        if not isinstance(params.get(s), SamplingParams):
            raise ValueError(f"params[{s}] is {params.get(s)!r}; it must be the SamplingParams of request {s}")
    past = [cache.length(s) for s in seq_ids]
    texts = [[*requests[s].prompt, *requests[s].tokens] for s in seq_ids]
    new = [text[p:] for text, p in zip(texts, past, strict=True)]
    for s, text, p in zip(seq_ids, texts, past, strict=True):
        if len(text) <= p:
            raise ValueError(
                f"request {s} has {len(text)} tokens and {p} are cached; one or more must be left to compute"
            )
    batch = Batch.build(seq_ids, new, past, device=model.device)
    logits = model(batch, cache)
    positions = [len(text) for text in texts]
    labels = [f"sequence {s}, position {p}" for s, p in zip(seq_ids, positions, strict=True)]
    try:
        chosen = sample(logits, [params[s] for s in seq_ids], positions, labels=labels)
    except BaseException:
        take_back(cache, seq_ids, past)
        raise
    for seq_id, token in zip(seq_ids, chosen, strict=True):
        requests[seq_id].tokens.append(token)
    return dict(zip(seq_ids, chosen, strict=True))


def stream(
    model: Decoder,
    cache: KVCache,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seq_id: int = 0,
) -> Iterator[int]:
    """Yield the new tokens of one request as they are made; the sequence is freed at the end, also on an error.

    Shapes and units: ``prompt`` is a list of token ids; yields token ids. The text also ends where a sequence of the
    cache holds no more (``cache.max_seq_len``, if it has one).

    Raises: ValueError for a bad prompt, one longer than a sequence of the cache, params of another type, or a
    ``seq_id`` that is no integer or is already in the cache, all at the call itself; the last again at the first token.

    Source: chapter 01.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r}; it must be one SamplingParams")
    seq_id = as_int(seq_id, "seq_id")
    return _stream(model, cache, begin(model, cache, prompt, "prompt", seq_id), params, seq_id)


def _stream(model: Decoder, cache: KVCache, request: Generation, params: SamplingParams, seq_id: int) -> Iterator[int]:
    _require_unknown(cache, seq_id)  # another may have taken the id since the call
    try:
        while (reason := finish_reason(model, cache, request, params)) is None:
            yield step(model, cache, {seq_id: request}, {seq_id: params})[seq_id]
        request.finish_reason = reason
    finally:
        cache.free(seq_id)


def generate(
    model: Decoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool | None = None,
) -> list[Generation]:
    """Generate for several prompts in one static batch; a finished request leaves it.

    Shapes and units: ``prompts`` are lists of token ids; one ``params`` for all or one each. ``progress`` shows a
    bar on stderr (None: where stderr is a terminal and the run passes two seconds). Gives one ``Generation`` a
    prompt, in order. Sequence ids 0, 1, ... are used and freed. A text also ends where a sequence of the cache holds
    no more (``cache.max_seq_len``, if it has one).

    Raises: ValueError for a bad prompt, one longer than a sequence of the cache, a wrong number of params, or an id in
    use, before anything runs; CacheFull.

    Source: chapter 01.
    """
    every = one_each(SamplingParams() if params is None else params, len(prompts), "prompts")
    requests = {i: begin(model, cache, prompt, f"prompts[{i}]", i) for i, prompt in enumerate(prompts)}
    running = dict(requests)
    bar = progress_bar(sum(p.max_tokens for p in every), progress)
    try:
        while True:
            for i in list(running):
                running[i].finish_reason = finish_reason(model, cache, running[i], every[i])
                if running[i].finish_reason:
                    del running[i]
                    cache.free(i)
            if not running:
                return list(requests.values())
            bar.update(len(step(model, cache, running, dict(enumerate(every)))))
    finally:
        bar.close()
        for i in requests:
            cache.free(i)


@dataclass(frozen=True)
class Hypothesis:
    """One text that beam search found.

    Shapes and units: ``tokens`` holds the new token ids; ``score`` is the sum of their log-probabilities divided by
    their number to the power of the length penalty (with groups, less the diversity penalties);
    ``finish_reason`` is "stop" or "length".

    Source: chapter 02.
    """

    tokens: list[int]
    score: float
    finish_reason: str


class _Group:
    """The beams of one group: those still growing, best first, and the best finished ones."""

    def __init__(self, width: int, first: int) -> None:
        self.width = width
        self.running: list[tuple[int, list[int], float]] = [
            (first, [], 0.0)
        ]  # sequence id, new tokens, log-probability
        self.finished: list[Hypothesis] = []
        self.open = True

    def advance(self, scores: Tensor, stops: Collection[int], longest: int, penalty: float, early: bool | str) -> None:
        """Take the candidates of one step, scores [running beams, vocab]; as Hugging Face's beam search does.

        Twice as many candidates as beams are drawn, or more for several stop tokens, so that enough go on if some stop;
        only a candidate among the first ``width`` may finish. ``chosen`` is then (parent, token, score) of the others.
        """
        vocab, length = scores.shape[1], len(self.running[0][1]) + 1
        count = min(max(2, 1 + len(stops)) * self.width, scores.numel())
        values, places = scores.flatten().topk(count)
        self.chosen: list[tuple[int, int, float]] = []
        self.picked: list[int] = []  # tokens of the candidates that went on or finished
        enough = early is True and len(self.finished) == self.width
        for rank, (score, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            parent, token = divmod(place, vocab)
            stop = token in stops
            if stop or length == longest:
                if rank < self.width:
                    self.picked.append(token)
                if rank < self.width and not enough:
                    tokens = [*self.running[parent][1], token]
                    self.finished.append(Hypothesis(tokens, score / length**penalty, "stop" if stop else "length"))
            elif len(self.chosen) < self.width:
                self.chosen.append((parent, token, score))
                self.picked.append(token)
        self.finished = sorted(self.finished, key=lambda h: -h.score)[: self.width]
        full = len(self.finished) == self.width
        if not self.chosen or (full and early is True):
            self.open = False
        elif full:
            reach = longest if early == "never" and penalty > 0 else length
            self.open = self.chosen[0][2] / reach**penalty > self.finished[-1].score


@torch.inference_mode()
def beam_search(
    model: Decoder,
    cache: KVCache,
    prompt: Sequence[int],
    beam_width: int,
    *,
    max_tokens: int = 16,
    stop_token_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_groups: int = 1,
    diversity_penalty: float = 0.0,
) -> list[Hypothesis]:
    """The ``beam_width`` best texts that keeping so many candidates a step finds, best first.

    A beam is a sequence of the cache. Where one has several children, all but the first are forks of it, made before
    beams without children are freed; what the beams have in common is stored once if the cache can share. With
    ``num_groups`` the beams are split into groups searched side by side, and a token costs a group
    ``diversity_penalty`` for each earlier group's beam that has just chosen it (diverse beam search).

    Shapes and units: ``prompt`` is a list of token ids, the result's tokens are the new ones. ``early_stopping`` is
    True (stop with ``beam_width`` finished texts), False (stop when the best running one is worse than all finished,
    by its present length) or "never" (by its greatest possible length). Sequence ids that the cache does not hold are
    used and freed. A text also ends where a sequence of the cache holds no more (``cache.max_seq_len``). A cache that
    cannot share needs room for 2 · beam_width - 1 sequences.

    Raises: ValueError for a bad prompt, a width or length under 1, groups that do not divide the width, a negative
    diversity penalty, or another ``early_stopping``; CacheFull. The cache is then as before.

    Source: chapter 02; Hugging Face's ``_beam_search``, and Vijayakumar et al. 2016 for the groups.
    """
    prompt, stops = check_prompt(model, prompt), as_ints(stop_token_ids, "stop_token_ids")
    row = getattr(cache, "max_seq_len", None)
    if row is not None and len(prompt) > row:
        raise ValueError(f"prompt has {len(prompt)} tokens; a sequence of this cache holds {row} at most (max_seq_len)")
    beam_width, max_tokens = as_int(beam_width, "beam_width"), as_int(max_tokens, "max_tokens")
    num_groups = as_int(num_groups, "num_groups")
    if beam_width < 1 or max_tokens < 1:
        raise ValueError(f"beam_width is {beam_width} and max_tokens {max_tokens}; both must be 1 or more")
    numbers = (("length_penalty", length_penalty, -100), ("diversity_penalty", diversity_penalty, 0))
    for name, value, least in numbers:
        right = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= 100_000
        if not right or (name == "length_penalty" and value > 100):
            raise ValueError(f"{name} is {value!r}; it must be a finite number, {least} or more and not huge")
    if num_groups < 1 or beam_width % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide beam_width, {beam_width}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f'early_stopping is {early_stopping!r}; it must be True, False or "never"')
    longest = min(max_tokens, model.config.max_seq_len - len(prompt))
    if row is not None:
        longest = min(longest, row + 1 - len(prompt))  # the last token need not be stored
    unused = (n for n in itertools.count() if not _known(cache, n))
    held = {next(unused)}
    groups = [_Group(beam_width // num_groups, min(held)) for _ in range(num_groups)]
    try:
        while any(group.open for group in groups):
            running = [beam for group in groups if group.open for beam in group.running]
            ids = list(dict.fromkeys(seq_id for seq_id, _, _ in running))  # the first step has one beam for all groups
            texts = {seq_id: [*prompt, *tokens] for seq_id, tokens, _ in running}
            past = [cache.length(s) for s in ids]
            batch = Batch.build(ids, [texts[s][p:] for s, p in zip(ids, past, strict=True)], past, device=model.device)
            scores = model(batch, cache).log_softmax(dim=1)
            if bool(scores.isnan().any()):
                raise ValueError(f"the logits of a beam at position {len(prompt) + len(running[0][1])} are not finite")
            log_probs = dict(zip(ids, scores, strict=True))
            taken = torch.zeros(model.config.vocab_size, device=model.device)
            for group in groups:
                if group.open:
                    rows = torch.stack([log_probs[s] for s, _, _ in group.running])
                    totals = torch.tensor([score for _, _, score in group.running], device=rows.device)
                    scores = rows + totals[:, None]
                    if diversity_penalty:
                        scores = scores - diversity_penalty * taken
                    group.advance(scores, stops, longest, length_penalty, early_stopping)
                    for token in group.picked:
                        taken[token] += 1
            _inherit(cache, groups, held, unused)
    finally:
        for seq_id in held:
            cache.free(seq_id)
    found = [hypothesis for group in groups for hypothesis in group.finished]
    return sorted(found, key=lambda h: -h.score)


def _inherit(cache: KVCache, groups: Sequence[_Group], held: set[int], unused: Iterator[int]) -> None:
    """Give every chosen child a sequence: the first of a parent takes over its own, the others fork it first."""
    used: set[int] = set()
    for group in groups:
        children: list[tuple[int, list[int], float]] = []
        for parent, token, score in group.chosen if group.open else ():
            seq_id, tokens, _ = group.running[parent]
            child = seq_id
            if seq_id in used:
                child = next(n for n in unused if n not in held)
                cache.fork(seq_id, child)
                held.add(child)
            used.add(child)
            children.append((child, [*tokens, token], score))
        group.running = children
    for loser in held - used:  # only now: what a loser shares has its other owners already
        cache.free(loser)
        held.discard(loser)


def progress_bar(total: int, progress: bool | None):
    """A bar on stderr for ``total`` tokens; ``progress`` as ``generate`` takes it. Source: chapter 01."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty() if progress is None else not progress
    return tqdm(total=total, unit="token", delay=0 if progress else 2, disable=hidden, leave=False)
