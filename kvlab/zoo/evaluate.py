"""How good the shipped models are, on text they never saw.

    python -m kvlab.zoo.evaluate [--models DIR] [--corpus FILE] --out records.json

writes records: held-out bits a byte of both models, of ``xz -9e`` and (with a corpus to learn from) of a byte-level
5-gram; the share of completions that are Python or a prefix of it; how often the draft agrees with the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvlab import zoo
from kvlab.generate import generate
from kvlab.model import Decoder
from kvlab.sampling import SamplingParams
from kvlab.zoo import baselines, scoring
from kvlab.zoo import corpus as corpora

PARTS = ("baselines", "sample", "bits", "completions", "acceptance")
SAMPLE = "python3.11/sched.py"  # one short file, scored again by the tests


def choose_prompts(files: dict[str, str], count: int, seed: int = 0) -> list[str]:
    """``count`` openings of functions, drawn from all that ``files`` hold, without repetition.

    Shapes and units: path to source; gives text.

    Raises: ValueError where there are too few functions.  Source: kvlab.zoo.
    """
    found = [prompt for text in files.values() for prompt in scoring.function_prompts(text)]
    if len(found) < count:
        raise ValueError(f"files hold {len(found)} functions to complete; {count} were asked for")
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))[:count]]


def _generate(model: Decoder, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[list[int]]:
    from kvlab.naive import NaiveCache  # a later step of the library, which only this command needs

    made: list[list[int]] = []
    for i in range(0, len(prompts), batch):
        some, settings = prompts[i : i + batch], params[i : i + batch]
        longest = max(len(p) + s.max_tokens for p, s in zip(some, settings, strict=True))
        size = min(longest, model.config.max_seq_len)
        cache = NaiveCache(model.config, len(some), size, dtype=model.dtype, device=model.device)
        made += [g.tokens for g in generate(model, cache, some, settings)]
    return made


def completions(
    model: Decoder, prompts: Sequence[str], *, temperature: float = 0.2, max_tokens: int = 128
) -> list[str]:
    """Prompt and completion of each prompt, cut at the last full line.

    Shapes and units: text in, text out; the model sees an end-of-text token and then the prompt, and stops at the
    next end-of-text token or after ``max_tokens``.

    Raises: ValueError as ``generate``.  Source: kvlab.zoo.
    """
    tokenizer = zoo.tokenizer()
    start = corpora.end_of_text(tokenizer)
    ids = [[start, *tokenizer.encode(p).ids] for p in prompts]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, stop_token_ids=(start,))
        for i in range(len(ids))
    ]
    made = _generate(model, ids, params, batch=50)
    return [scoring.full_lines(p + tokenizer.decode(tokens)) for p, tokens in zip(prompts, made, strict=True)]


def acceptance(
    target: Decoder,
    draft: Decoder,
    files: Sequence[tuple[np.ndarray, int]],
    *,
    prompt: int = 512,
    new: int = 128,
    most: int = 100,
) -> tuple[float, float]:
    """The draft beside the target on held-out source that the target continues greedily.

    Shapes and units: ``files`` as ``scoring.encode`` gives them; one continuation of ``new`` tokens after each file's
    first, third, fifth... ``prompt`` tokens; where that makes more than ``most``, evenly spaced ones of them. Gives
    (share of continuation tokens that the draft names, tokens a speculative step with 4 proposals).

    Raises: ValueError where no file is long enough.  Source: Leviathan et al. 2023.
    """
    starts = scoring.continuations(files, prompt, most)
    greedy = [SamplingParams(max_tokens=new)] * len(starts)
    agreed = []
    for head, made in zip(starts, _generate(target, starts, greedy, batch=50), strict=True):
        text = np.array(head + made)
        named = scoring.named(draft, text)[len(head) - 1 :]
        agreed.append(named == text[len(head) :])
    steps = [len(a) / scoring.tokens_per_step(a) for a in agreed]
    return float(np.concatenate(agreed).mean()), sum(map(len, agreed)) / sum(steps)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this module. Raises: ValueError as its parts.  Source: kvlab.zoo."""
    from kvlab import bench, checkpoint

    parser = argparse.ArgumentParser(prog="python -m kvlab.zoo.evaluate", description="measure the shipped models")
    parser.add_argument("--models", help="folder that holds NAME/model for each model (default: those that ship)")
    parser.add_argument("--corpus", help="a file of kvlab.zoo.corpus; the 5-gram learns from its training split")
    parser.add_argument("--split", choices=["held_out", "validation"], default="held_out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=200, help="functions to complete; 0 leaves completions out")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--out", required=True, help="records file to write")
    args = parser.parse_args(argv)
    texts = zoo.held_out() if args.split == "held_out" else corpora.load(args.corpus).validation
    files = scoring.encode(texts, zoo.tokenizer())
    size = sum(n for _, n in files)
    computed = torch.bfloat16 if args.device != "cpu" else torch.float32
    session, made = bench.Session(args.device), []

    def report(
        bench_name: str, impl: str, value: float, unit: str, dtype: str = "", **shape: int | float | str
    ) -> None:
        shape = {"split": args.split, "files": len(files), "bytes": size, **shape}
        made.append(session.record(f"zoo.{bench_name}", impl, value, unit, shape=shape, dtype=dtype or computed))
        print(f"{bench_name:16} {impl:12} {value:.4f} {unit}", flush=True)
        bench.save(made, args.out)

    if "baselines" in args.only:
        report("bits_per_byte", "xz -9e", baselines.xz_bits_per_byte(list(texts.values())), "bits/byte", "uint8")
        if args.corpus:
            model = baselines.KneserNey(corpora.load(args.corpus).train.values())
            report(
                "bits_per_byte", "5-gram", model.bits_per_byte(texts.values()), "bits/byte", "uint8",
                smoothing="interpolated modified Kneser-Ney",
            )  # fmt: skip
    models = {}
    for name in zoo.NAMES:
        if args.models:
            models[name] = checkpoint.load(Path(args.models) / name / "model", device=args.device, dtype=computed)
        else:
            models[name] = zoo.load(name, device=args.device, dtype=computed)
    if "sample" in args.only and SAMPLE in texts:
        one = scoring.encode({SAMPLE: texts[SAMPLE]}, zoo.tokenizer())
        for name, decoder in models.items():
            report("sample_bits_per_byte", name, scoring.bits_per_byte(decoder, one), "bits/byte", file=SAMPLE)
    if "bits" in args.only:
        for name, decoder in models.items():
            for stride in (2048, 4096):
                value = scoring.bits_per_byte(decoder, files, stride=stride)
                report("bits_per_byte", name, value, "bits/byte", context=4096, stride=stride)
    if "completions" in args.only and args.count:
        prompts = choose_prompts(texts, args.count)
        for name, decoder in models.items():
            made_texts = completions(decoder, prompts)
            good = sum(
                len(text) > len(prompt) and scoring.is_python_or_prefix(text)  # no new line at all is no success
                for prompt, text in zip(prompts, made_texts, strict=True)
            )
            report("completions", name, good / len(prompts), "share valid", count=len(prompts), temperature="0.2")
    if "acceptance" in args.only:
        target, draft = (models[name] for name in zoo.NAMES)
        share, tokens = acceptance(target, draft, files)
        report("agreement", "stdlib-1m for stdlib-7m", share, "share of tokens", text="the target's greedy text")
        report("acceptance", "stdlib-1m for stdlib-7m", tokens, "tokens/step", gamma=4, temperature="0")
        both = np.concatenate([scoring.named(target, ids) == scoring.named(draft, ids) for ids, _ in files])
        report("agreement", "stdlib-1m for stdlib-7m", float(both.mean()), "share of tokens", text="held-out source")


if __name__ == "__main__":
    main()
