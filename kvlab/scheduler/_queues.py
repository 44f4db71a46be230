"""Who is next: in order of arrival, or the client that has had least.

Both queues take a request out by its state: whoever is no longer waiting is skipped when it comes to the head. So a
cancelled request costs nothing, and no call takes longer because many wait.
"""

from __future__ import annotations

import heapq
from collections import deque

from kvlab.scheduler import _checks as checks
from kvlab.scheduler._request import WAITING, Request


class FirstCome:
    """Requests in order of arrival, those that were put back before all others.

    Source: chapter 06; vLLM's ``FCFSRequestQueue``.
    """

    def __init__(self) -> None:
        self._new: deque[Request] = deque()
        self._back: list[tuple[int, Request]] = []  # a heap by arrival

    def push(self, request: Request) -> None:
        """A new request, behind all others. Raises: ValueError for what is no Request.  Source: chapter 06."""
        checks.require(request, Request, "request")
        self._new.append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request, before all that never ran. Raises: ValueError for what is no Request.

        Source: chapter 06."""
        checks.require(request, Request, "request")
        heapq.heappush(self._back, (request.order, request))

    def peek(self) -> Request | None:
        """The next request, which stays until it no longer waits; None where nobody does. Source: chapter 06."""
        back, new = self._back, self._new
        while back and back[0][1].state != WAITING:
            heapq.heappop(back)
        if back:
            return back[0][1]
        while new and new[0].state != WAITING:
            new.popleft()
        return new[0] if new else None

    def oldest(self) -> Request | None:
        """The waiting request that came first. Source: chapter 06."""
        return self.peek()


class FairQueue:
    """The client that was served least comes next; among a client's requests, the one that came first.

    A client's account grows with what is computed for it. One that comes back after it had nothing waiting starts no
    lower than the lowest account of those that wait, so that idling saves up nothing.

    Shapes and units: accounts are in tokens, new ones counted with the scheduler's weight.

    Source: chapter 06; Sheng et al. 2024 (the virtual token counter).
    """

    def __init__(self) -> None:
        self.accounts: dict[str, float] = {}
        self._waiting: dict[str, deque[Request]] = {}  # of clients that have some
        self._heap: list[tuple[float, int, str]] = []  # (account when written, tie, client): one entry a waiting client
        self._floor, self._ties = 0.0, 0
        self._ages, self._back = FirstCome(), FirstCome()

    def push(self, request: Request) -> None:
        """A new request, behind its client's others. Raises: ValueError for what is no Request.

        Source: Sheng et al. 2024."""
        checks.require(request, Request, "request")
        client = request.client
        self._ages.push(request)
        mine = self._waiting.get(client, deque())
        while mine and mine[0].state != WAITING:
            mine.popleft()
        if not mine:  # it comes, or comes back
            self._head()  # drops clients that no longer wait, and leaves the floor at the lowest account
            self.accounts[client] = max(self.accounts.get(client, 0.0), self._floor)
            if client not in self._waiting:
                self._waiting[client] = deque()
                self._enter(client)
        self._waiting[client].append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request, before all that never ran. Raises: ValueError for what is no Request.

        Source: chapter 06."""
        self._ages.put_back(request)
        self._back.put_back(request)

    def peek(self) -> Request | None:
        """The next request, which stays until it no longer waits; None where nobody does. Source: chapter 06."""
        found = self._back.peek()
        if found is None and (client := self._head()) is not None:
            found = self._waiting[client][0]
        return found

    def oldest(self) -> Request | None:
        """The waiting request that came first, whoever's it is. Source: chapter 06."""
        return self._ages.peek()

    def charge(self, client: str, tokens: float) -> None:
        """Enter work done for a client (tokens, 0 or more) in its account.

        Raises: ValueError for a client that never had a request here, or tokens that are no such number.

        Source: Sheng et al. 2024.
        """
        if not isinstance(client, str) or client not in self.accounts:
            raise ValueError(f"client is {client!r:.80}; it must have had a request in this queue")
        self.accounts[client] += checks.number(tokens, "tokens", 0)

    def _enter(self, client: str) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (self.accounts[client], self._ties, client))

    def _head(self) -> str | None:
        """The waiting client with the lowest account. Accounts only grow, so an old entry is written anew on top."""
        while self._heap:
            written, _, client = self._heap[0]
            requests = self._waiting[client]
            while requests and requests[0].state != WAITING:
                requests.popleft()
            if not requests or written < self.accounts[client]:
                heapq.heappop(self._heap)
                self._floor = max(self._floor, written)
                if requests:
                    self._enter(client)
                else:
                    del self._waiting[client]
                continue
            self._floor = max(self._floor, written)
            return client
        return None
