"""Responses that cannot be read are errors of the client, never of JSON or NumPy."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from service.client import exceptions, flows
from service.client.responses import Receiver
from tests.service.client.test_client import REF, asked, response, steps


def encoded(header, data=bytes(4)):
    """Safetensors with a header, which may be anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def described_tensor(**changed):
    return encoded({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}})


GARBLED = {
    "empty": b"",
    "shorter than a length": b"abc",
    "cut in the header": described_tensor()[:30],
    "cut in the data": described_tensor()[:-1],
    "a length beyond the end": b"\xff" * 8 + described_tensor()[8:],
    "no JSON": encoded(b"{no JSON}"),
    "no UTF-8": encoded(b'{"\xff": 1}'),
    "deep": encoded(b"[" * 100_000),
    "a list": encoded([]),
    "an entry of another kind": encoded({"a": []}),
    "no dtype": encoded({"a": {"shape": [1], "data_offsets": [0, 4]}}),
    "no rows": described_tensor(shape=[]),
    "other rows": encoded({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    **{f"dtype {name!r}": described_tensor(dtype=name) for name in ("F33", None, [])},
    **{f"shape {shape}": described_tensor(shape=shape) for shape in ([2], [10**30], [1.0], ["1"], None)},
    **{
        f"offsets {offsets}": described_tensor(data_offsets=offsets)
        for offsets in ([0], [0, 4, 8], [4, 0], [-4, 0], [0, 10**30], [0.0, 4.0], [0, 8], [4, 8], None, "04")
    },
}


@pytest.mark.parametrize("name", GARBLED)
def test_features_that_cannot_be_read_are_an_error_of_the_client(name):
    _, error = asked(REF, [response(200, GARBLED[name], content_type="application/x-safetensors")])
    assert isinstance(error, exceptions.UnreadableResponse)
    assert "the features in the response cannot be read: " in str(error)


def test_features_with_changed_bytes_are_read_or_an_error_of_the_client():
    """A change of a value is not noticed, nor one of a key."""
    body, random = described_tensor(), np.random.default_rng(0)
    for _ in range(2000):
        changed = bytearray(body)
        for place in random.integers(0, len(body), random.integers(1, 4)):
            changed[place] = random.integers(0, 256)
        _, result = asked(REF, [response(200, bytes(changed), content_type="application/x-safetensors")])
        assert isinstance(result, exceptions.UnreadableResponse) or [len(rows) for rows in result.values()] in ([1], [])


def test_a_document_that_is_nested_too_deep_is_no_response():
    for status, kind in ((200, exceptions.ConnectionFailed), (500, exceptions.ServerError)):
        _, error = steps(flows.model, [response(status, b"[" * 100_000)], "resnet18")
        assert isinstance(error, kind)


def test_memory_is_not_reserved_for_whatever_a_header_announces():
    receiver = Receiver(httpx.Response(200, headers={"content-length": str(10**19)}))
    receiver.feed(b"ab")
    assert receiver.response().content.tobytes() == b"ab"
