"""One request, and how far it has come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.batch import as_int, as_ints
from kvlab.config import is_number
from kvlab.sampling import SamplingParams

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
_arrivals = itertools.count()


@dataclass(eq=False, slots=True)
class Request:
    """A prompt to be continued. The scheduler knows no phases: ``num_computed_tokens`` catches up with ``num_tokens``.

    Shapes and units:
        request_id            an integer; the sequence id in the cache
        prompt                token ids; a ``range(n)`` where only the length counts, as in a simulation
        params                how the next tokens are chosen, how many, and what ends the text
        arrival               seconds on the scheduler's clock
        client                who asks; ``fair`` shares out the machine among clients
        tokens                the new token ids so far (none in a simulation)
        num_tokens            prompt and new tokens, known so far
        num_computed_tokens   those of them whose keys and values are in the cache
        token_times           when each new token was there; ``admitted`` and ``finished`` are times too
        finish_reason         "stop", "length", "cancelled" or "rejected" (``error`` then says why)

    Raises: ValueError naming the argument of a wrong type, an empty prompt or an arrival that is no time.

    Source: chapter 06; vLLM's v1 scheduler has the same two counters.
    """

    request_id: int
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    client: str = ""
    tokens: list[int] = field(default_factory=list, init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    state: str = field(default="new", init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    token_times: list[float] = field(default_factory=list, init=False)
    admitted: float | None = field(default=None, init=False)
    finished: float | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)  # while a step is in flight; finished once it is over
    order: int = field(default_factory=_arrivals.__next__, init=False)  # set anew when the scheduler takes it
    room: int = field(default=0, init=False)  # tokens that its blocks hold
    limit: int = field(default=0, init=False)  # num_tokens at which it ends
    stops: frozenset[int] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self.request_id = as_int(self.request_id, "request_id")
        if not isinstance(self.prompt, range):
            self.prompt = as_ints(self.prompt, "prompt")
        if len(self.prompt) == 0:
            raise ValueError("prompt is empty; it must hold one token or more")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params is {self.params!r}; it must be one SamplingParams")
        if not is_number(self.arrival) or self.arrival < 0:
            raise ValueError(f"arrival is {self.arrival!r}; it must be a finite number of seconds, 0 or more")
        if not isinstance(self.client, str):
            raise ValueError(f"client is {self.client!r}; it must be a name")
        self.num_tokens = len(self.prompt)
        self.stops = frozenset(self.params.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt. Source: chapter 06."""
        return len(self.prompt)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that were made so far. Source: chapter 06."""
        return self.num_tokens - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens known and not yet computed: 1 for a request that decodes. Source: chapter 06."""
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids of tokens start .. stop of prompt and answer. Source: chapter 06."""
        size = len(self.prompt)
        if start >= size:
            return self.tokens[start - size : stop - size]
        return [*self.prompt[start:stop], *self.tokens[: max(0, stop - size)]]
