"""Reading images from an HTTP server that refuses some of them, or fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec.config
import pytest

from fxcore.errors import BadImage, FxError
from service.offline import folder
from service.offline.inputs import reader
from service.offline.inputs.reader import Reader
from service.offline.inputs.sources import Source, find
from tests.processes import QuietHandler, serving


class Photos(QuietHandler):
    """``/200.png`` is a photo; ``/403.png`` is answered 403; ``/once.png`` fails first; ``/login.png`` needs one."""

    failed: set[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.strip("/").partition(".")[0]
        if name == "once" and self.command == "GET":
            status = 200 if name in self.failed else 500
            self.failed.add(name)
        elif name == "login":
            status = 200 if self.headers["Authorization"] == "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==" else 401
        else:
            status = int(name) if name.isdigit() else 200
        self.send_response(status)
        self.end_headers()  # without Content-Length
        if self.command == "GET":
            self.wfile.write(b"a photo")


@pytest.fixture
def photos(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(reader, "_RETRY_DELAYS", (0.0, 0.0))
    monkeypatch.setattr(Photos, "failed", set(), raising=False)
    with serving(Photos) as url:
        yield url


def at(url: str) -> Source:
    return Source(url, url, size=7)


def test_a_photo_of_unknown_size_is_read(photos: str) -> None:
    [source] = find([f"{photos}/200.png"])
    assert source.size is None
    assert Reader(7).read(source) == b"a photo"
    with pytest.raises(BadImage, match="the file has 7 bytes; at most 6 are allowed"):
        Reader(6).read(source)


@pytest.mark.parametrize("status", [404, 410, 451])
def test_refused_photos_fail_by_themselves(status: int, photos: str) -> None:
    reader = Reader(100)
    for _ in range(60):
        with pytest.raises(BadImage, match=str(status)):
            reader.read(at(f"{photos}/{status}.png"))


@pytest.mark.parametrize("status", [401, 403, 407])
def test_many_forbidden_photos_end_the_run(status: int, photos: str) -> None:
    """A signed URL may have expired."""
    reader = Reader(100)
    for _ in range(2):
        for _ in range(49):
            with pytest.raises(BadImage, match=str(status)):
                reader.read(at(f"{photos}/{status}.png"))
        reader.read(at(f"{photos}/200.png"))
    for _ in range(50):
        with pytest.raises(FxError, match=str(status)) as raised:
            reader.read(at(f"{photos}/{status}.png"))
    assert not isinstance(raised.value, BadImage)


def test_a_photo_is_read_again_after_a_failure(photos: str) -> None:
    assert Reader(100).read(at(f"{photos}/once.png")) == b"a photo"


def test_only_failures_in_a_row_end_the_run(photos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_FAILURES", 3)
    server = Reader(100)
    for name in ("500", "503", "200", "500", "500"):
        if name == "200":
            server.read(at(f"{photos}/{name}.png"))
        else:
            with pytest.raises(BadImage, match=name):
                server.read(at(f"{photos}/{name}.png"))
    with pytest.raises(FxError, match=rf"^{photos}/500.png: ClientResponseError: 500") as raised:
        server.read(at(f"{photos}/500.png"))
    assert not isinstance(raised.value, BadImage)


def test_passwords_are_given_to_the_driver_not_in_urls(photos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes the URLs of its images to its output. The login is that of RFC 7617."""
    url = f"{photos}/login.png"
    with pytest.raises(FxError, match=r"the URL http://…@127.0.0.1:\d+/login.png has a password") as refused:
        list(find([url.replace("//", "//Aladdin:open sesame@")]))
    assert "Aladdin" not in str(refused.value)
    assert "sesame" not in str(refused.value)
    assert "FSSPEC_HTTP as JSON (headers)" in str(refused.value)
    with pytest.raises(FxError, match="the URL http://…@127"):
        list(find([url.replace("http://", "simplecache::http://Aladdin:open sesame@")]))
    for other in ("s3://bucket/a:b@c.png", "abfs://photos@account/a.png", "github://owner:name@main/a.png", url):
        assert folder._WITH_PASSWORD.search(other) is None
    with pytest.raises(BadImage, match="401"):
        Reader(100).read(at(url))
    options: dict[str, dict[str, Any]] = {}
    variable = {"FSSPEC_HTTP": '{"headers": {"Authorization": "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="}}'}
    fsspec.config.set_conf_env(options, variable)
    monkeypatch.setitem(fsspec.config.conf, "http", options["http"])
    assert Reader(100).read(at(url)) == b"a photo"
