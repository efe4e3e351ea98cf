"""Background tasks that outlive the request that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextvars import Context
from typing import Any, Generic, TypeVar

from service.observability.logs import TASK_PREFIX

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def background(work: Coroutine[Any, Any, T], name: str, shared: bool = False) -> asyncio.Task[T]:
    """Start ``work`` as a task of the service, with an empty context.

    By default a task inherits the context variables of its creator. Background work may run for minutes and is shared
    between requests, so its log lines carry its own name and not a request id.

    Args:
        name: the name in log lines, after :data:`~service.observability.logs.TASK_PREFIX`.
        shared: whether all who wait for it may leave, so that nobody may see its error.
    """
    task = asyncio.create_task(work, name=TASK_PREFIX + name, context=Context())
    if shared:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class SingleFlight(Generic[K, T]):
    """Values by key, each made once by a background task for all who wait for it. For one event loop.

    The task goes on when its waiters leave. If it fails, the next call starts another one.

    Args:
        name: see :func:`background`.
        keep: whether values are kept once they are made.

    Attributes:
        made: the values that are there.
    """

    def __init__(self, name: str, keep: bool = True) -> None:
        self.made: dict[K, T] = {}
        self._tasks: dict[K, asyncio.Task[T]] = {}
        self._name = name
        self._keep = keep

    @property
    def making(self) -> list[K]:
        """The keys whose values are being made."""
        return [key for key in self._tasks if key not in self.made]

    def get(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]:
        """Return an awaitable of the value of ``key``. If there is none, a task that calls ``make`` is started now."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = background(self._make(key, make), self._name, shared=True)
        return asyncio.shield(task)

    def forget(self, key: K) -> bool:
        """Forget the value of ``key``, and return whether there was one. One being made goes to its waiters only."""
        self.made.pop(key, None)
        return self._tasks.pop(key, None) is not None

    async def _make(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        # No variable holds the task: the traceback of its error would hold it too.
        try:
            value = await make()
            if self._keep and self._tasks.get(key) is asyncio.current_task():
                self.made[key] = value
            return value
        finally:
            if key not in self.made and self._tasks.get(key) is asyncio.current_task():
                self.forget(key)
