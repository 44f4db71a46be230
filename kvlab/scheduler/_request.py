"""One request, and how far it has come."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.batch import as_int
from kvlab.sampling import SamplingParams
from kvlab.scheduler import _checks as checks

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

    Raises: ValueError naming the argument of a wrong type, a prompt that is empty, too long or holds what is no token
    id, or an arrival that is no time.

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
    readable: bool = field(default=False, init=False)  # whether the model was found to know the prompt's tokens

    def __post_init__(self) -> None:
        self.request_id = as_int(self.request_id, "request_id")
        self.prompt = _prompt(self.prompt)
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params is {self.params!r}; it must be one SamplingParams")
        self.arrival = checks.seconds(self.arrival, "arrival", least=0)
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
        """The ids of tokens start .. stop of prompt and answer.

        Raises: ValueError for a range that is not within them, or new tokens of which only the number is known.

        Source: chapter 06.
        """
        size, made = len(self.prompt), len(self.tokens)
        if not 0 <= as_int(start, "start") <= as_int(stop, "stop") <= size + made:
            raise ValueError(
                f"start is {start} and stop {stop}; request {self.request_id} has the ids of {size} tokens of a prompt "
                f"and of {made} new ones"
            )
        if start >= size:
            return self.tokens[start - size : stop - size]
        return [*self.prompt[start:stop], *self.tokens[: max(0, stop - size)]]


def _prompt(prompt: Sequence[int]) -> Sequence[int]:
    """A prompt of valid token ids; a range stays one, for it may be long and only its length may count."""
    if not isinstance(prompt, range):
        prompt = checks.token_ids(prompt, "prompt")
    elif prompt:
        checks.token_ids((prompt[0], prompt[-1]), "prompt")
        if (prompt[-1] - prompt[0]) // prompt.step >= 2**31:
            raise ValueError(f"prompt is {prompt}; it must have fewer than 2**31 tokens")
    if not prompt:
        raise ValueError("prompt is empty; it must hold one token or more")
    return prompt


def in_order(requests: Iterable[Request], name: str) -> Iterator[Request]:
    """The same requests, one by one, as long as they are new and each comes no earlier than the one before it.

    Raises: ValueError naming the argument that holds what is no new Request, or an earlier arrival.

    Source: chapter 06.
    """
    latest = 0.0
    for request in requests:
        require_new(request, f"{name}: a request")
        if request.arrival < latest:
            raise ValueError(f"{name} has an arrival at {request.arrival} after {latest}; they must be in order")
        latest = request.arrival
        yield request


def require_new(request: object, name: str = "request") -> None:
    """Refuse what is no new Request. Raises: ValueError that begins with ``name``.  Source: chapter 06."""
    if not isinstance(request, Request) or request.state != "new":
        shown = request.state if isinstance(request, Request) else f"{request!r:.80}"
        raise ValueError(f"{name} is {shown}; it must be a new Request")
