"""Cancellation of requests that exceed their deadline or whose client has disconnected."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from service.problems import DeadlineExceeded

_SHORT_SECONDS = 0.1
"""Requests that finish within this time are not watched for a disconnect."""


class Deadline:
    """A context manager that cancels its block at the deadline, or when the client disconnects.

    One timer serves both, and for short requests it never fires: ``asyncio.timeout`` and a task that watches the client
    would cost several per cent of their time.

    Args:
        receive: receives the next message of the client that is watched.
        seconds: seconds from now to the deadline.

    Attributes:
        at: the deadline, on the clock of ``time.monotonic()``.

    Raises:
        DeadlineExceeded: the block took too long.
        ClientDisconnect: the client disconnected.
    """

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._started = time.monotonic()
        self.at = self._started + seconds
        self._short = True
        self._body_read = False
        self._watching: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Deadline:
        self._task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
        self._cancelling = self._task.cancelling()
        self._set_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.remove_done_callback(self._disconnected)
            self._watching.cancel()
        reason, self._error = self._error, None
        if reason is None:
            return
        try:
            if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise reason from None
        finally:
            del reason  # otherwise its traceback would hold it, and with it this frame and the request's

    def shorten(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from the start, if that is sooner."""
        self.at = min(self.at, self._started + seconds)
        self._timer.cancel()
        self._set_timer()

    def body_read(self) -> None:
        """Start to watch the client: the next message after the body is its disconnect."""
        self._body_read = True
        self._watch()

    def _set_timer(self) -> None:
        left = self.at - time.monotonic()
        seconds = min(left, _SHORT_SECONDS) if self._short else left
        self._timer = self._task.get_loop().call_later(max(0.0, seconds), self._check)

    def _check(self) -> None:
        self._short = False
        if time.monotonic() >= self.at:
            self._cancel(DeadlineExceeded())
        else:
            self._set_timer()
            self._watch()

    def _watch(self) -> None:
        if self._body_read and not self._short and self._watching is None:
            self._watching = asyncio.create_task(_disconnect(self._receive))
            self._watching.add_done_callback(self._disconnected)

    def _disconnected(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled():
            self._cancel(ClientDisconnect())

    def _cancel(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
