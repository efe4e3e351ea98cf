"""Feature responses: choosing the media type, and encoding."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from service.codecs import heatmap
from service.codecs.negotiation import LONGEST, choose
from service.codecs.tensors import json, npy, safetensors
from service.problems import NotAcceptable

Parts = list[bytes | memoryview]

# In order of preference, for clients without a preference.
OFFERED = (json.MEDIA_TYPE, safetensors.MEDIA_TYPE, npy.NPZ_MEDIA_TYPE, npy.MEDIA_TYPE, heatmap.MEDIA_TYPE)

_REMEMBERED = 256


def negotiate(accept: str | None, dtypes: tuple[str | None, ...], reduced: bool) -> str:
    """Return the media type of the response.

    Args:
        accept: the Accept header, or None.
        dtypes: dtypes of the outputs in the response.
        reduced: whether the outputs are pooled, projected or selected tokens.

    Raises:
        NotAcceptable: with the reason and the possible types.
    """
    return _negotiated(None if accept is None else accept[:LONGEST], dtypes, reduced)


@functools.lru_cache(_REMEMBERED)  # clients send the same header with every request
def _negotiated(accept: str | None, dtypes: tuple[str | None, ...], reduced: bool) -> str:
    impossible: dict[str, str] = {}
    if "bfloat16" in dtypes:
        reason = "NumPy has no bfloat16: add dtype=float32 or dtype=float16 to the query"
        impossible[npy.MEDIA_TYPE] = impossible[npy.NPZ_MEDIA_TYPE] = reason
    if len(dtypes) != 1:
        reason = f"{{}} holds one array, but {len(dtypes)} nodes are requested: request one"
        impossible[npy.MEDIA_TYPE] = reason.format("an npy file") + f", or Accept {npy.NPZ_MEDIA_TYPE}"
        impossible[heatmap.MEDIA_TYPE] = reason.format("a heat-map")
    elif reduced:
        impossible[heatmap.MEDIA_TYPE] = "a heat-map needs a feature map: leave pool, project and tokens out"
    possible = [kind for kind in OFFERED if kind not in impossible]
    try:
        return choose(accept, possible)
    except NotAcceptable as refused:
        try:
            wanted = choose(accept, OFFERED)
        except NotAcceptable:
            raise refused from None
        detail = f"{wanted} is not possible here: {impossible[wanted]}"
        raise NotAcceptable(detail, available=possible) from None


def write(
    kind: str,
    metadata: Mapping[str, str],
    nodes: Mapping[str, str],
    outputs: Mapping[str, Tensor],
    encoding: str,
    fields: Mapping[str, object],
) -> Parts:
    """Return the parts of a response of type ``kind``; for heat-maps see :func:`service.codecs.heatmap.write`.

    Args:
        metadata: the origin of the values: ``model``, ``extractor``, ``weights``, ``nodes`` (JSON) and ``fingerprint``.
        nodes: key → node, in the order requested.
        encoding: of the values in JSON: ``json`` or ``base64``.
        fields: the fields of the JSON document between its origin and the outputs.
    """
    if kind == safetensors.MEDIA_TYPE:
        return safetensors.write(outputs, metadata)
    if kind == npy.NPZ_MEDIA_TYPE:
        return npy.write_npz(outputs)
    if kind == npy.MEDIA_TYPE:
        return npy.write(next(iter(outputs.values())))
    origin = {name: metadata[name] for name in ("model", "extractor", "weights")}
    return json.write({**origin, **fields}, nodes, outputs, encoding)


def written_bytes(kind: str, outputs: Mapping[str, Tensor], encoding: str) -> int:
    """Return the maximum bytes that :func:`write` allocates in addition to the outputs.

    It is 0 for files of a header and the tensors' own memory.
    """
    if kind == json.MEDIA_TYPE and encoding == "json":
        return sum(map(json.max_bytes, outputs.values()))
    if kind not in (json.MEDIA_TYPE, npy.NPZ_MEDIA_TYPE):
        return 0
    raw = sum(tensor.nbytes for tensor in outputs.values())
    return json.HEAD_BYTES * len(outputs) + (raw * 4 // 3 if kind == json.MEDIA_TYPE else raw)


class PartsResponse(Response):
    """A response sent in pieces, without joining them, with its exact Content-Length.

    A slow client delays only its own response. Small parts are joined into one piece, which is faster than sending them
    one by one.
    """

    _STEP = 256 * 1024

    def __init__(self, parts: Parts, media_type: str, headers: Mapping[str, str]) -> None:
        length = sum(map(len, parts))
        if length <= self._STEP and len(parts) > 1:
            parts = [b"".join(parts)]
        self._parts = [memoryview(part) for part in parts if len(part)]
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.raw_headers = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        self.raw_headers += (b"content-type", media_type.encode("ascii")), (b"content-length", b"%d" % length)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = sum(map(len, self._parts))
        for part in self._parts:
            for start in range(0, len(part), self._STEP):
                piece = part[start : start + self._STEP]
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
