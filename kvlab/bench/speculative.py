"""Chapter 05: what drafts are accepted, what a pass over several tokens costs, and what speculation gains.

Acceptance is of the two models that ship, on text neither was trained on. Times at Llama's sizes are of random weights;
there acceptance is imposed, and every such record says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kvlab import config as configs
from kvlab import flash_decoding, fused, speculative, zoo
from kvlab.bench import Record, Session, measure
from kvlab.bench._rounds import Pass, Rounds, best
from kvlab.generate import generate
from kvlab.model import Decoder
from kvlab.paged import PagedCache
from kvlab.sampling import SamplingParams
from kvlab.speculative import Drafter, HeadDrafter, Heads, ModelDrafter, NGramDrafter, SpecDecodingStats, Tree
from kvlab.zoo import scoring

GAMMA = 4
TREE = Tree.branching((3, 2, 2, 1))
PAIRS = {"stdlib-7m": "stdlib-1m", "llama-3-8b": "llama-3.2-1b"}


def run(session: Session) -> Iterator[Record]:
    """Every part, one after the other.

    Shapes and units:
        speculative.acceptance  mean acceptance length, tokens a proposal, of each drafter on each kind of text
        speculative.position    share of the proposals accepted down to a position
        speculative.identical   share of the greedy texts that are those of plain decoding, token for token
        speculative.verify      ms of a pass over ``q_len`` new tokens for each of B sequences of L tokens
        speculative.draft       ms of a draft's pass over one new token
        speculative.speedup     tokens a second, over those of plain decoding through the same cache and graphs;
                                ``predicted`` by the cost model from the measured ratios in the shape

    Source: chapter 05.
    """
    for part in PARTS.values():
        yield from part(session)


# --- acceptance ------------------------------------------------------------------------------------------------------


def texts(count: int, prompt: int) -> dict[str, list[list[int]]]:
    """Prompts of ``prompt`` tokens by kind: library source, its tests, and English (the licence), none trained on.

    Shapes and units: up to ``count`` prompts a kind, token ids.

    Raises: ValueError where a kind has no text of that length.  Source: chapter 05.
    """
    held, tokenizer = zoo.held_out(), zoo.tokenizer()
    licence = (zoo.FOLDER / "LICENSE-held_out.txt").read_text(encoding="utf-8")
    kinds = {
        "source": {name: text for name, text in held.items() if "/test/" not in name},
        "tests": {name: text for name, text in held.items() if "/test/" in name},
        "English": {"licence": licence},
    }
    return {kind: scoring.continuations(scoring.encode(t, tokenizer), prompt, count) for kind, t in kinds.items()}


def drafters(target: Decoder, draft: Decoder, num_blocks: int) -> dict[str, Callable[[], Drafter]]:
    """Makers of every drafter there is for the shipped target; heads only where they ship. Source: chapter 05."""

    def cache() -> PagedCache:
        return PagedCache(
            draft.config, num_blocks, attention=flash_decoding.attention, dtype=draft.dtype, device=draft.device
        )

    found: dict[str, Callable[[], Drafter]] = {
        "model": lambda: ModelDrafter(draft, cache(), GAMMA), "model tree": lambda: ModelDrafter(draft, cache(), TREE),
        "n-gram": lambda: NGramDrafter(GAMMA),
    }  # fmt: skip
    if (path := zoo.heads_file()) is not None:
        heads = Heads.load(path, target)
        found |= {
            "heads": lambda: HeadDrafter(target, heads, GAMMA),
            "heads tree": lambda: HeadDrafter(target, heads, TREE),
        }
    return found


def acceptance(session: Session) -> Iterator[Record]:
    """How many tokens a proposal yields, by drafter, kind of text and temperature; see ``run``. Source: chapter 05."""
    dtype = torch.float32  # in which a greedy text is the plain one, token for token
    target, draft = (zoo.load(name, session.device, dtype) for name in zoo.NAMES)
    count, prompt, new = (1, 64, 6) if session.quick else (50, 256, 256)
    blocks = count * -(-(prompt + new + 64) // 16)
    kinds = texts(count, prompt)
    for kind, prompts in kinds.items():
        for temperature in (0.0,) if session.quick else (0.0, 0.7, 1.0):
            params = [SamplingParams(temperature=temperature, seed=i, max_tokens=new) for i in range(len(prompts))]
            cache = PagedCache(
                target.config, blocks, attention=flash_decoding.attention, dtype=dtype, device=session.device
            )
            plain = generate(target, cache, prompts, params, progress=False) if temperature == 0 else None
            for name, make in drafters(target, draft, blocks).items():
                drafter = make()
                made, stats = speculative.generate(target, cache, drafter, prompts, params, progress=False)
                shape: dict[str, int | float | str] = {
                    "text": kind, "temperature": temperature, "gamma": drafter.num_speculative_tokens,
                    "prompts": len(prompts), "prompt": prompt, "new": new,
                }  # fmt: skip
                yield from _accepted(session, name, stats, shape)
                if plain is not None:
                    same = sum(a.tokens == b.tokens for a, b in zip(made, plain, strict=True))
                    yield session.record(
                        "speculative.identical", name, same / len(plain), "share", shape=shape, dtype=dtype
                    )


def _accepted(
    session: Session, name: str, stats: SpecDecodingStats, shape: dict[str, int | float | str]
) -> Iterator[Record]:
    dtype = torch.float32
    counts = {
        "num_drafts": stats.num_drafts, "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens, "tokens_per_step": stats.tokens_per_step,
    }  # fmt: skip
    yield session.record(
        "speculative.acceptance", name, stats.mean_acceptance_length, "tokens/proposal", shape={**shape, **counts},
        dtype=dtype,
    )  # fmt: skip
    for position, share in enumerate(stats.acceptance_rate_per_pos, 1):
        yield session.record(
            "speculative.position", name, share, "share", shape={**shape, "position": position}, dtype=dtype
        )


# --- what passes cost ------------------------------------------------------------------------------------------------


def pairs(session: Session) -> list[str]:
    """The targets to time: Llama's sizes need a GPU. Source: chapter 05."""
    return list(PAIRS) if session.on_gpu and not session.quick else ["stdlib-7m"]


def build(session: Session, name: str) -> Decoder:
    """A decoder to time, as it would be served: the shipped weights, or random ones of a real model's shape.

    Source: chapter 05."""
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    if name in zoo.NAMES:
        return zoo.load(name, session.device, dtype, ops=fused.OPS).merge_projections()
    torch.manual_seed(0)
    return Decoder(configs.get(name), fused.OPS, dtype=dtype, device=session.device).merge_projections()


def time_pass(session: Session, model: Decoder, batch: int, q_len: int, length: int, calls: int = 1) -> float:
    """Milliseconds of a pass over ``q_len`` new tokens of each of B sequences of ``length`` tokens, its graph replayed.

    The host waits for the device after every ``calls`` passes, each of which continues the one before: one of a target,
    all of a draft's. Taking them back is off the clock.

    Source: chapter 05.
    """
    longest = length + calls * q_len
    cache = PagedCache(
        model.config, batch * -(-longest // 16), attention=flash_decoding.attention, dtype=model.dtype,
        device=model.device,
    )  # fmt: skip
    cache.k.normal_()
    cache.v.normal_()
    one = Pass(model, cache, batch, q_len, best)

    def reset() -> None:
        for seq_id in range(batch):
            cache.free(seq_id)
            cache.manager.ensure(seq_id, longest)  # a captured table must keep its width
            cache.manager.advance(seq_id, length)

    def step(i: int) -> None:
        for call in range(calls):
            one([length + call * q_len] * batch)

    with torch.inference_mode():
        for i in range(3):  # captured by then
            reset()
            step(i)
        timing = measure(
            step, device=session.device, seconds=session.seconds(0.25), min_count=3, max_count=100, host=True,
            reset=reset,
        )  # fmt: skip
        return timing.ms / calls


def costs(session: Session) -> Iterator[Record]:
    """The time of passes over 1, 2, ... new tokens, and of the draft's; see ``run``. Source: chapter 05."""
    for name in pairs(session):
        target = build(session, name)
        dtype, draft = target.dtype, build(session, PAIRS[name])
        for batch, length, widths in _passes(session, name):
            shape: dict[str, int | float | str] = {"model": name, "B": batch, "L": length}
            for q_len in widths:
                ms = time_pass(session, target, batch, q_len, length)
                yield session.record(
                    "speculative.verify", name, ms, "ms", shape={**shape, "q_len": q_len}, dtype=dtype, ms=ms
                )
            ms = time_pass(session, draft, batch, 1, length, GAMMA)
            yield session.record("speculative.draft", PAIRS[name], ms, "ms", shape=shape, dtype=dtype, ms=ms)
        del target, draft


def _passes(session: Session, name: str) -> list[tuple[int, int, list[int]]]:
    """(sequences, context, widths of a pass): all widths behind a long context, where there is a GPU."""
    if session.quick:
        return [(1, 16, [1, 5])]
    if not session.on_gpu:
        return [(batch, 256, [1, 2, 3, 5, 9, 17]) for batch in (1, 4, 16)]
    batches = (1, 16) if name in zoo.NAMES else (1, 16, 64)
    every = [(256, [1, 5]), (2048, [1, 2, 3, 5, 9, 17, 33])]
    return [(batch, length, widths) for length, widths in every for batch in batches]


# --- end to end ------------------------------------------------------------------------------------------------------


def speedup(session: Session) -> Iterator[Record]:
    """Whole loops with and without speculation, beside what the cost model says; see ``run``. Source: chapter 05."""
    for name in pairs(session):
        shipped = name in zoo.NAMES
        target, draft = build(session, name), build(session, PAIRS[name])
        prompt, new = (16, 12) if session.quick else (256, 128)
        for batch, gamma, imposed in _races(session, shipped):
            prompts = _prompts(target, batch, prompt, shipped)
            yield from _race(session, target, draft, prompts, gamma, new, imposed)
        del target, draft


def _races(session: Session, shipped: bool) -> list[tuple[int, int, float | None]]:
    """(sequences, guesses, acceptance): more guesses, then batches; and, imposed, every acceptance once."""
    likely = None if shipped else 0.8
    if session.quick:
        return [(1, GAMMA, likely)]
    races = [(1, gamma, likely) for gamma in (2, GAMMA, 6)]
    if not shipped:
        races += [(1, GAMMA, imposed) for imposed in (0.5, 0.7, 0.9)]
    batches = (4,) if shipped else (4, 16, 64)
    return races + [(batch, gamma, likely) for batch in batches for gamma in (1, GAMMA)]


def _prompts(target: Decoder, batch: int, prompt: int, shipped: bool) -> list[list[int]]:
    if shipped:
        found = texts(batch, prompt)["source"]
        return [found[i % len(found)] for i in range(batch)]
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, target.config.vocab_size, (batch, prompt), generator=rng).tolist()


def _race(
    session: Session, target: Decoder, draft: Decoder, prompts: Sequence[list[int]], gamma: int, new: int,
    imposed: float | None,
) -> Iterator[Record]:  # fmt: skip
    batch, length = len(prompts), len(prompts[0])
    longest = length + 2 * new + 4 * (gamma + 1)
    rounds = Rounds(target, draft, prompts, gamma, longest, imposed=imposed)
    both = rounds.compare(new, turns=1 if session.quick else 3, seconds=session.seconds(0.1))
    parts, tokens = both.parts, both.tokens_per_step
    ratio, verify_ratio = parts.drafts / gamma / parts.plain, parts.verify / parts.plain
    shape: dict[str, int | float | str] = {
        "model": target.config.name, "draft": draft.config.name, "B": batch, "L": length, "new": new, "gamma": gamma,
        "acceptance": "measured" if imposed is None else "imposed",
        "alpha": imposed if imposed is not None else matching_alpha(tokens, gamma),
        "tokens_per_step": tokens, "cost_ratio": ratio, "verify_ratio": verify_ratio,
        "predicted": tokens * speculative.speedup(0, gamma, ratio, batch, verify_ratio=verify_ratio),
        "plain_tokens_per_second": batch / both.plain,
    }  # fmt: skip
    yield session.record(
        "speculative.speedup", "chain", both.speedup, "times", shape=shape, dtype=target.dtype, ms=1e3 * both.fast
    )


def matching_alpha(tokens: float, gamma: int) -> float:
    """The acceptance probability at which independent drafts would yield so many tokens a step.

    Source: chapter 05; Leviathan et al. 2023, by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if speculative.expected_tokens(middle, gamma) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


PARTS: dict[str, Callable[[Session], Iterator[Record]]] = {
    "acceptance": acceptance, "costs": costs, "speedup": speedup,
}  # fmt: skip
