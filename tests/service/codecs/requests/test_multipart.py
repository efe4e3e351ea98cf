import asyncio

import httpx
import pytest

from service.codecs.requests import bodies, multipart
from service.problems import Problem
from service.schemas.v1.features import MAX_IMAGES


def read(body, content_type, step=None):
    async def chunks():
        size = step or max(1, len(body))
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return asyncio.run(multipart.read(chunks(), bodies.check(content_type, None)[1]))


def made(files):
    request = httpx.Request("POST", "http://x", files=files)
    return request.read(), request.headers["content-type"]


FILES = [b"first", b"", b"\r\n--tricky\r\n" * 50, bytes(range(256)) * 300]


@pytest.mark.parametrize("step", [1, 7, 1000, None])
def test_files_in_the_order_sent(step):
    body, content_type = made([("images", (f"{i}.jpg", data, "image/jpeg")) for i, data in enumerate(FILES)])
    assert read(body, content_type, step) == FILES


def test_a_part_without_file_name_may_be_an_image():
    body, content_type = made([("a", (None, b"data", "image/png"))])
    assert read(body, content_type) == [b"data"]


def test_a_field_that_is_no_file_is_refused():
    body, content_type = made([("images", ("a.jpg", b"1")), ("pool", (None, b"avg"))])
    with pytest.raises(Problem, match=r"'pool'.*is not a file"):
        read(body, content_type)


@pytest.mark.parametrize("boundary", ["", "; boundary=", "; boundary=" + "x" * 71], ids=["none", "empty", "long"])
def test_boundaries_that_are_none_are_refused(boundary):
    with pytest.raises(Problem) as refusal:
        read(b"", f"multipart/form-data{boundary}")
    assert refusal.value.slug == "invalid-request"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x--\r\n",
        b"garbage",
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\ncut',
        b"--x\r\nContent-Disposition: form-data; filename=a; n=" + b"y" * 9000 + b"\r\n\r\n1\r\n--x--",
        b"--x\r\nno colon\r\n\r\n1\r\n--x--",
    ],
    ids=["empty", "no part", "garbage", "cut", "long header", "no header"],
)
def test_malformed_bodies_are_refused(body):
    with pytest.raises(Problem) as refusal:
        read(body, "multipart/form-data; boundary=x")
    assert refusal.value.slug == "invalid-request"


def test_too_many_parts_are_refused():
    body, content_type = made([("a", ("a", b"1"))] * (MAX_IMAGES + 1))
    with pytest.raises(Problem, match="more than 1024 parts"):
        read(body, content_type)
