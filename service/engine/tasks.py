"""Background tasks that outlive the request that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from service.observability.logs import TASK_PREFIX

T = TypeVar("T")


def background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start ``work`` as a task of the service, with an empty context.

    By default a task inherits the context variables of its creator. Background work may run for minutes and is shared
    between requests, so its log lines carry its own name and not a request id.

    Args:
        name: the name in log lines, after :data:`~service.observability.logs.TASK_PREFIX`.
    """
    return asyncio.create_task(work, name=TASK_PREFIX + name, context=Context())
