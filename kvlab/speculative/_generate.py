"""The speculative loop: propose, verify all of it in one pass, keep what was accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.batch import Batch, as_int
from kvlab.cache import CacheFull, KVCache, take_back
from kvlab.generate import Generation, begin, finish_reason, progress_bar
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams, check_logits, one_each, processed_probs, uniform
from kvlab.speculative._drafters import Draft, Drafter
from kvlab.speculative._rejection import Accepted, greedy_sample, rejection_sample
from kvlab.speculative._tree import Tree

_NOTHING = Draft([], Tree(()))


@dataclass
class SpecDecodingStats:
    """How speculation went, in vLLM's names.

    Shapes and units: ``num_drafts`` proposals of ``num_draft_tokens`` tokens in all, of which ``num_accepted_tokens``
    were accepted; ``num_accepted_tokens_per_pos[j]`` of the proposals had a token accepted at depth j + 1.
    ``num_steps`` counts verified sequences, also those with no proposal, ``num_emitted_tokens`` what they got.

    Source: chapter 05; vLLM's SpecDecodingStats.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_emitted_tokens: int = 0

    def observe(self, num_draft_tokens: int, num_accepted: int, num_emitted: int) -> None:
        """Count one sequence's step: how many tokens were proposed, accepted and emitted.

        Raises: ValueError for a number under 0, or more accepted than proposed.  Source: chapter 05.
        """
        counts = {"num_draft_tokens": num_draft_tokens, "num_accepted": num_accepted, "num_emitted": num_emitted}
        num_draft_tokens, num_accepted, num_emitted = (as_int(value, name) for name, value in counts.items())
        if min(num_draft_tokens, num_accepted, num_emitted) < 0 or num_accepted > num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}, num_accepted {num_accepted} and num_emitted {num_emitted}; "
                "they must be 0 or more, and no more accepted than proposed"
            )
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted
            missing = num_accepted - len(self.num_accepted_tokens_per_pos)
            self.num_accepted_tokens_per_pos += [0] * max(0, missing)
            for depth in range(num_accepted):
                self.num_accepted_tokens_per_pos[depth] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a proposal yields: the accepted ones and the target's own. 1 without any. Source: vLLM."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """The share of the proposed tokens that were accepted. Source: vLLM."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """The share of proposals that had a token accepted at depth 1, 2, ... Source: vLLM."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one verified sequence got on average, steps without a proposal included. Source: chapter 05."""
        return self.num_emitted_tokens / max(1, self.num_steps)


def generate(
    model: Decoder,
    cache: KVCache,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    stop: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    progress: bool | None = None,
) -> tuple[list[Generation], SpecDecodingStats]:
    """``kvlab.generate.generate`` with speculation: the same distribution, and the same text where it is greedy.

    Shapes and units: as ``kvlab.generate.generate``, whose sequence ids it uses and frees, in the drafter too; also
    gives the statistics. A text ends as soon as ``decode`` of its new tokens holds one of the strings in ``stop``; the
    token that completes it is the last.

    Raises: ValueError as ``kvlab.generate.generate``, for a drafter that does not fit the model or shares the cache,
    and for stop strings that are empty or without ``decode``, before anything runs; CacheFull where a step has no room
    even without proposals.

    Source: chapter 05; Leviathan et al. 2023, Chen et al. 2023.
    """
    _check_drafter(drafter)
    drafter.check(model)
    if cache is not None and getattr(drafter, "cache", None) is cache:
        raise ValueError("cache is also the drafter's; the two models need a cache each")
    stops = _check_stop(stop, decode)
    every = one_each(SamplingParams() if params is None else params, len(prompts), "prompts")
    requests = {i: begin(model, cache, prompt, f"prompts[{i}]", i) for i, prompt in enumerate(prompts)}
    settings, stats = dict(enumerate(every)), SpecDecodingStats()
    bar = progress_bar(sum(p.max_tokens for p in every), progress)
    running = dict(requests)
    try:
        for i, request in requests.items():
            drafter.free(i)  # whatever it knew under this id was of another text
            request.finish_reason = finish_reason(model, cache, request, settings[i])
        while True:
            for i in [i for i, request in running.items() if request.finish_reason]:
                del running[i]
                cache.free(i)
                drafter.free(i)
            if not running:
                return list(requests.values()), stats
            made = step(model, cache, drafter, running, settings, stats=stats, stops=stops)
            bar.update(sum(map(len, made.values())))
    finally:
        bar.close()
        for i in requests:
            cache.free(i)
            drafter.free(i)


def _check_drafter(drafter: Drafter) -> None:
    wanted = ("check", "propose", "accepted", "free")
    if isinstance(drafter, type) or not all(callable(getattr(drafter, name, None)) for name in wanted):
        raise ValueError(f"drafter is {drafter!r}; it must have the methods {', '.join(wanted)}")


def _check_stop(stop: Sequence[str], decode: Callable[[list[int]], str] | None) -> Callable[[list[int]], bool] | None:
    """Whether new tokens hold a stop string; None where there is none to look for."""
    listed = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not listed or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop is {stop!r}; it must be a list of strings that are not empty")
    if not stop:
        return None
    if not callable(decode):
        raise ValueError(
            f"stop is {list(stop)} and decode {decode!r}; stop strings need decode, from token ids to text"
        )

    def stops(tokens: list[int]) -> bool:
        text = decode(tokens)
        if not isinstance(text, str):
            raise ValueError(f"decode gives {text!r}; it must give a string")
        return any(s in text for s in stop)

    return stops


@torch.inference_mode()
def step(
    model: Decoder,
    cache: KVCache,
    drafter: Drafter,
    requests: Mapping[int, Generation],
    params: Mapping[int, SamplingParams],
    *,
    stats: SpecDecodingStats | None = None,
    stops: Callable[[list[int]], bool] | None = None,
) -> dict[int, list[int]]:
    """One round: a sequence whose prompt is not cached gets its first token, every other one proposes and is verified.

    New tokens are appended to each request until one ends it (``finish_reason`` is then set), and the rest is
    forgotten. Afterwards the cache holds all tokens of a text but the last.

    Shapes and units: requests and params are keyed by sequence id; ``stops`` says of a request's new tokens whether
    they end it; gives {sequence id: new token ids}.

    Raises: ValueError where a request has no params or nothing to compute or a proposal does not fit the target, and
    what cache, sampler, drafter and ``stops`` raise. The sequences of the pass that failed are then as before.

    Source: chapter 05.
    """
    stats = SpecDecodingStats() if stats is None else stats
    texts = {s: [*r.prompt, *r.tokens] for s, r in requests.items()}
    for s, text in texts.items():
        if not isinstance(params.get(s), SamplingParams):
            raise ValueError(f"params[{s}] is {params.get(s)!r}; it must be the SamplingParams of request {s}")
        if len(text) <= cache.length(s):
            raise ValueError(
                f"request {s} has {len(text)} tokens and {cache.length(s)} are cached; one or more must be left"
            )
    ready = {s: text for s, text in texts.items() if len(text) - cache.length(s) == 1}
    fresh = {s: text for s, text in texts.items() if s not in ready}
    made: dict[int, list[int]] = {}
    if fresh:
        verdicts = _verify(model, cache, requests, fresh, dict.fromkeys(fresh, _NOTHING), params, stops)
        _settle(cache, drafter, requests, verdicts)
        made |= {s: verdict.tokens for s, verdict in verdicts.items()}
    if ready:
        drafts = _drafts(model, cache, drafter, requests, ready, params)
        try:
            verdicts = _verify(model, cache, requests, ready, drafts, params, stops)
        except CacheFull:
            if not any(draft.tokens for draft in drafts.values()):
                raise
            drafts = dict.fromkeys(ready, _NOTHING)
            verdicts = _verify(model, cache, requests, ready, drafts, params, stops)
        for s, verdict in verdicts.items():
            accepted = min(len(verdict.tokens), len(verdict.nodes))
            stats.observe(len(drafts[s].tokens), accepted, len(verdict.tokens))
        _settle(cache, drafter, requests, verdicts)
        made |= {s: verdict.tokens for s, verdict in verdicts.items()}
    return made


def _drafts(
    model: Decoder, cache: KVCache, drafter: Drafter, requests: Mapping[int, Generation],
    texts: Mapping[int, list[int]], params: Mapping[int, SamplingParams],
) -> dict[int, Draft]:  # fmt: skip
    """A proposal for every text, no deeper than can be of use and no larger than fits."""
    row = getattr(cache, "max_seq_len", None)
    depths, slots = {}, {}
    for s, text in texts.items():
        left = params[s].max_tokens - len(requests[s].tokens)
        slots[s] = (model.config.max_seq_len if row is None else row) - len(text)
        depths[s] = min(left, model.config.max_seq_len - len(text)) - 1  # the target adds a token of its own
        depths[s] = min(depths[s], slots[s], drafter.num_speculative_tokens)
    able = {s: text for s, text in texts.items() if depths[s] > 0}
    proposed = drafter.propose(able, params, depths) if able else {}
    if not isinstance(proposed, Mapping):
        raise ValueError(f"drafter proposes {proposed!r}; it must propose a Draft for each sequence id, or for some")
    for s in able:
        if s in proposed:
            _check_draft(s, proposed[s], model)
    return {s: proposed[s].cut(slots[s]) if s in able and s in proposed else _NOTHING for s in texts}


def _check_draft(seq_id: int, draft: Draft, model: Decoder) -> None:
    """Refuse what is no Draft, or one of another vocabulary or on another device than the target's."""
    if not isinstance(draft, Draft):
        raise ValueError(f"drafter proposes {draft!r} for sequence {seq_id}; it must be a Draft")
    vocab, on = model.config.vocab_size, model.device
    for token in draft.tokens:
        if not 0 <= token < vocab:
            raise ValueError(
                f"drafter proposes token {token} for sequence {seq_id}; it must be between 0 and {vocab - 1}"
            )
    if draft.probs is not None and (draft.probs.shape[1] != vocab or draft.probs.device != on):
        raise ValueError(
            f"drafter proposes probs over {draft.probs.shape[1]} tokens on {draft.probs.device} for sequence {seq_id}; "
            f"they must be over {vocab} on {on}"
        )


@dataclass(frozen=True)
class _Verdict:
    """What one sequence got: its new tokens, up to the one that ends it, and why it ends there (None: it goes on).

    Beside them its proposal, the nodes of it that were accepted, and the states [1 + drafts, d] of the pass.
    """

    draft: Draft
    tokens: list[int]
    finish_reason: str | None
    nodes: list[int]
    states: Tensor


def _verify(
    model: Decoder, cache: KVCache, requests: Mapping[int, Generation], texts: Mapping[int, list[int]],
    drafts: Mapping[int, Draft], params: Mapping[int, SamplingParams], stops: Callable[[list[int]], bool] | None,
) -> dict[int, _Verdict]:  # fmt: skip
    """One pass of the target over what is not cached of each text and over its drafts, all of which are then judged.

    The requests are as they were; the cache holds all of the pass, or on an error what it held.
    """
    ids, past = list(texts), [cache.length(s) for s in texts]
    sizes = [len(drafts[s].tokens) for s in ids]
    new = [[*texts[s][p:], *drafts[s].tokens] for s, p in zip(ids, past, strict=True)]
    chains = all(drafts[s].tree.is_chain for s in ids)
    batch = Batch.build(
        ids, new, past, device=model.device, tree_mask=None if chains else [drafts[s].tree.masks() for s in ids]
    )
    ends = itertools.accumulate(map(len, new))
    rows = [row for end, size in zip(ends, sizes, strict=True) for row in range(end - size - 1, end)]
    batch.logits_indices = torch.tensor(rows, device=model.device)
    logits, states = model.forward_with_states(batch, cache)
    try:
        judged = _judge(logits, ids, texts, drafts, params)
        packed = torch.cat([judged.num_accepted[:, None], judged.nodes, judged.tokens], dim=1).tolist()  # one wait
        most, verdicts = max(sizes), {}
        for s, line, part in zip(ids, packed, states.split([1 + size for size in sizes]), strict=True):
            nodes, tokens = line[1 : 1 + line[0]], line[1 + most : 2 + most + line[0]]
            count, reason = _end(model, cache, requests[s], params[s], stops, tokens)
            verdicts[s] = _Verdict(drafts[s], tokens[:count], reason, nodes, part)
        return verdicts
    except BaseException:
        take_back(cache, ids, past)
        raise


def _end(
    model: Decoder, cache: KVCache, request: Generation, params: SamplingParams,
    stops: Callable[[list[int]], bool] | None, tokens: Sequence[int],
) -> tuple[int, str | None]:  # fmt: skip
    """How many of the new tokens belong to the text, and why it ends with them; None where it goes on."""
    grown = Generation(request.prompt, list(request.tokens))
    for count, token in enumerate(tokens, 1):
        grown.tokens.append(token)
        reason = finish_reason(model, cache, grown, params)
        if reason is None and stops is not None and stops(list(grown.tokens)):
            reason = "stop"
        if reason is not None:
            return count, reason
    return len(tokens), None


def _judge(
    logits: Tensor, ids: Sequence[int], texts: Mapping[int, list[int]], drafts: Mapping[int, Draft],
    params: Mapping[int, SamplingParams],
) -> Accepted:  # fmt: skip
    """Accept or reject every draft, given the logits [sum of 1 + drafts, vocab] after each text and each draft."""
    on, vocab = logits.device, logits.shape[1]
    sizes, depths = [len(drafts[s].tokens) for s in ids], [[0, *drafts[s].tree.depths] for s in ids]
    most = max(sizes)
    places = [[len(texts[s]) + depth for depth in d] for s, d in zip(ids, depths, strict=True)]
    labels = [f"sequence {s}, position {at}" for s, p in zip(ids, places, strict=True) for at in p]
    check_logits(logits, labels)

    def padded(lists: Sequence[Sequence[int | float]], length: int, dtype: torch.dtype, fill: float = -1) -> Tensor:
        return torch.tensor([[*x, *[fill] * (length - len(x))] for x in lists], dtype=dtype, device=on).view(
            len(lists), length
        )

    starts = itertools.accumulate([1 + size for size in sizes], initial=0)
    every_row = padded([range(a, b) for a, b in itertools.pairwise(starts)], most + 1, torch.int64, 0)
    tokens = padded([drafts[s].tokens for s in ids], most, torch.int64)
    chains = all(drafts[s].tree.is_chain for s in ids)
    parents = None if chains else padded([drafts[s].tree.parents for s in ids], most, torch.int32)
    if all(params[s].temperature == 0 for s in ids):
        return greedy_sample(tokens, logits.argmax(dim=1)[every_row], parents=parents)
    target = processed_probs(logits, [params[s] for s, size in zip(ids, sizes, strict=True) for _ in range(1 + size)])
    accept = [
        [
            uniform(params[s].seed, at - 1, f"accept {rank}")
            for at, rank in zip(p[1:], drafts[s].tree.ranks, strict=True)
        ]
        for s, p in zip(ids, places, strict=True)
    ]
    final = [[uniform(params[s].seed, at) for at in p] for s, p in zip(ids, places, strict=True)]
    given = None
    if any(drafts[s].probs is not None for s in ids):
        given = torch.stack([_rows_of(drafts[s], most, vocab, on) for s in ids])
    return rejection_sample(
        tokens, given, target[every_row], padded(accept, most, torch.float64, 0.0),
        padded(final, most + 1, torch.float64, 0.0), parents=parents,
    )  # fmt: skip


def _rows_of(draft: Draft, most: int, vocab: int, on: torch.device) -> Tensor:
    """What a sequence's drafts were drawn from, [most, vocab]; a certain draft is drawn from all on one token."""
    probs = draft.probs
    if probs is None:
        probs = functional.one_hot(torch.tensor(draft.tokens, dtype=torch.int64, device=on), vocab).float()
    return functional.pad(probs, (0, 0, 0, most - len(probs)))


def _settle(
    cache: KVCache, drafter: Drafter, requests: Mapping[int, Generation], verdicts: Mapping[int, _Verdict]
) -> None:
    """Append every sequence's new tokens, and make first the cache and then the drafter hold what is left."""
    states = {}
    for s, verdict in verdicts.items():
        request = requests[s]
        base = len(request.prompt) + len(request.tokens)  # with the token that the drafts hang on
        request.tokens += verdict.tokens
        request.finish_reason = verdict.finish_reason
        kept = verdict.nodes[: len(verdict.tokens) - 1]  # the newest token is not stored
        if not verdict.draft.tree.is_chain:
            cache.keep(s, base, kept)
        elif cache.length(s) > base + len(kept):
            cache.truncate(s, base + len(kept))
        states[s] = verdict.states[kept[-1] + 1 if kept else 0]
    for s, state in states.items():
        drafter.accepted(s, len(requests[s].prompt) + len(requests[s].tokens), state)
