"""What both clients and both kinds of extractor are told, and know, alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from service.client.flows import Held, Patience

Pool = Literal["none", "avg", "max", "gem", "cls", "roi"]
Dtype = Literal["float32", "float16", "bfloat16"]
Precision = Literal["float32", "bfloat16", "float16", "int8"]
Preprocess = Literal["default", "pil", "fast", "none"]
Backend = Literal["auto", "eager", "inductor", "openvino"]

# A request that is large enough to fill a batch and small enough that one is decoded while another is computed. A
# server that takes less says so, and is then sent smaller ones.
MAX_ROWS = 16
MAX_BODY_BYTES = 16 * 1024**2
MAX_ANSWER_BYTES = 64 * 1024**2

HEADERS = {"Accept-Encoding": "identity", "User-Agent": "fxserve-client"}


class Common(ABC):
    """The settings of a client.

    Args:
        url: where the server is: ``http://host:port``, with a path if it is mounted under one.
        timeout: seconds a request may take, its repetitions included. The server is told, and drops what is late.
        retries: how often to repeat a request that is answered by 429 or 503 with ``Retry-After``.
        concurrency: how many requests of one call are under way at a time.
        headers: sent with every request, such as ``{"Authorization": "Bearer …"}``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 5,
        concurrency: int = 4,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"the server's address begins with http:// or https://, unlike {url!r}")
        if timeout <= 0 or retries < 0 or concurrency < 1:
            raise ValueError("timeout is above 0, retries is at least 0 and concurrency at least 1")
        self.url = url.rstrip("/")
        self.patience = Patience(timeout, retries)
        self.concurrency = concurrency
        self.headers = {**HEADERS, **(headers or {})}
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make the httpx client; nothing is sent yet."""


class Described:
    """An extractor as the server describes it.

    Attributes:
        description: all that ``GET /v1/extractors/{id}`` says.
        held: how to ask for it, and how to make it again.
    """

    def __init__(self, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        self.description = dict(description)
        self.held = Held(self.id, str(self.description["fingerprint"]), spec)

    @property
    def id(self) -> str:
        return str(self.description["id"])

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Key, node, shape, dtype, layout and stride of each output."""
        return list(self.description["outputs"])

    def __repr__(self) -> str:
        keys = ", ".join(output["key"] for output in self.outputs)
        return f"<{type(self).__name__} {self.id} of {self.description['model']}: {keys}>"

    @property
    def one_size(self) -> bool:
        """Whether images of any size give outputs of one shape. Where they do not, images are sent one by one: a
        detector would pad those of a request to one size, and the values of each would depend on its neighbours."""
        return not any(size is None for output in self.outputs for size in output["shape"][1:])

    def rows(self, pool: str) -> int:
        """How many images to send in a request."""
        bytes_per_image = sum(int(output["bytes_per_image"] or 0) for output in self.outputs)
        if pool != "none" or not bytes_per_image:
            return MAX_ROWS
        return max(1, min(MAX_ROWS, MAX_ANSWER_BYTES // bytes_per_image))


def feature_query(
    pool: Pool, dtype: Dtype | None, normalize: str | None, preprocess: str, roi_size: int | None
) -> dict[str, str]:
    """The query of a request for features; what is left at its default is left out."""
    size = None if roi_size is None else str(roi_size)
    asked = {"pool": pool, "dtype": dtype, "normalize": normalize, "preprocess": preprocess, "roi_size": size}
    return {
        name: value for name, value in asked.items() if value not in (None, "none" if name == "pool" else "default")
    }
