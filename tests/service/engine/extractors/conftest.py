"""A real S3 server, and a store on that server or in a folder."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from service.engine.extractors import extractors, sharing
from tests.service.engine.extractors.shared_store import Pair
from tests.service.engine.running import PATIENCE, MakeEngine


class AtomicPuts:
    """moto's WSGI application, limited to one PUT at a time.

    S3 checks ``If-None-Match`` and writes atomically. moto does not, so two concurrent PUTs may both succeed.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._turn if environ["REQUEST_METHOD"] == "PUT" else nullcontext():
            response: Iterable[bytes] = self._app(environ, start_response)
            return response


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket on an S3 server of this machine."""
    server = make_server("127.0.0.1", 0, AtomicPuts(), threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        boto3.client("s3").create_bucket(Bucket="features")
        yield "s3://features"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the store's timeout, since a busy disk may take seconds for an operation that is usually instant."""
    monkeypatch.setattr(sharing, "TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make cached reads and checks of the store expire immediately, as if two seconds had passed."""
    monkeypatch.setattr(extractors, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(sharing.Sharing._check_soon, "__defaults__", (0.0,))


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.exhaustive)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    return str(tmp_path / "store")


@pytest.fixture
async def pair(engine: MakeEngine, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two engines over one store, in the folder ``store`` of ``tmp_path``."""
    url = str(tmp_path / "store")
    async with engine(extractors=url) as one, engine(extractors=url) as other:
        yield one, other
