"""Caches are bounded with the longest keys that clients may send, not only with the largest values."""

from __future__ import annotations

import sys
from itertools import islice, product
from string import ascii_lowercase

from tests.service.conftest import Client

NAMES = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), 14_000)]
"""Different names, 56 kB as a list: about as long as a header or a query can be."""


def size_of(key: object) -> int:
    """Return the bytes of a key and, if it is a tuple, of its items."""
    return sys.getsizeof(key) + sum(map(size_of, key if isinstance(key, tuple) else ()))


def test_modules_to_open_that_do_not_exist(client: Client) -> None:
    path = "/v1/models/resnet18/graph?format=layout&open="
    closed = client.get(path + "a").content
    cached = client.app.state.fxserve.graphs._values
    before = set(cached)
    for number in range(3):
        assert client.get(f"{path}{','.join(NAMES)},{number}").content == closed
    added = set(cached) - before
    assert len(added) == 3
    assert max(map(size_of, added)) < 1024
