"""The Python client: images in, a dict of arrays out.

It needs httpx, NumPy and safetensors, and imports neither torch nor the server.

>>> from service.client import Client
>>> with Client("http://127.0.0.1:8000") as client:                                   # doctest: +SKIP
...     extractor = client.extractor("resnet50", ["C4", "C5"])
...     features = extractor(["cat.jpg", "dog.jpg"], pool="avg")
...     features["C5"].shape
(2, 2048)
"""

from service.client.aio import AsyncClient, AsyncExtractor
from service.client.blocking import Client, Extractor
from service.client.exceptions import FxserveError, Problem

__all__ = ["AsyncClient", "AsyncExtractor", "Client", "Extractor", "FxserveError", "Problem"]
