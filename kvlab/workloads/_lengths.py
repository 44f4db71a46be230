"""How long prompts and answers are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvlab.batch import as_int


@dataclass(frozen=True)
class Request:
    """One request: a prompt of ``prompt_len`` tokens that is answered with ``new_tokens``.

    Raises: ValueError where one of them is under 1 or no integer.  Source: chapter 01.
    """

    prompt_len: int
    new_tokens: int

    def __post_init__(self) -> None:
        if as_int(self.prompt_len, "prompt_len") < 1 or as_int(self.new_tokens, "new_tokens") < 1:
            raise ValueError(
                f"prompt_len is {self.prompt_len} and new_tokens {self.new_tokens}; both must be 1 or more"
            )


def lognormal(
    seed: int, count: int, typical: float, spread: float, limit: int = 1024, answer: tuple[float, float] | None = None
) -> list[Request]:
    """Requests whose prompts and answers have log-normal lengths, the same for the same seed.

    Shapes and units: ``typical`` is the median length in tokens, ``spread`` the standard deviation of its logarithm,
    for prompts and, unless ``answer`` gives another pair, for answers; each is cut at ``limit // 2`` tokens and has at
    least one.

    Raises: ValueError for a count below 0, a typical length that is not positive, a negative spread, a limit below 2,
    or a seed that is no integer.

    Source: chapter 01.
    """
    for median, sigma in ((typical, spread), answer or (typical, spread)):
        if as_int(count, "count") < 0 or not 0 < median < math.inf or not 0 <= sigma < 10 or as_int(limit, "limit") < 2:
            raise ValueError(
                f"count {count} must be 0 or more, median {median} positive and finite, spread {sigma} 0 to 10 and "
                f"limit {limit} 2 or more"
            )
    rng, kinds = random.Random(as_int(seed, "seed")), ((typical, spread), answer or (typical, spread))
    drawn = [
        [min(limit // 2, max(1, int(rng.lognormvariate(math.log(median), sigma)))) for median, sigma in kinds]
        for _ in range(count)
    ]
    return [Request(prompt_len, new_tokens) for prompt_len, new_tokens in drawn]


def mix(name: str, count: int, seed: int = 0) -> tuple[list[Request], int]:
    """A named mix of requests and the longest text it may hold (tokens): "chat", "documents" or "mixed" (half of each).

    "chat" has the mean lengths of ShareGPT as Kwon et al. report them, prompts of 161 tokens and answers of 338;
    "documents" has long prompts, median 6000, and short answers, as in LongBench's summaries.

    Raises: ValueError for another name.  Source: chapter 02; Kwon et al. 2023, Bai et al. 2024.
    """
    if name == "chat":
        return lognormal(seed, count, 161 / math.exp(1.1**2 / 2), 1.1, 2048, (338 / math.exp(0.9**2 / 2), 0.9)), 2048
    if name == "documents":
        return lognormal(seed, count, 6000, 0.5, 32768, (200, 0.7)), 32768
    if name == "mixed":
        short, long = mix("chat", count, seed)[0], mix("documents", count, seed + 1)[0]
        return [pair[i % 2] for i, pair in enumerate(zip(short, long, strict=True))], 32768
    raise ValueError(f'name is {name!r}; it must be "chat", "documents" or "mixed"')
