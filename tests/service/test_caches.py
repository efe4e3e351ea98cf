"""Caches are bounded with the longest keys that clients may send, not only with the largest values."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice, product
from string import ascii_lowercase

import pytest
import torch

from service.codecs import responses
from service.codecs.requests import bodies
from service.codecs.tensors import safetensors
from service.engine.description import nodes_text
from service.problems import Problem
from tests.service.conftest import Client

NAMES = ["".join(letters) for letters in islice(product(ascii_lowercase, repeat=3), 14_000)]
"""Different names, 56 kB as a list: about as long as a header or a query can be."""


def size_of(key: object) -> int:
    """Return the bytes of a key and, if it is a tuple, of its items."""
    return sys.getsizeof(key) + sum(map(size_of, key if isinstance(key, tuple) else ()))


@contextmanager
def kept() -> Iterator[list[int]]:
    """Measure the bytes that the block leaves in memory."""
    result: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield result
        gc.collect()
        result.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def test_content_types() -> None:
    parameters = [f"{name}=" for name in NAMES]
    with kept() as left:
        for long in (parameters, parameters[:400]):
            for number in range(32):
                with suppress(Problem):
                    bodies.check(f"image/jpeg; {'; '.join(long)}; n={number}", "identity" + " " * 10_000 * (number % 2))
    assert left[0] < 64 * 4096


def test_accepted_types() -> None:
    with kept() as left:
        for number in range(32):
            responses.negotiate(f"*/*, {number}/{', '.join(NAMES)}", ("float32",), False)
    assert left[0] < 32 * 4096


@pytest.mark.exhaustive
def test_headers_of_responses() -> None:
    """Of an extractor with the most and longest keys, for images of many sizes."""
    keys = [name.ljust(256, "🜁") for name in NAMES[:1024]]
    metadata = {"nodes": nodes_text(dict.fromkeys(keys, keys[0]))}
    with kept() as left:
        for height in range(64):
            safetensors.write(dict.fromkeys(keys, torch.zeros(0, height, 1)), metadata)
    assert left[0] < 32 * 1024**2


def test_modules_to_open_that_do_not_exist(client: Client) -> None:
    path = "/v1/models/resnet18/graph?format=layout&open="
    closed = client.get(path + "a").content
    cached = client.app.state.fxserve.documents._values
    before = set(cached)
    for number in range(3):
        assert client.get(f"{path}{','.join(NAMES)},{number}").content == closed
    added = set(cached) - before
    assert len(added) == 3
    assert max(map(size_of, added)) < 1024
