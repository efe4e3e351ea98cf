"""Requests and responses of the routes: bodies as clients send them, and what is read from the answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

NPY, NPZ, SAFETENSORS = "application/x-npy", "application/x-npz", "application/x-safetensors"
JPEG = {"content-type": "image/jpeg"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def images(files: Iterable[bytes], **others: Any) -> dict[str, Any]:
    """A JSON body with image files and other fields."""
    return {"images": [b64(file) for file in files], **others}


def multipart(files: Iterable[bytes]) -> dict[str, Any]:
    """The options of a POST of image files in a form."""
    return {"files": [("images", (f"{i}.jpg", file, "image/jpeg")) for i, file in enumerate(files)]}


def npy(array: np.ndarray[Any, Any] | Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return buffer.getvalue()


def sent(
    value: bytes | np.ndarray[Any, Any] | Tensor | Mapping[str, Tensor], accept: str = "*/*", **headers: str
) -> dict[str, Any]:
    """The options of a POST: an image file, which is said to be a JPEG, an array as npy, or tensors as safetensors."""
    if isinstance(value, bytes):
        content, kind = value, "image/jpeg"
    elif isinstance(value, Mapping):
        content, kind = safetensors.torch.save(dict(value)), SAFETENSORS
    else:
        content, kind = npy(value), NPY
    return {"content": content, "headers": {"content-type": kind, "accept": accept, **headers}}


def read(response: httpx.Response) -> Any:
    """The tensors of an answer by name, or the only one, as a numpy array, of an npy file."""
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"]
    if kind == NPY:
        return np.load(io.BytesIO(response.content), allow_pickle=False)
    if kind == NPZ:
        archive = np.load(io.BytesIO(response.content), allow_pickle=False)
        return {name: torch.from_numpy(archive[name]) for name in archive.files}
    if kind == SAFETENSORS:
        return safetensors.torch.load(response.content)
    return {one["name"]: torch.tensor(one["data"]).reshape(one["shape"]) for one in response.json()["outputs"]}


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Assert equality to within ``tolerance`` of the largest value: other batch sizes are summed in another order."""
    actual, expected = torch.as_tensor(actual).float(), torch.as_tensor(expected).float()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def refused(response: httpx.Response, kind: str, said: str = "", status: int = 422) -> Any:
    """Assert that a response is a problem of that kind whose detail has ``said``, and return its document."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document = response.json()
    assert (response.status_code, document["type"]) == (status, f"/problems/{kind}"), document
    assert document["status"] == status
    assert document["detail"]
    assert said in document["detail"]
    return document


def created(client: Any, **spec: Any) -> Any:
    """Make an extractor, or find it, and return its description."""
    response = client.post("/v1/extractors?wait=300", json=spec)
    assert response.status_code in (200, 201), response.text
    return response.json()
