"""Downloads of extractors that run without this service."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response

from fxcore.exports import FORMATS, export
from service.access import require_admin
from service.api.extractors import DEFAULT_WAIT, IdOrName, loaded
from service.api.state import Shared
from service.problems import documented

router = APIRouter(prefix="/v1/extractors", tags=["extractors"])

Format = Literal["fx", "torch_export", "onnx", "openvino"]
_BINARY = {"schema": {"type": "string", "format": "binary"}}


@router.get(
    "/{extractor}/export",
    dependencies=[Depends(require_admin)],  # it hands out the weights, and takes long
    response_class=Response,
    responses={
        200: {
            "description": "The file.",
            "headers": {
                "Content-Disposition": {
                    "description": "A name for the file.",
                    "schema": {"type": "string"},
                    "example": 'attachment; filename="resnet50-3f9a1c5be07d-fx.zip"',
                }
            },
            "content": {"application/zip": _BINARY, "application/octet-stream": _BINARY},
        },
        **documented(
            "unknown-extractor",
            "cannot-export",
            "export-unavailable",
            "not-ready",
            "weights-unavailable",
            "extractor-failed",
            "invalid-request",
        ),
    },
)
async def download(
    state: Shared,
    extractor: IdOrName,
    format: Annotated[
        Format,
        Query(
            description="`fx`: a zip with a Python package and safetensors; `torch_export`: a `.pt2`; `onnx`; "
            "`openvino`: a zip with the IR. All run without this service and take any number of images."
        ),
    ] = "fx",
) -> Response:
    """An extractor as a file: what it computes in eager, before any backend took over."""
    record = state.engine.find(extractor)
    with record.in_use():
        built = await loaded(state, record, DEFAULT_WAIT)
        cancelled = threading.Event()
        try:
            data = await state.in_exporter(lambda: export(built, format, cancelled))
        finally:
            cancelled.set()  # where nobody waits any more
    chosen = FORMATS[format]
    name = f"{record.entry.name}-{record.id}-{format}{chosen.suffix}"
    return Response(data, 200, {"Content-Disposition": f'attachment; filename="{name}"'}, chosen.media_type)
