"""What the next step computes: each request catches up with its tokens, inside one budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from kvlab.batch import as_count, as_int
from kvlab.paged import BlockManager, OutOfBlocks
from kvlab.scheduler import _checks as checks
from kvlab.scheduler._queues import FairQueue, FirstCome
from kvlab.scheduler._request import FINISHED, RUNNING, WAITING, Request, require_new
from kvlab.scheduler._step import Step

POLICIES = ("static", "continuous", "chunked", "fair")


class Scheduler:
    """Decides, step by step, who computes how many tokens, and who has which blocks.

    ``static`` takes a batch and no one else until all of it is done. ``continuous`` lets new prompts in at every step
    and computes them first, alone. ``chunked`` mixes: decodes first, then prompts under way, then new ones, until the
    budget is spent. ``fair`` is ``chunked`` with two rules more: the client that has had least comes next, and a prompt
    older than ``max_wait`` has a share of every step, if need be at the cost of whoever came later.

    A request that finds no block for its next token takes those of the one that came last, which goes back to the front
    of the queue and later computes its prompt and all it had written anew. Its text does not change.

    ``schedule`` and ``update`` alternate; requests may be added and cancelled at any time. Neither call takes longer
    because more are waiting.

    Shapes and units:
        manager                       the books of the pool, shared with the cache (``PagedCache.manager``)
        max_num_batched_tokens        the budget of a step, in tokens
        max_num_seqs                  requests running at once, at most; no more than the budget
        long_prefill_token_threshold  the longest chunk of one prompt, in tokens; None: the budget is the only limit
        max_model_len                 the longest text, in tokens (a model's ``config.max_seq_len``); None: what fits
        watermark                     part of the pool that admitting a request leaves free, unless nobody runs
        max_wait                      age in seconds from which ``fair`` gives a prompt its share
        aged_share                    that share, as a part of the budget
        decode_weight                 what a decoded token costs a client's account, in tokens of a prompt

    Raises: ValueError naming an argument of a wrong type or out of range.

    Source: chapter 06; Yu et al. 2022 (Orca), Agrawal et al. 2024 (Sarathi-Serve), Sheng et al. 2024 (VTC), vLLM's v1.
    """

    def __init__(
        self,
        manager: BlockManager,
        policy: str = "chunked",
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        long_prefill_token_threshold: int | None = None,
        *,
        max_model_len: int | None = None,
        watermark: float = 0.01,
        max_wait: float = 1.0,
        aged_share: float = 0.25,
        decode_weight: float = 2.0,
    ) -> None:
        if not isinstance(manager, BlockManager):
            raise ValueError(f"manager is {manager!r}; it must be a BlockManager, such as PagedCache.manager")
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self.manager, self.policy = manager, policy
        self.max_num_batched_tokens = as_count(max_num_batched_tokens, "max_num_batched_tokens", 1)
        self.max_num_seqs = as_count(max_num_seqs, "max_num_seqs", 1)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs}; it must be at most max_num_batched_tokens, {max_num_batched_tokens}: "
                "else not everyone who decodes has a token in each step"
            )
        threshold = long_prefill_token_threshold
        self.max_chunk = self.max_num_batched_tokens
        if threshold is not None:
            self.max_chunk = min(self.max_chunk, as_count(threshold, "long_prefill_token_threshold", 1))
        self.capacity = manager.pool.num_blocks * manager.block_size  # tokens
        # the newest token of a text is not stored, so a text may be one longer than the pool
        self.max_length = self.capacity + 1
        if max_model_len is not None:
            self.max_length = min(self.max_length, as_count(max_model_len, "max_model_len", 1))
        self.reserve = math.ceil(checks.number(watermark, "watermark", 0, 0.99) * manager.pool.num_blocks)  # blocks
        self.max_wait = checks.seconds(max_wait, "max_wait", least=0)
        self.share = max(1, int(checks.number(aged_share, "aged_share", 0, 1) * self.max_num_batched_tokens))  # tokens
        self.decode_weight = checks.number(decode_weight, "decode_weight", 0)
        self.queue: FairQueue | FirstCome = FairQueue() if policy == "fair" else FirstCome()
        self.requests: dict[int, Request] = {}  # whatever is not finished
        self.prefilling: list[Request] = []  # running, and more than one token behind or not yet begun
        self.decoding: list[Request] = []  # running, one token behind
        self.num_waiting = 0
        self._order = 0
        self._done: deque[Request] = deque()
        self.time = 0.0  # the latest that a step was scheduled, updated or undone at
        self._leaving: list[Request] = []  # cancelled while a step is in flight
        self._in_flight: Step | None = None

    # --- coming and going ---

    @property
    def num_running(self) -> int:
        """Requests that hold blocks. Source: chapter 06."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def in_flight(self) -> Step | None:
        """The step that was scheduled and neither updated nor undone so far. Source: chapter 06."""
        return self._in_flight

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs. Source: chapter 06."""
        return bool(self.requests)

    def add(self, request: Request, now: float | None = None) -> None:
        """Take a request in. One that can never fit is finished at once, as "rejected", with the reason in ``error``.

        Shapes and units: ``now`` in seconds, by default the request's arrival.

        Raises: ValueError for what is no new Request, an id that is in use, or a ``now`` that is no time.

        Source: chapter 06.
        """
        require_new(request)
        now = request.arrival if now is None else checks.seconds(now, "now")
        self._require_unused(request.request_id, "request_id")
        request.order, self._order = self._order, self._order + 1
        length = request.num_tokens
        request.limit = min(length + request.params.max_tokens, self.max_length)
        if length >= self.max_length:
            blocks = f"{self.manager.pool.num_blocks} blocks of {self.manager.block_size}"
            why = f"{self.max_length} ({blocks if self.max_length > self.capacity else 'max_model_len'})"
            self.reject(request, f"the prompt has {length} tokens; with one new one a text may have {why}", now)
        elif request.params.max_tokens == 0:
            self._finish(request, "length", now)
        else:
            self.requests[request.request_id] = request
            request.state = WAITING
            self.num_waiting += 1
            self.queue.push(request)

    def require_idle(self) -> None:
        """Refuse to go on while a step is in flight. Raises: ValueError.  Source: chapter 06."""
        if self._in_flight is not None:
            raise ValueError("the last step is still in flight; call update(step, tokens) or undo(step) first")

    def require_unused(self, requests: Iterable[Request], name: str) -> None:
        """Refuse requests that could not all be added: two of one id, or one whose id is in use.

        Raises: ValueError that begins with ``name``.  Source: chapter 06."""
        ids: set[int] = set()
        for request in requests:
            if request.request_id in ids:
                raise ValueError(f"{name} holds request_id {request.request_id} twice; each must stand there once")
            self._require_unused(request.request_id, f"{name}: request_id")
            ids.add(request.request_id)

    def _require_unused(self, request_id: int, name: str) -> None:
        if request_id in self.requests or request_id in self.manager:
            raise ValueError(f"{name} {request_id} is in use; choose another")

    def reject(self, request: Request, reason: str, now: float | None = None) -> None:
        """End a request that is new, or waits, without computing it; ``reason`` is kept in its ``error``.

        Shapes and units: ``now`` in seconds, by default the time of the last step, or the request's arrival if later.

        Raises: ValueError for what is no new Request and none that waits here, a reason that is no text, or a ``now``
        that is no time.

        Source: chapter 06.
        """
        waits = isinstance(request, Request) and request.state == WAITING
        if not waits or self.requests.get(request.request_id) is not request:
            require_new(request)
        now = self._time(request, now)
        if not isinstance(reason, str):
            raise ValueError(f"reason is {reason!r:.80}; it must be a text")
        request.error = reason
        if waits:
            self._leave(request)
        self._finish(request, "length" if request.num_new_tokens else "rejected", now)

    def cancel(self, request_id: int, now: float | None = None) -> bool:
        """End a request, whatever it is at, and give its blocks back: at once, or once the step in flight is over.

        Gives False, and does nothing, where no such request is waiting or running. ``now`` as ``reject``.

        Raises: ValueError for an id that is no integer, or a ``now`` that is no time.  Source: chapter 06.
        """
        request = self.requests.get(as_int(request_id, "request_id"))
        now = self._time(request, now)
        if request is None or request.cancelled:
            return False
        if request.state == RUNNING and self._in_flight is not None:
            request.cancelled = True
            self._leaving.append(request)
        else:
            self._leave(request)
            self._finish(request, "cancelled", now)
        return True

    def take_finished(self, count: int | None = None) -> list[Request]:
        """The requests that have ended, for whatever reason, and were not taken yet: all, or the first ``count``.

        Raises: ValueError for a count that is no integer, 0 or more.  Source: chapter 06."""
        there = len(self._done)
        return [self._done.popleft() for _ in range(there if count is None else min(there, as_count(count, "count")))]

    # --- a step ---

    def schedule(self, now: float = 0.0) -> Step:
        """Choose what the next step computes and see to its blocks; an empty step where there is nothing to do.

        Shapes and units: ``now`` in seconds on the clock of the arrivals.

        Raises: ValueError while the last step has not been updated or undone, or for a ``now`` that is no time.

        Source: chapter 06.
        """
        now = checks.seconds(now, "now")
        self.require_idle()
        self.time = max(self.time, now)
        step = Step(self.max_num_batched_tokens)
        if self.policy == "static":
            self._static(step, now)
        elif self.policy == "continuous":
            self._continuous(step, now)
        else:
            if self.policy == "fair":
                self._serve_aged(step, now)
            self._decode(step)
            self._continue_prefills(step)
            self._admit_new(step, now)
        if step:
            self._in_flight = step
        return step

    def update(self, step: Step, tokens: Sequence[int] | None = None, now: float = 0.0) -> None:
        """Enter what a step has computed: everyone in it moves on, and whoever has caught up gets its new token.

        Shapes and units: ``tokens`` holds a token id for each of ``step.sampled``, in that order; None where only
        lengths count, and then for all tokens of a request. ``now``, in seconds, is when they were there.

        Raises: ValueError for a step that is not in flight, another number of tokens, what is no token id, or a ``now``
        that is no time.

        Source: chapter 06.
        """
        self._require_in_flight(step)
        now, sampled = checks.seconds(now, "now"), step.sampled
        for request, token in zip(sampled, _new_tokens(tokens, sampled), strict=False):
            request.tokens.append(token)
        self._in_flight, self.time = None, max(self.time, now)
        self._charge(step)
        ended = []
        for request in step.decodes:
            request.num_computed_tokens = length = request.num_tokens
            request.num_tokens = length = length + 1
            request.token_times.append(now)
            if length >= request.limit or request.stops:
                ended.append(request)
        for request, chunk in step.prefills.items():
            request.num_computed_tokens += chunk
        for request in sampled[len(step.decodes) :]:
            request.num_tokens += 1
            request.token_times.append(now)
            self.prefilling.remove(request)
            self.decoding.append(request)
            ended.append(request)
        for request in ended:
            if reason := _finish_reason(request):
                self._leave(request)
                self._finish(request, reason, now)
        self._let_go(now)

    def undo(self, step: Step, now: float = 0.0) -> None:
        """Give up a step that failed: everybody in it is put back, as if preempted, and may be scheduled again.

        Raises: ValueError for a step that is not in flight, or a ``now`` that is no time.  Source: chapter 06.
        """
        self._require_in_flight(step)
        now = checks.seconds(now, "now")
        self._in_flight, self.time = None, max(self.time, now)
        for request in step.requests:
            self._put_back(request)
        self._let_go(now)

    # --- policies ---

    def _static(self, step: Step, now: float) -> None:
        """A batch, and nobody else until all of it is done."""
        if not self.num_running:
            while self._admit_next(step, now) is not None:
                pass
        self._continue_prefills(step)
        if not step:
            self._decode(step)

    def _continuous(self, step: Step, now: float) -> None:
        """Prompts first and alone, whole if the budget allows; decodes where there is no prompt."""
        self._continue_prefills(step)
        self._admit_new(step, now)
        if not step:
            self._decode(step)

    def _decode(self, step: Step) -> None:
        """A token for everyone who decodes; where the budget has not so many, those whose turn it is."""
        decoding, budget = self.decoding, step.budget
        if len(decoding) > budget:
            self.decoding = decoding[budget:] + decoding[:budget]
        chosen = decoding[:budget]
        if growing := [r for r in chosen if r.num_tokens > r.room]:
            self._grow(growing, step)
        if step.preempted:
            chosen = [r for r in chosen if r.state == RUNNING]
        step.decodes = chosen
        step.budget -= len(chosen)

    def _continue_prefills(self, step: Step) -> None:
        """Chunks for the prompts under way, the first admitted first."""
        for request in self.prefilling:
            if step.budget <= 0:
                break
            self._give_chunk(request, step, self.max_chunk)

    def _admit_new(self, step: Step, now: float) -> None:
        """Chunks for prompts that have waited, while budget, places and blocks are left."""
        if step.preempted:
            return  # whoever was put back would be the first to come in again
        while step.budget > 0 and (request := self._admit_next(step, now)) is not None:
            self._give_chunk(request, step, self.max_chunk)

    def _serve_aged(self, step: Step, now: float) -> None:
        """A share of the budget for prompts older than ``max_wait``, the oldest first."""
        left = self.share
        while left > 0:
            aged = [r for r in self.prefilling if r not in step.prefills]
            if (waiting := self.queue.oldest()) is not None:
                aged.append(waiting)
            request = min(aged, key=_order, default=None)
            if request is None or now - request.arrival < self.max_wait or request in step.preempted:
                return
            while request.state == WAITING and not self._admit(request, now):
                if request.state == FINISHED:
                    break
                if not self.num_running or (victim := self._latest()).order < request.order:
                    return
                self._preempt(victim, step)
            if request.state == RUNNING:
                left -= self._give_chunk(request, step, min(left, self.max_chunk))

    # --- what they are made of ---

    def _give_chunk(self, request: Request, step: Step, most: int) -> int:
        had = step.prefills.get(request, 0)
        chunk = min(request.remaining, step.budget + had, max(most, had))
        step.prefills[request] = chunk
        step.budget -= chunk - had
        return chunk - had

    def _admit_next(self, step: Step, now: float) -> Request | None:
        """The next in the queue, admitted; None where nobody waits or it has to wait on."""
        while (request := self.queue.peek()) is not None:
            if self._admit(request, now):
                return request
            if request.state == FINISHED:
                continue
            if self.num_running:
                return None
            self._refuse(request, now)  # alone, and still no room: others than the scheduler hold the blocks
        return None

    def _admit(self, request: Request, now: float) -> bool:
        """Blocks for all the tokens a request has so far, and a place among the running; False where there are none."""
        if request.request_id in self.manager:  # who waits has no blocks: they are somebody else's
            self.reject(request, f"its id, {request.request_id}, was taken in the cache while it waited", now)
            return False
        running, needed = self.num_running, self.manager.num_blocks(request.num_tokens)
        if running >= self.max_num_seqs or needed + (self.reserve if running else 0) > self.manager.pool.num_free:
            return False
        self.manager.ensure(request.request_id, request.num_tokens)
        request.room = needed * self.manager.block_size
        request.state = RUNNING
        if request.admitted is None:
            request.admitted = now
        self.num_waiting -= 1
        self.prefilling.append(request)
        return True

    def _refuse(self, request: Request, now: float) -> None:
        pool, needed = self.manager.pool, self.manager.num_blocks(request.num_tokens)
        free = f"{pool.num_free} of {pool.num_blocks} are free"
        self.reject(request, f"{needed} blocks are needed; with nobody running, {free}", now)

    def _time(self, request: Request | None, now: float | None) -> float:
        if now is not None:
            return checks.seconds(now, "now")
        return self.time if request is None else max(self.time, request.arrival)

    def _grow(self, requests: list[Request], step: Step) -> None:
        """Blocks for the next token of each, if need be those of whoever came last."""
        for request in requests:
            self.manager.advance(request.request_id, request.num_computed_tokens)  # where no cache has done so
        while requests := [r for r in requests if r.state == RUNNING]:
            try:
                self.manager.ensure_all({r.request_id: r.num_tokens for r in requests})
            except OutOfBlocks:
                self._preempt(self._latest(), step)
            else:
                for request in requests:
                    request.room = self.manager.num_blocks(request.num_tokens) * self.manager.block_size
                return

    def _latest(self) -> Request:
        """The running request that came last."""
        return max([*self.prefilling, *self.decoding], key=_order)

    def _preempt(self, request: Request, step: Step) -> None:
        self._put_back(request)
        request.preemptions += 1
        step.preempted.append(request)
        step.budget += step.prefills.pop(request, 0)

    def _put_back(self, request: Request) -> None:
        self._leave(request)
        request.state, request.num_computed_tokens = WAITING, 0
        self.num_waiting += 1
        self.queue.put_back(request)

    def _leave(self, request: Request) -> None:
        """Out of wherever it stands. A queue sees by the state that someone has left."""
        if request.state == RUNNING:
            (self.decoding if request in self.decoding else self.prefilling).remove(request)
            self.manager.free(request.request_id)
            request.room = 0
        else:
            self.num_waiting -= 1

    def _let_go(self, now: float) -> None:
        """End whoever was cancelled while the step was in flight, if it did not end of itself."""
        for request in self._leaving:
            if request.state != FINISHED:
                self._leave(request)
                self._finish(request, "cancelled", now)
        self._leaving.clear()

    def _finish(self, request: Request, reason: str, now: float) -> None:
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
        request.state, request.finish_reason, request.finished = FINISHED, reason, now
        self._done.append(request)

    def _charge(self, step: Step) -> None:
        """Enter the work in the clients' accounts."""
        if isinstance(self.queue, FairQueue):
            for request, chunk in step.prefills.items():
                self.queue.charge(request.client, chunk)
            accounts, weight = self.queue.accounts, self.decode_weight
            for request in step.decodes:  # as charge does; but these are many
                accounts[request.client] += weight

    def _require_in_flight(self, step: Step) -> None:
        if step is None or step is not self._in_flight:
            raise ValueError("step is not the one in flight; it must be what schedule() last gave, and not empty")

    def audit(self) -> None:
        """Check the books in full: everyone is in one place, has the blocks of its tokens, and the pool adds up.

        Raises: AssertionError that says what is wrong.  Source: chapter 06.
        """
        self.manager.audit()
        running = [*self.prefilling, *self.decoding]
        assert len(set(running)) == len(running), "a request runs twice"
        waiting = [r for r in self.requests.values() if r.state == WAITING]
        assert len(waiting) == self.num_waiting, f"{len(waiting)} requests wait, {self.num_waiting} are counted"
        assert {*running, *waiting} == set(self.requests.values()), "a request is lost, or served after its end"
        assert len(running) <= self.max_num_seqs, f"{len(running)} requests run; at most {self.max_num_seqs} may"
        for request in running:
            table = self.manager.table(request.request_id)
            assert request.state == RUNNING, f"request {request.request_id} runs and is {request.state}"
            assert request.room == len(table) * self.manager.block_size, "room is not what the table holds"
            assert request.num_computed_tokens <= request.room, "more tokens were computed than there is room for"
        for request in self.decoding:
            assert request.remaining == 1, f"request {request.request_id} decodes and is {request.remaining} behind"
        for request in waiting:
            assert request.request_id not in self.manager, f"request {request.request_id} waits and holds blocks"
            assert request.num_computed_tokens == 0, f"request {request.request_id} waits and has tokens computed"


def _new_tokens(tokens: Sequence[int] | None, sampled: Sequence[Request]) -> list[int]:
    """The ids of a step's new tokens; none where only lengths count."""
    found = None if tokens is None else checks.token_ids(tokens, "tokens")
    if found is not None and len(found) != len(sampled):
        raise ValueError(f"tokens has {len(found)} entries; this step gives one to {len(sampled)} requests")
    if found is None:
        other = [r for r in sampled if r.tokens]
    else:
        other = [r for r in sampled if len(r.tokens) != r.num_tokens - len(r.prompt)]
    if other:
        raise ValueError(
            f"tokens is {tokens!r:.80}; request {other[0].request_id} has ids for {len(other[0].tokens)} of its "
            f"{other[0].num_new_tokens} new tokens: it must be given all of them, or none"
        )
    return found or []


def _order(request: Request) -> int:
    return request.order


def _finish_reason(request: Request) -> str | None:
    if request.stops and request.tokens and request.tokens[-1] in request.stops:
        return "stop"
    return "length" if request.num_tokens >= request.limit else None
