"""Downloads of extractors as files that run without this service."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Response

from fxcore.exports import FORMATS, CannotExport, export
from service import problems
from service.choices import ExportFormat
from service.engine.backends.checks import calibration_of
from service.engine.backends.int8_advice import int8_graph
from service.engine.runtime.runtime import Runtime
from service.http.routes.v1.extractors import BUILT_PROBLEMS, DEFAULT_WAIT, IdOrName
from service.http.routing.declared import declares
from service.http.routing.hot_routes import BINARY
from service.http.routing.strict_routes import StrictRoute
from service.http.scope import Calling
from service.http.state import Shared, State

router = APIRouter(prefix="/v1/extractors", tags=["extractors"], route_class=StrictRoute)


@router.get(
    "/{extractor}/export",
    response_class=Response,
    responses={
        200: {
            "description": "The file.",
            "headers": {
                "Content-Disposition": {
                    "description": "File name.",
                    "schema": {"type": "string"},
                    "example": 'attachment; filename="resnet50-3f9a1c5be07d-fx.zip"',
                }
            },
            "content": {"application/zip": BINARY, "application/octet-stream": BINARY},
        },
    },
)
# It discloses the weights and takes long.
@declares("admin", *BUILT_PROBLEMS, problems.CannotExport, problems.ExportUnavailable)
async def download(
    state: Shared,
    caller: Calling,
    extractor: IdOrName,
    format: Annotated[
        ExportFormat,
        Query(
            description="`fx`: a zip with a Python package and safetensors; `torch_export`: a `.pt2`; `onnx`; "
            "`openvino`: a zip with the IR. All run without this service on one image or more, all but `fx` "
            "of the extractor's size. An int8 extractor can be exported only as `openvino`, and only if that is its "
            "backend; its weights then have seven bits, so that results are also correct on processors without VNNI.",
            examples=["onnx"],
        ),
    ] = "fx",
) -> Response:
    """Export an extractor as a file: its graph with transforms and weights, before lowering by a backend."""
    record = await state.engine.extractors.look_up(extractor)
    async with state.exports.place(caller) as run:
        runtime = await state.engine.runtimes.load(record, DEFAULT_WAIT)
        with runtime.in_use():
            cancelled = threading.Event()
            try:
                data = await run(lambda: _export(state, runtime, format, cancelled))
            finally:
                cancelled.set()  # also when the client has left
    chosen = FORMATS[format]
    name = f"{record.description.entry.name}-{record.id}-{format}{chosen.suffix}"
    return Response(data, 200, {"Content-Disposition": f'attachment; filename="{name}"'}, chosen.media_type)


def _export(state: State, runtime: Runtime, format: ExportFormat, cancelled: threading.Event) -> bytes:
    """Export the extractor. If eager serves it in int8, its graph is passed on, which every format rejects.

    Raises:
        CannotExport: ``format`` does not support the int8 model in use.
    """
    description, built = runtime.description, runtime.extractor
    preprocessing = description.preprocessing
    if description.spec.precision != "int8":
        return export(built, format, cancelled, preprocessing=preprocessing)
    graph = int8_graph(runtime.run)
    if graph is not None:
        return export(replace(built, module=graph), format, cancelled, preprocessing=preprocessing)
    if format != "openvino":
        raise CannotExport(
            f"this extractor computes in int8 on openvino, which {format} cannot express; export it as openvino, or "
            "export an extractor in float32",
            format=format,
        )
    calibration = calibration_of(description, built, state.engine.settings.calibration_dir)
    return export(built, format, cancelled, calibration, preprocessing=preprocessing)
