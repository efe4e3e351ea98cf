"""Tasks that outlive the request that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def background(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``work`` as a task of the service's own, with no context.

    A task inherits its starter's context variables. Such work may go on for minutes and is shared between requests, so
    its log lines carry no request's id, and it does not count as part of a request that was accepted before draining.
    """
    return asyncio.create_task(work, context=Context())
