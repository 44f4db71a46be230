"""The generation loop: send the cache what it has not seen, choose a token, repeat.

The loop asks the cache how many tokens it keeps and sends the rest. With ``NoCache`` that is everything, each time;
with a cache it is the prompt once and then one token a step. Nothing else distinguishes the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvlab.batch import Batch
from kvlab.cache import KVCache
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams, sample


@dataclass
class Generation:
    """What came of one request.

    Shapes and units: ``prompt`` and ``tokens`` are token ids; ``tokens`` holds the new ones only. ``finish_reason``
    is "stop" (a stop token, which is the last of ``tokens``), or "length" (max_tokens, or the model's context).

    Source: chapter 01; the names of the OpenAI and vLLM interfaces.
    """

    prompt: list[int]
    tokens: list[int]
    finish_reason: str | None = None


def check_prompt(model: Decoder, prompt: Sequence[int], name: str = "prompt") -> None:
    """Refuse a prompt (token ids) that is empty, fills the model's context, or holds an id outside the vocabulary.

    Raises: ValueError.  Source: chapter 01.
    """
    limit, vocab = model.config.max_seq_len, model.config.vocab_size
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty; it must hold one token or more")
    if len(prompt) >= limit:
        raise ValueError(
            f"{name} has {len(prompt)} tokens; with room for one more it must be under {limit}, the model's context"
        )
    for i, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise ValueError(f"{name}[{i}] is {token!r}; a token id must be an integer between 0 and {vocab - 1}")


def _finish_reason(model: Decoder, request: Generation, params: SamplingParams) -> str | None:
    if request.tokens and request.tokens[-1] in params.stop_token_ids:
        return "stop"
    if len(request.tokens) >= params.max_tokens:
        return "length"
    if len(request.prompt) + len(request.tokens) >= model.config.max_seq_len:
        return "length"
    return None


@torch.inference_mode()
def step(
    model: Decoder, cache: KVCache, requests: dict[int, Generation], params: dict[int, SamplingParams]
) -> dict[int, int]:
    """One forward pass over all requests and one new token for each, which is appended to its ``tokens``.

    Shapes and units: both dictionaries are keyed by sequence id; gives {sequence id: token id}.

    Raises: what the cache and the sampler raise; then no request has changed.  Source: chapter 01.
    """
    seq_ids = list(requests)
    past = [cache.length(s) for s in seq_ids]
    texts = [requests[s].prompt + requests[s].tokens for s in seq_ids]
    new = [text[p:] for text, p in zip(texts, past, strict=True)]
    batch = Batch.build(seq_ids, new, past, device=model.device)
    logits = model(batch, cache)
    positions = [len(text) for text in texts]
    labels = [f"sequence {s}, position {p}" for s, p in zip(seq_ids, positions, strict=True)]
    chosen = sample(logits, [params[s] for s in seq_ids], positions, labels=labels)
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

    Shapes and units: ``prompt`` is a list of token ids; yields token ids.

    Raises: ValueError for a bad prompt, or if ``seq_id`` is already in the cache, both at the call itself.

    Source: chapter 01.
    """
    params = params or SamplingParams()
    check_prompt(model, prompt)
    if cache.length(seq_id):
        raise ValueError(f"seq_id {seq_id} is already in the cache with {cache.length(seq_id)} tokens; choose another")
    return _stream(model, cache, Generation(list(prompt), []), params, seq_id)


def _stream(model: Decoder, cache: KVCache, request: Generation, params: SamplingParams, seq_id: int) -> Iterator[int]:
    try:
        while (reason := _finish_reason(model, request, params)) is None:
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
    prompt, in order. Sequence ids 0, 1, ... are used and freed.

    Raises: ValueError for a bad prompt or a wrong number of params, before anything runs; CacheFull.

    Source: chapter 01.
    """
    every = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
    if len(every) != len(prompts):
        raise ValueError(f"params has {len(every)} entries; there are {len(prompts)} prompts")
    for i, prompt in enumerate(prompts):
        check_prompt(model, prompt, f"prompts[{i}]")
        if cache.length(i):
            raise ValueError(f"sequence id {i} is already in the cache; free it first")
    requests = {i: Generation(list(prompt), []) for i, prompt in enumerate(prompts)}
    running = dict(requests)
    bar = _progress_bar(sum(p.max_tokens for p in every), progress)
    try:
        while True:
            for i in list(running):
                running[i].finish_reason = _finish_reason(model, running[i], every[i])
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


def _progress_bar(total: int, progress: bool | None):
    from tqdm import tqdm

    hidden = not sys.stderr.isatty() if progress is None else not progress
    return tqdm(total=total, unit="token", delay=0 if progress else 2, disable=hidden, leave=False)
