"""A server process takes its settings from the environment."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until
from tests.e2e.forked import script

SERVE = """
import logging
from service.http.server.run import run
from service.settings import Settings

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("fxserve.access"), level)("a line of level %s", level)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})

run(app, Settings(), "cpu")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "logged"), [(None, ["warning", "error"]), ("INFO", ["info", "warning", "error"])])
def test_the_log_level_of_the_environment_is_the_servers(level: str | None, logged: list[str], tmp_path: Path) -> None:
    unset = {name: value for name, value in os.environ.items() if name != "FXSERVE_LOG_LEVEL"}
    given = {} if level is None else {"FXSERVE_LOG_LEVEL": level}
    output = tmp_path / "stdout"
    process = script(SERVE, tmp_path, environment={**unset, **given, "FXSERVE_PORT": "0"})
    try:
        until(lambda: process.poll() is not None or (output.exists() and "\n" in output.read_text()))
        url = output.read_text().split()[2]  # printed once it listens
        assert httpx.get(url, trust_env=False, timeout=60).status_code == 204
    finally:
        process.terminate()
        process.wait(60)
    lines = (tmp_path / "stderr").read_text()
    marked = [line.rpartition(" ")[2] for line in lines.splitlines() if "a line of level" in line]
    assert marked == logged
