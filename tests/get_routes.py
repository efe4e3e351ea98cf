"""Request every GET route of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import httpx

from service.http.graph_formats import GraphFormat


def failures(get: Callable[[str], httpx.Response], openapi: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the wrong responses of the GET routes of the model ``name`` in ``openapi``, by URL.

    A model that is not loaded is not ready, so the response is 503. Statistics need an operator's images and are left
    out.
    """
    paths = [path for path, item in openapi["paths"].items() if "get" in item and "/statistics" not in path]
    asked = [path for path in paths if "{model}" in path or "{name}" in path]
    assert len(asked) == 7
    failed = {}
    for path in asked:
        url = path.format(model=name, name=name, version="1")
        for query in [f"?format={format}" for format in get_args(GraphFormat)] if url.endswith("graph") else [""]:
            response = get(url + query)
            if response.status_code != (503 if url.endswith("/ready") else 200):
                failed[url + query] = response.status_code, response.text[:300]
    return failed
