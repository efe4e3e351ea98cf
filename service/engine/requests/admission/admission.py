"""Limits on the work in the server at a time, shared fairly between clients.

A request is admitted before any of it is decoded: first by count and then, once its image headers are read, by the
bytes of its decoded rows and its response. Its body counts from the moment it arrives, and its response until it is
sent. A request that does not fit is refused at once, with the time after which to retry.

Two rules keep one client from starving the others. A client is an API key or, on a server without keys, an address:

- *Room for others*: no client may hold more than eight times the free amount. This is the dynamic threshold of
  Choudhury and Hahne (IEEE/ACM Transactions on Networking 6(2), 1998), with which switches share a buffer between
  ports. It needs no list of active clients: a single client gets eight ninths, two get eight seventeenths each, and a
  new client always finds room.
- *Turns*: only as many admitted requests are processed at a time as keep batches full. The others wait in per-client
  queues, which are served round-robin, so a client with one request waits for one round and not for everything that
  another client sent before. Batches are formed without regard to clients.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from contextlib import suppress
from types import TracebackType

from service.engine.requests.admission.returns import Returns
from service.problems import AdmissionFull, RequestTooLarge

SERVICE = ""
"""The client name for the service's own requests."""

_WINDOW = 10.0
"""Seconds over which the drain rate is measured. Idle time does not count."""

_SHORTEST, _LONGEST = 1.0, 60.0
"""Bounds on the ``Retry-After`` of refused requests, in seconds."""

_MAX_AWAITED = 8
"""Maximum scheduled retries per client, as a multiple of the maximum admitted requests."""

_SHARE = 8
"""Maximum amount that one client may hold, as a multiple of the free amount."""


class Admission:
    """Counts requests and their bytes per client. For one event loop, so it uses no locks.

    Args:
        max_requests: maximum requests at a time.
        max_bytes: maximum bytes claimed by all requests together.
        max_turns: maximum requests processed at a time; the others wait for their client's turn.
    """

    def __init__(self, max_requests: int, max_bytes: int, max_turns: int = 64) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_turns = max_turns
        self.requests = 0
        self.bytes = 0
        self._requests_of: dict[str, int] = {}
        self._bytes_of: dict[str, int] = {}
        self._departures: deque[float] = deque(maxlen=1024)
        self._returns = Returns(_MAX_AWAITED * max_requests)
        self._busy = 0.0
        self._busy_since: float | None = None
        self._turns = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def check(self, client: str) -> None:
        """Refuse a request that :meth:`enter` would refuse, before its body is read.

        Raises:
            AdmissionFull: there is no room.
        """
        if self.requests >= self.max_requests:
            raise self._full(client, f"{self.requests} requests are in flight, which is the limit")
        held = self._requests_of.get(client, 0)
        if held >= _SHARE * (self.max_requests - self.requests):
            raise self._full(
                client, f"{held} of your requests are in flight, and the places left are for other clients"
            )

    def enter(self, client: str, reservation: Reservation | None = None) -> Ticket:
        """Admit a request.

        Args:
            client: the client that sent it.
            reservation: its reservation, to which the bytes of its response are added.

        Raises:
            AdmissionFull: there is no room.
        """
        self.check(client)
        if not self.requests:
            self._busy_since = time.monotonic()
        self.requests += 1
        self._requests_of[client] = self._requests_of.get(client, 0) + 1
        return Ticket(self, client, reservation)

    def retry_after(self, client: str) -> float:
        """Return the seconds after which ``client`` should retry.

        That is the time to finish all requests in the server, and all retries scheduled before this one, at the recent
        drain rate.

        Requests that are refused together are thus retried one after another: if all were retried at once, most would
        be refused again.
        """
        now = self._busy_time()
        while self._departures and now - self._departures[0] > _WINDOW:
            self._departures.popleft()
        measured = now - self._departures[0] if len(self._departures) == self._departures.maxlen else min(now, _WINDOW)
        before = self.requests + self._returns.before(client)
        # If nothing finished recently, expect the same delay again.
        seconds = measured * before / len(self._departures) if self._departures else measured
        return float(math.ceil(min(max(seconds, _SHORTEST), _LONGEST)))

    def _busy_time(self) -> float:
        """Return the seconds during which the server had requests; an idle server drains nothing."""
        return self._busy + (0.0 if self._busy_since is None else time.monotonic() - self._busy_since)

    async def _wait_for_turn(self, client: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(client, deque())
        queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it got the turn at the same moment
                self._pass_on()
            else:
                with suppress(ValueError):  # already removed from the queue
                    queue.remove(waiter)
                if not queue and self._waiting.get(client) is queue:
                    del self._waiting[client]
            raise

    def _pass_on(self) -> None:
        """Pass a finished turn to the next client in the round."""
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            waiter = queue.popleft()
            if queue:
                self._waiting[client] = queue  # at the end of the round
            if not waiter.done():
                waiter.set_result(None)
                return
        self._turns -= 1

    def _full(self, client: str, why: str) -> AdmissionFull:
        seconds = self.retry_after(client)
        self._returns.add(client, time.monotonic() + seconds)
        return AdmissionFull(f"{why}; try again in {seconds:.0f} s", retry_after=seconds)

    def _claim(self, client: str, amount: int, own: int) -> None:
        """Count ``amount`` more bytes for a request that already holds ``own``."""
        if own + amount > self.max_bytes:
            raise RequestTooLarge(own + amount, self.max_bytes)
        left = self.max_bytes - self.bytes - amount
        held = self._bytes_of.get(client, 0)
        if left < 0:
            raise self._full(
                client,
                f"the requests in flight need {self.bytes:,} bytes, this one {amount:,}, and the limit is "
                f"{self.max_bytes:,}",
            )
        # A client's only request may use all free bytes: otherwise the largest requests would never be admitted.
        if held > own and held + amount > _SHARE * left:
            raise self._full(
                client, f"your requests need {held:,} bytes, this one {amount:,}, and the rest is for other clients"
            )
        self.bytes += amount
        self._bytes_of[client] = held + amount

    def _release(self, client: str, amount: int) -> None:
        if amount:
            self.bytes -= amount
            _subtract(self._bytes_of, client, amount)

    def _leave(self, client: str, worked: bool) -> None:
        busy = self._busy_time()
        if worked:  # a refused one does not count towards the drain rate
            self._departures.append(busy)
        self.requests -= 1
        if not self.requests:
            self._busy, self._busy_since = busy, None
        _subtract(self._requests_of, client, 1)


class Ticket:
    """A request's place in the server, as a context manager that releases it."""

    def __init__(self, admission: Admission, client: str, reservation: Reservation | None) -> None:
        self._admission = admission
        self._client = client
        self._reservation = reservation
        self._bytes = 0
        self._response = 0
        self._has_turn = False

    def claim(self, amount: int, response: int = 0) -> None:
        """Claim ``amount`` bytes until this request is done, and ``response`` bytes until its response is sent.

        Raises:
            AdmissionFull: they do not fit now, or exceed this client's share.
            RequestTooLarge: they would not fit even if this request were alone.
        """
        own = self._bytes + self._response + (0 if self._reservation is None else self._reservation.bytes)
        self._admission._claim(self._client, amount + response, own)
        self._bytes += amount
        self._response += response

    async def turn(self) -> float:
        """Wait for this client's turn, and return the seconds waited.

        The turn is held until the request is done or waits for another one.
        """
        admission, asked = self._admission, time.monotonic()
        if self._has_turn:
            self._has_turn = False
            admission._pass_on()
        if admission._turns < admission.max_turns:
            admission._turns += 1
        else:
            await admission._wait_for_turn(self._client)
        self._has_turn = True
        return time.monotonic() - asked

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_turn:
            self._admission._pass_on()
        self._admission._leave(self._client, self._has_turn or self._bytes + self._response > 0)
        self._admission._release(self._client, self._bytes)
        if self._reservation is not None and error is None:
            self._reservation.transfer(self._response)
        else:
            self._admission._release(self._client, self._response)


class Reservation:
    """The bytes held by one request, from the first of its body to the last of its response.

    Use it as a context manager, which releases them.

    Attributes:
        client: the client that sent the request.
        bytes: number of bytes it holds.
    """

    def __init__(self, admission: Admission, client: str) -> None:
        self._admission = admission
        self.client = client
        self._ended = False
        self.bytes = 0

    def claim(self, amount: int) -> None:
        """Claim ``amount`` bytes until the request ends, for example for its unpacked body.

        Raises:
            AdmissionFull, RequestTooLarge: see :meth:`Ticket.claim`.
        """
        self._admission._claim(self.client, amount, self.bytes)
        self.bytes += amount

    def transfer(self, amount: int) -> None:
        """Keep already claimed bytes until the request ends."""
        if self._ended:
            self._admission._release(self.client, amount)
        else:
            self.bytes += amount

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._admission._release(self.client, self.bytes)


def _subtract(amounts: dict[str, int], client: str, amount: int) -> None:
    left = amounts[client] - amount
    if left:
        amounts[client] = left
    else:  # forget clients that hold nothing
        del amounts[client]
