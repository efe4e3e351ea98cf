"""A server with faults on request, clients that send requests meanwhile, and the right results from plain torch."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from torch.testing import assert_close

from tests.e2e.conftest import Server, servers, until
from tests.e2e.faults.app import Faulty
from tests.processes import QuietHandler, serving
from tests.wire import SAFETENSORS, read, sent

# Short enough for a test to wait for, and long enough for a right response from a busy machine.
REQUEST_TIMEOUT = 10.0
GRACE_PERIOD = 6.0

FEATURES = "/v1/models/{}/features?nodes=conv,head"


class Weights:
    """Published weights for a local server, at ``url``, which can be made to stall or to send other data."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = Faulty().eval()
        buffer = io.BytesIO()
        torch.save(self.model.state_dict(), buffer)
        self.data = buffer.getvalue()
        self.digits = hashlib.sha256(self.data).hexdigest()[:8]
        self.sent = self.data
        self.stall_after: int | None = None
        self.resumed = threading.Event()
        weights = self

        class Handler(QuietHandler):
            def do_HEAD(self) -> None:
                self.send_response(200)
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(weights.sent)))
                self.end_headers()
                self.wfile.write(weights.sent[: weights.stall_after])
                if weights.stall_after is not None:
                    weights.resumed.wait(120)

        self.handler = Handler
        self.url = ""


def rows(*marks: float) -> torch.Tensor:
    """Return ``[N, 3, 32, 32]`` of noise that differs by mark, with the mark as each row's first value."""
    made = torch.stack([torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(int(m))) for m in marks])
    made[:, 0, 0, 0] = torch.tensor(marks, dtype=torch.float32)
    return made


class FaultyServer(Server):
    """A server that runs ``tests.e2e.faults.app``."""

    def command(self) -> list[str]:
        return ["uvicorn", "tests.e2e.faults.app:create_app", "--factory", "--port", f"{self.port}"]

    def features(self, *marks: float, model: str = "faulty", **headers: str) -> httpx.Response:
        """Request features of the rows from :func:`rows`."""
        return self.http.post(FEATURES.format(model), **sent(rows(*marks), **{"accept": SAFETENSORS, **headers}))

    def settled(self) -> bool:
        """Return whether nothing is in flight."""
        return all(
            not self.metric(f"fxserve_{name} ") for name in ("inflight_requests", "inflight_bytes", "queue_size")
        )


class Clients:
    """Clients whose responses are checked row by row against plain torch."""

    def __init__(self, server: FaultyServer, model: Faulty) -> None:
        self.server = server
        self.model = model

    def check(self, response: httpx.Response, *marks: float) -> None:
        """Check that ``response`` is right, and belongs to this request."""
        found = read(response)
        with torch.inference_mode():
            conv = self.model.conv(rows(*marks))
            head = self.model.head(self.model.pool(conv).flatten(1))
        assert_close(found["conv"], conv, rtol=1e-4, atol=1e-5)
        assert_close(found["head"], head, rtol=1e-4, atol=1e-5)

    def ask(self, among: Sequence[float] = (), good: int = 40, at_once: int = 8) -> list[httpx.Response]:
        """Send a request with one row for each mark in ``among``, and return the responses in that order.

        Meanwhile, send ``good`` other requests, and check that each gets one response, which is right.
        """
        marks: list[float] = [float(i) for i in range(good)]
        for place, mark in enumerate(among):
            marks.insert((place + 1) * len(marks) // (len(among) + 1), mark)
        with ThreadPoolExecutor(at_once) as pool:
            responses = list(
                pool.map(lambda n: self.server.features(marks[n], **{"x-request-id": f"r{n}"}), range(len(marks)))
            )
        for number, (mark, response) in enumerate(zip(marks, responses, strict=True)):
            assert response.headers.get_list("x-request-id") == [f"r{number}"]
            if mark not in among:
                self.check(response, mark)
        return [response for mark, response in zip(marks, responses, strict=True) if mark in among]


@pytest.fixture(scope="package")
def weights() -> Iterator[Weights]:
    served = Weights()
    with serving(served.handler) as served.url:
        yield served


@pytest.fixture(scope="package")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder through which test and server communicate."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="package")
def begin(
    tmp_path_factory: pytest.TempPathFactory, weights: Weights, together: Path
) -> Iterator[Callable[..., FaultyServer]]:
    """Start a server; all share a weights cache that has the weights of ``faulty``."""
    home = tmp_path_factory.mktemp("torch-home")
    environment = {
        "FAULTS_DIR": str(together),
        "FAULTS_URL": weights.url,
        "FAULTS_HASH": weights.digits,
        "NO_PROXY": "127.0.0.1",
    }
    with servers(FaultyServer, home) as start:
        (home / f"hub/checkpoints/faulty-{weights.digits}.pth").write_bytes(weights.data)

        def begin(**settings: Any) -> FaultyServer:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                return start(request_timeout=REQUEST_TIMEOUT, grace_period=GRACE_PERIOD, **settings)

        yield begin


@pytest.fixture(scope="package")
def server(begin: Callable[..., FaultyServer]) -> FaultyServer:
    return begin()


@pytest.fixture(scope="package")
def clients(server: FaultyServer, weights: Weights) -> Clients:
    made = Clients(server, weights.model)
    made.ask()
    return made


@pytest.fixture
def sound(server: FaultyServer, clients: Clients) -> Iterator[None]:
    """Check after a fault that no trace of it is left: same process, ready, right responses, and no memory growth."""
    before = psutil.Process(server.process.pid).memory_info().rss
    yield
    until(server.settled)
    assert server.http.get("/readyz").status_code == 200
    clients.ask(good=16)
    assert server.process.poll() is None
    grown = psutil.Process(server.process.pid).memory_info().rss - before
    assert grown < 64 * 1024**2
