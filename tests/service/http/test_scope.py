"""Request headers as the routes and the middleware read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.datastructures import Headers

from service.http.scope import header, joined_header

SENT = [(b"accept", b"image/png"), (b"host", b"localhost"), (b"accept", b"*/*;q=0.1"), (b"x-name", b"caf\xe9")]


class Walked(list[tuple[bytes, bytes]]):
    """Counts how often it is walked."""

    times = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["accept", "host", "x-name", "missing"])
def test_values_are_those_that_starlette_finds(name: str) -> None:
    scope: dict[str, Any] = {"type": "http", "headers": SENT}
    expected = Headers(raw=SENT).getlist(name)
    assert header(scope, name.encode()) == (expected[0] if expected else None)
    assert joined_header(scope, name.encode()) == (", ".join(expected) if expected else None)


def test_they_are_walked_once_for_a_request() -> None:
    sent = Walked(SENT)
    scope = {"type": "http", "headers": sent}
    for name in (b"accept", b"host", b"x-name", b"accept"):
        header(scope, name)
        joined_header(scope, name)
    assert sent.times == 1
