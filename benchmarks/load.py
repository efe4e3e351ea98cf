"""A load generator that keeps N connections busy from a separate process, with little CPU time.

It uses ``wrk`` if installed, else plain sockets with epoll, which take a fraction of an asyncio client's time. After a
429 response, a connection waits for ``Retry-After``; wrk does not. A connection that the server closes is replaced, and
counted as ``closed`` if a request was in flight. As a program, it reads a job as JSON from stdin and writes the result
to stdout.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close\r", re.IGNORECASE)


@dataclass
class Load:
    """The result of a measurement.

    Attributes:
        requests: responses with status 200 within ``seconds``.
        statuses: number of responses by status, and of requests whose connection was ``closed`` before the response.
        p50, p99: latency in milliseconds of the responses with status 200.
    """

    requests: int
    seconds: float
    p50: float
    p99: float
    statuses: dict[str, int]

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def http(
    port: int,
    path: str,
    body: bytes = b"",
    content_type: str = "",
    accept: str = "",
    headers: Mapping[str, object] | None = None,
) -> bytes:
    """Serialize an HTTP request: POST if there is a body, else GET."""
    head = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    head += [f"Accept: {accept}"] if accept else []
    head += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"] if body else []
    head += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def infer(port: int, path: str, image: bytes, outputs: Sequence[str]) -> bytes:
    """Serialize an Open Inference Protocol request for one encoded image, with binary tensors like tritonclient's."""
    element = len(image).to_bytes(4, "little") + image
    given = {
        "name": "image",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(element)},
    }
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    head = json.dumps({"inputs": [given], "outputs": wanted}).encode()
    headers = {"Inference-Header-Content-Length": len(head)}
    return http(port, path, head + element, "application/octet-stream", headers=headers)


def embeddings(port: int, model: str, image: bytes) -> bytes:
    """Serialize an embeddings request for one image, with base64 vectors as in OpenAI's clients."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    body = json.dumps({"model": model, "input": url, "encoding_format": "base64"}).encode()
    return http(port, "/v1/embeddings", body, "application/json")


def run(
    port: int, requests: list[bytes], connections: int, seconds: float, warm: float = 1.0, wrk: bool = True
) -> Load:
    """Run a load against a server on 127.0.0.1 from another process, after ``warm`` seconds of warm-up."""
    if wrk and shutil.which("wrk"):
        _wrk(port, requests, connections, warm)
        return _wrk(port, requests, connections, seconds)
    job = {
        "port": port,
        "requests": [base64.b64encode(request).decode() for request in requests],
        "connections": connections,
        "seconds": seconds,
        "warm": warm,
    }
    done = subprocess.run([sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True, check=True)
    return Load(**json.loads(done.stdout))


_SCRIPT = """
local requests = {}
for i = 1, %d do
  local file = io.open(string.format("%s/%%d", i), "rb")
  requests[i] = file:read("*a")
  file:close()
end
local next = 0
request = function()
  next = next %% #requests + 1
  return requests[next]
end
done = function(summary, latency, requests)
  io.write(string.format('RESULT {"all": %%d, "us": %%d, "p50": %%f, "p99": %%f, "refused": %%d, "broken": %%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""


def _wrk(port: int, requests: list[bytes], connections: int, seconds: float) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        for i, request in enumerate(requests, 1):
            Path(folder, str(i)).write_bytes(request)
        script = Path(folder, "requests.lua")
        script.write_text(_SCRIPT % (len(requests), folder))
        # wrk takes whole seconds.
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout=60s", "-s", str(script)]
        out = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True).stdout
    found = json.loads(out.partition("RESULT ")[2])
    good = found["all"] - found["refused"]
    statuses = {"200": good, "other": found["refused"], "broken": found["broken"]}
    statuses = {status: count for status, count in statuses.items() if count}
    return Load(good, found["us"] / 1e6, found["p50"] / 1000, found["p99"] / 1000, statuses)


class _Connection:
    """A keep-alive connection with at most one request in flight."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.started = 0.0
        self.unsent = memoryview(b"")
        self.head = b""
        self.missing = -1
        self.status = ""
        self.wait = 0.0
        self.closes = False

    def send(self) -> None:
        while self.unsent:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self, buffer: bytearray) -> bool:
        """Read available data; return whether the response is complete."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        if self.missing < 0:
            self.head += bytes(memoryview(buffer)[:count])
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = _LENGTH.search(self.head, 0, end)
            if length is None:
                raise ValueError("a response without Content-Length")
            self.status = self.head[9:12].decode()
            self.missing = int(length[1]) - (len(self.head) - end - 4)
            self.closes = _CLOSE.search(self.head, 0, end + 2) is not None
            wait = _RETRY_AFTER.search(self.head, 0, end)
            self.wait = 0.0 if wait is None else float(wait[1])
            self.head = b""
        else:
            self.missing -= count
        return self.missing <= 0


def _load(port: int, requests: list[bytes], connections: int, seconds: float, warm: float) -> Load:
    selector = selectors.DefaultSelector()
    refused: list[tuple[float, int, _Connection]] = []
    buffer = bytearray(1 << 20)
    sent = 0
    latencies: list[float] = []
    statuses: Counter[str] = Counter()

    def begin(connection: _Connection) -> None:
        nonlocal sent
        connection.unsent = memoryview(requests[sent % len(requests)])
        sent += 1
        connection.missing = -1
        connection.started = time.perf_counter()
        write(connection)

    def write(connection: _Connection) -> None:
        try:
            connection.send()
        except BlockingIOError:
            selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            return
        selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def opened() -> _Connection:
        connection = _Connection(port)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def replaced(connection: _Connection) -> _Connection:
        selector.unregister(connection.socket)
        connection.socket.close()
        return opened()

    for _ in range(connections):
        begin(opened())
    start = time.perf_counter() + warm
    now = 0.0
    while now < start + seconds:
        for key, events in selector.select(0.05 if refused else 1.0):
            connection = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    write(connection)
                if not (events & selectors.EVENT_READ and connection.receive(buffer)):
                    continue
            except (ConnectionResetError, BrokenPipeError):
                if time.perf_counter() >= start:
                    statuses["closed"] += 1
                begin(replaced(connection))
                continue
            now = time.perf_counter()
            if now >= start:
                statuses[connection.status] += 1
                if connection.status == "200":
                    latencies.append(now - connection.started)
            wait = connection.wait
            if connection.closes:
                connection = replaced(connection)
            if wait:
                heapq.heappush(refused, (now + wait, id(connection), connection))
            else:
                begin(connection)
        now = time.perf_counter()
        while refused and refused[0][0] <= now:
            begin(heapq.heappop(refused)[2])
    latencies.sort()
    p50, p99 = (1000 * latencies[int(len(latencies) * q)] if latencies else float("nan") for q in (0.5, 0.99))
    return Load(len(latencies), now - start, p50, p99, dict(statuses))


if __name__ == "__main__":
    job = json.load(sys.stdin)
    job["requests"] = [base64.b64decode(request) for request in job["requests"]]
    json.dump(asdict(_load(**job)), sys.stdout)
