"""Extractors that several server processes know: made by one, named, asked for, deleted and forgotten by all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import Reference
from tests.e2e.conftest import Server, until
from tests.service.engine.extractors.conftest import bucket
from tests.wire import created, refused, sent

__all__ = ["bucket"]

MODEL = "squeezenet1_1"
KINDS = [{"return_nodes": {f"features.{number}": "map"}} for number in (3, 6, 8)]


class Workers(Server):
    """``fxserve serve`` with three processes."""

    def command(self) -> list[str]:
        return [*super().command(), "--workers", "3", "--log-level", "info"]


def made(server: Server, **spec: Any) -> Any:
    return created(server.http, model=MODEL, weights="random", **spec)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    home = tmp_path_factory.mktemp("workers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(home))
        server = Workers(home)
    server.wait()
    until(lambda: server.ready() == 3)
    yield server
    server.stop()


async def patiently(send: Callable[..., Awaitable[httpx.Response]], url: str, **rest: Any) -> httpx.Response:
    """What ``send`` gets, as a client does that is told to come again: where the disk is busy, the store is late."""
    for _ in range(10):
        answer = await send(url, **rest)
        if answer.status_code != 503:
            break
        await asyncio.sleep(1)
    return answer


async def _traffic(url: str, photo: bytes, count: int) -> tuple[list[str], set[str]]:
    """``count`` requests by eight clients that make, name, ask for and delete extractors; what went wrong, and the ids
    that are left."""
    order = random.Random(7)
    wrong: list[str] = []
    alive: dict[str, str] = {}
    lock = asyncio.Lock()
    left = iter(range(count))

    async def one(client: httpx.AsyncClient, number: int) -> None:
        own = f"client-{number}"
        for step in left:
            # A connection of its own for each, so that any of the processes answers it.
            request = ["make", "features", "features", "named", "show", "one step"][step % 6]
            if step % 40 == 39 and own in alive:
                request = "delete"
            if request == "make" or own not in alive:
                spec = {"return_nodes": {f"features.{3 + number}": f"key{step}"}, "name": None}
                if own not in alive:
                    spec["name"] = own
                spec |= {"model": MODEL, "weights": "random"}
                answer = await patiently(client.post, f"{url}/v1/extractors", json=spec)
                if answer.status_code not in (200, 201):
                    wrong.append(f"make {answer.status_code} {answer.text}")
                elif own not in alive:
                    alive[own] = answer.json()["id"]
                else:
                    alive[f"{own}.{step}"] = answer.json()["id"]
                continue
            if request == "delete":
                id = alive.pop(own)
                answer = await patiently(client.delete, f"{url}/v1/extractors/{own}")
                if answer.status_code != 204:
                    wrong.append(f"delete {answer.status_code} {answer.text}")
                # Soon no process knows it any more: six questions reach them all.
                deadline = time.monotonic() + 60
                while True:
                    answers = [
                        await patiently(client.get, f"{url}/v1/extractors/{name}")
                        for name in (id, own)
                        for _ in range(6)
                    ]
                    found = [answer for answer in answers if answer.status_code != 404]
                    if not found:
                        break
                    if time.monotonic() > deadline:
                        wrong.append(f"deleted, and {found[0].status_code} {found[0].text}")
                        break
                    await asyncio.sleep(0.2)
                continue
            async with lock:
                id = order.choice([id for name, id in alive.items() if name.startswith(own)])
            if request == "show":
                answer = await patiently(client.get, f"{url}/v1/extractors/{id}")
            else:
                path = {
                    "features": f"extractors/{id}/features?pool=avg",
                    "named": f"extractors/{own}/features?pool=avg",
                    "one step": f"models/{MODEL}/features?weights=random&pool=avg&nodes=features.12",
                }[request]
                answer = await patiently(client.post, f"{url}/v1/{path}", **sent(photo))
            if answer.status_code != 200:
                wrong.append(f"{request} {id} {own} {answer.status_code} {answer.text[:300]}")

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(8)))
    return wrong, set(alive.values())


@pytest.mark.exhaustive
def test_hundreds_of_requests_to_three_processes(
    workers: Workers, photos: dict[str, bytes], reference: Reference
) -> None:
    """None is told 404 but those who ask for what was deleted, and those are."""
    wrong, ids = asyncio.run(_traffic(workers.url, photos["chelsea"], 200))
    assert wrong == []

    def lists_agree() -> bool:
        listed = workers.ask("GET", "/v1/extractors").json()["extractors"]
        assert ids <= {extractor["id"] for extractor in listed}
        index = workers.ask("POST", "/v2/repository/index").json()
        return {entry["name"] for entry in index} >= {extractor["name"] or extractor["id"] for extractor in listed}

    # A process may know for two seconds the former owner of a name that was freed and given anew.
    until(lambda: all(lists_agree() for _ in range(6)))
    assert workers.metric("fxserve_store_up") == 3

    extractor = made(workers, return_nodes={"features.12": "map"}, name="last")
    expected = reference(MODEL, "features.12", [photos["chelsea"]]).mean((2, 3))
    for _ in range(6):
        path = "/v1/extractors/last/features?pool=avg&preprocess=default"
        answer = workers.ask("POST", path, **sent(photos["chelsea"])).json()
        assert answer["extractor"] == extractor["id"]
        torch.testing.assert_close(torch.tensor([answer["outputs"][0]["data"]]), expected, rtol=1e-3, atol=1e-3)
        assert workers.ask("GET", "/v2/models/last").json()["name"] == "last"
        assert workers.ask("POST", "/v2/repository/models/last/load").json() == {"name": "last", "ready": True}


@pytest.mark.exhaustive
def test_a_killed_process_is_replaced_within_seconds_and_knows_all(workers: Workers, photos: dict[str, bytes]) -> None:
    extractor = made(workers, return_nodes=["features.10"], name="before")
    gone = made(workers, return_nodes=["features.11"])
    assert workers.ask("DELETE", f"/v1/extractors/{gone['id']}").status_code == 204
    before = workers.children()
    first, second, stopped = before
    os.kill(stopped, signal.SIGSTOP)  # a silent one does not keep the others from being replaced
    for process in (first, second):
        os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: len(workers.children() - before) == 2)
    assert time.monotonic() - began < 10
    url = f"{workers.url}/v1/extractors/before/features?pool=avg"

    def answered() -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            return httpx.post(url, timeout=20, **sent(photos["chelsea"]))
        return None

    answer = until(answered)  # by a new one: the only other is stopped
    os.kill(stopped, signal.SIGCONT)
    assert (answer.status_code, answer.json()["extractor"]) == (200, extractor["id"]), answer.text
    until(lambda: workers.ready() == 3)
    for _ in range(9):
        assert workers.ask("GET", "/v1/extractors/before").status_code == 200
    # The stopped one missed the deletion, and learns of it when it is asked for it.
    until(lambda: all(workers.ask("GET", f"/v1/extractors/{gone['id']}").status_code == 404 for _ in range(9)))


@pytest.mark.exhaustive
def test_their_folder_ends_with_them(workers: Workers) -> None:
    assert list(workers.log.parent.glob("fxserve-*/extractors/specs/*.json"))
    workers.stop()
    assert workers.process.returncode == 0
    assert not list(workers.log.parent.glob("fxserve-*"))


@pytest.mark.exhaustive
def test_processes_of_two_servers_share_extractors_by_a_bucket(
    request: pytest.FixtureRequest, tmp_path: Path, photos: dict[str, bytes]
) -> None:
    url = f"{request.getfixturevalue('bucket')}/e2e"
    three, one = Workers(tmp_path, extractors=url), Server(tmp_path, extractors=url)
    try:
        for server in (three, one):
            server.wait()
        until(lambda: three.ready() == 3)
        ids = [made(three, **KINDS[0], name="r0")["id"], made(one, **KINDS[1], name="r1")["id"]]

        def statuses(name: str, server: Server) -> set[int]:
            path = f"/v1/extractors/{name}/features?pool=avg"
            asked = 6 if server is three else 1  # so that each of its processes answers
            return {server.ask("POST", path, **sent(photos["coffee"])).status_code for _ in range(asked)}

        for name in (*ids, "r0", "r1"):
            assert statuses(name, three) == statuses(name, one) == {200}
        before = three.children()
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(three.children() - before) == 1 and three.ready() == 3)
        assert statuses("r1", three) == {200}
        assert one.http.delete("/v1/extractors/r0").status_code == 204
        until(lambda: statuses("r0", three) == statuses(ids[0], three) == {404}, 30)
        assert made(three, **KINDS[2], name="r0")["id"] not in ids  # the name is free
        assert statuses("r0", one) == {200}
    finally:
        three.stop()
        one.stop()


@pytest.mark.exhaustive
def test_a_store_that_is_away_takes_nothing_from_memory(
    start: Callable[..., Server], tmp_path: Path, photos: dict[str, bytes]
) -> None:
    folder, aside = tmp_path / "extractors", tmp_path / "aside"
    server = start(extractors=folder)
    known = made(server, return_nodes=["features.3"], name="known")["id"]
    lost = made(server, return_nodes=["features.6"])["id"]
    assert server.http.get("/readyz").json() == {"ready": True, "reason": "ready"}

    def features(path: str) -> httpx.Response:
        return server.http.post(f"/v1/{path}", **sent(photos["coffee"]))

    (folder / "specs" / f"{lost}.json").write_text("{")  # in memory it is as it was
    assert features(f"extractors/{lost}/features?pool=avg").status_code == 200
    folder.rename(aside)
    until(lambda: "store.json is missing" in server.http.get("/readyz").json()["reason"])
    assert server.http.get("/readyz").status_code == 200
    assert server.metric("fxserve_store_up") == 0
    assert server.metric('fxserve_store_errors_total{operation="read"}') > 0
    time.sleep(2)
    for name in (known, "known", lost):
        assert features(f"extractors/{name}/features?pool=avg").status_code == 200
    assert features(f"models/{MODEL}/features?weights=random&nodes=features.9&pool=avg").status_code == 200
    for answer in (
        server.http.get("/v1/extractors/other"),
        server.http.post("/v1/extractors", json={"model": MODEL, "weights": "random", "return_nodes": ["features.8"]}),
        server.http.delete("/v1/extractors/known"),
    ):
        refused(answer, "not-ready", str(folder), status=503)
        assert answer.headers["retry-after"]
    answer = server.http.get("/v2/models/other")
    assert (answer.status_code, list(answer.json())) == (503, ["error"])
    assert server.http.get(f"/v2/models/{MODEL}").status_code == 200
    assert len(server.http.get("/v1/extractors").json()["extractors"]) == 3

    aside.rename(folder)
    until(lambda: "store.json" not in (said := server.http.get("/readyz").json()["reason"]) and lost in said)
    assert server.metric("fxserve_store_up") == 1
    assert server.http.get("/v1/extractors/other").status_code == 404
    time.sleep(2)
    assert features(f"models/{MODEL}/features?weights=random&nodes=features.9&pool=avg").status_code == 200
    assert len({file.stem for file in (folder / "specs").glob("*.json")} - {known, lost}) == 1
    for name in ("known", lost):
        assert server.http.delete(f"/v1/extractors/{name}").status_code == 204
        assert features(f"extractors/{name}/features").status_code == 404


@pytest.mark.exhaustive
def test_what_cannot_be_a_store_is_said_at_the_start(tmp_path: Path) -> None:
    server = Server(tmp_path, extractors="/proc/nothing")
    assert server.process.wait(120) == 1
    server.stop()
    [line] = [line for line in server.log.read_text().splitlines() if line]
    assert line.startswith("fxserve: the store of extractors /proc/nothing cannot be written: ")
