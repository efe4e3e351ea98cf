"""Images keep the host or account of the URL that they were found below."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from fxcore.errors import FxError
from service.offline.folder import Folder
from service.offline.inputs.reader import Reader
from service.offline.inputs.sources import find


class Hosted(MemoryFileSystem):
    """Like sftp's driver: paths have no host, which is an argument instead."""

    protocol = "hosted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return urlsplit(path).path.rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"host": host} if (host := urlsplit(path).netloc) else {}


class Account(Hosted):
    """Like adlfs: paths begin with the container, and the account is an argument."""

    protocol = "account"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        parts = urlsplit(path)
        return f"/{parts.username}{parts.path}".rstrip("/") if parts.scheme else path.rstrip("/")


@pytest.fixture(autouse=True)
def photos() -> Iterator[None]:
    for driver in (Hosted, Account):
        fsspec.register_implementation(driver.protocol, driver, clobber=True)
    Hosted.store.clear()
    for name in ("1.png", "deep/2.png"):
        Hosted("any").pipe_file(f"/photos/{name}", name.encode())
    yield
    for driver in (Hosted, Account):
        _registry.pop(driver.protocol)


@pytest.mark.parametrize("root", ["hosted://one:22/photos", "account://photos@one.net"])
def test_images_are_named_and_read_by_their_whole_url(root: str) -> None:
    for url in (root, f"{root}/", f"{root}/**/*.png"):
        found = list(find([url]))
        assert [source.path for source in found] == [f"{root}/1.png", f"{root}/deep/2.png"]
        assert [Reader(100).read(source) for source in found] == [b"1.png", b"deep/2.png"]
    assert [source.path for source in find([f"{root}/deep/2.png"])] == [f"{root}/deep/2.png"]


def test_colons_join_urls_or_are_part_of_a_name(tmp_path: Path) -> None:
    Hosted("any").pipe_file("/photos/app::Cat/4.png", b"4.png")
    (tmp_path / "app::Dog").mkdir()
    (tmp_path / "app::Dog/5.png").write_bytes(b"5.png")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("app/6.png", b"6.png")
    for url, name in (
        ("simplecache::hosted://one/photos/1.png", "1.png"),
        ("hosted://one/photos/app::Cat", "4.png"),
        ("hosted://one/photos/app::*/*.png", "4.png"),
        (f"{tmp_path.as_uri()}/app::Dog", "5.png"),
        (f"zip://app/6.png::{tmp_path}/photos.zip", "6.png"),
    ):
        [source] = find([url])
        assert Reader(100).read(source) == name.encode(), url
    Folder(tmp_path / "app::Out").write("name", b"content")
    assert (tmp_path / "app::Out/name").read_bytes() == b"content"


def test_a_url_without_its_host_is_a_one_line_error() -> None:
    with pytest.raises(FxError, match=r"hosted:///photos: TypeError: .*'host'"):
        list(find(["hosted:///photos"]))
