"""Tasks that outlive the request that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from service.observability.logs import TASK_PREFIX

T = TypeVar("T")


def background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start ``work`` as a task of the service's own, with no context.

    A task inherits its starter's context variables. Such work may go on for minutes and is shared between requests, so
    its log lines carry no request's id, but its own name.

    Args:
        name: what it does; it follows :data:`~service.observability.logs.TASK_PREFIX` in log lines.
    """
    return asyncio.create_task(work, name=TASK_PREFIX + name, context=Context())
