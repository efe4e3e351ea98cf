"""Every GET route for timm's models of every kind, in a server of its own: coverage's tracer would take a multiple of
the time that tracing them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import timm

from tests.e2e.conftest import Server
from tests.get_routes import failures

# What names of timm's call small models, the smallest first.
_SIZES = (
    *("test_", "atto", "femto", "pico", "nano", "xxtiny", "xxs", "xs", "tiny"),
    *("_s0", "_m0", "_b0", "small", "_s", "18"),
)


def _families() -> list[str]:
    """A model of each of timm's modules, the smallest by its name."""

    def size(name: str) -> int:
        return next((rank for rank, word in enumerate(_SIZES) if word in name), len(_SIZES))

    families = [timm.list_models(module=module) for module in timm.list_modules()]
    return [f"timm.{min(names, key=size)}" for names in families if names]


@pytest.fixture(scope="module")
def patient(start: Callable[..., Server]) -> Iterator[Server]:
    """A server in which the largest models may be traced on a slow machine; it ends with their graphs."""
    server = start(request_timeout=600)
    yield server
    server.stop()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _families()[5::6])
def test_no_get_route_fails(patient: Server, name: str) -> None:
    openapi = patient.http.get("/openapi.json").json()
    assert failures(lambda url: patient.http.get(url, timeout=900), openapi, name) == {}
