"""Responses with the graph of a model or an extractor, in the requested format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import orjson
from fastapi import Query, Request, Response

from fxcore.extractor import Extractor
from fxcore.graph.annotate import own_parameters
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.node_info import NodeInfo, describe
from fxcore.rendering.render import render
from service.choices import GraphFormat
from service.codecs.negotiation import choose
from service.engine.requests.profiling import Measured
from service.http.scope import joined_header
from service.problems import InvalidRequest
from service.schemas.v1.graphs import GraphDocument, LayoutDocument

# The media type of each format, and the format of each media type in Accept; the first is the default.
MEDIA_TYPES: dict[GraphFormat, str] = {
    "json": "application/json",
    "table": "text/plain",
    "code": "text/plain",
    "dot": "text/vnd.graphviz",
    "svg": "image/svg+xml",
    "mermaid": "text/vnd.mermaid",
    "layout": "application/json",
}
_BY_ACCEPT: dict[str, GraphFormat] = {
    "application/json": "json",
    "text/plain": "table",
    "text/vnd.graphviz": "dot",
    "image/svg+xml": "svg",
    "text/vnd.mermaid": "mermaid",
}

# The response of status 200 in the OpenAPI document.
RESPONSE: dict[str, Any] = {
    "model": GraphDocument | LayoutDocument,
    "description": "The graph, in the format requested by `format` or `Accept`; a `LayoutDocument` with "
    "`format=layout`.",
    "content": {
        "text/plain": {"schema": {"type": "string"}, "example": "opcode  name  target  args  kwargs  shape  dtype\n…"},
        "text/vnd.graphviz": {"schema": {"type": "string"}, "example": "digraph resnet50 { … }"},
        "image/svg+xml": {"schema": {"type": "string"}, "example": "<svg …/>"},
        "text/vnd.mermaid": {"schema": {"type": "string"}, "example": "flowchart TD\n…"},
    },
}


def chosen_format(format: GraphFormat | None, request: Request) -> GraphFormat:
    """Return ``format``, or else the format that the request's Accept prefers.

    Raises:
        Problem: 406.
    """
    return format or _BY_ACCEPT[choose(joined_header(request.scope, b"accept"), list(_BY_ACCEPT))]


def response(content: bytes, chosen: GraphFormat, format: GraphFormat | None) -> Response:
    """Build the response in the format ``chosen``, which varies with Accept unless the query has a ``format``."""
    return Response(content, headers=None if format else {"Vary": "Accept"}, media_type=MEDIA_TYPES[chosen])


Depth = Annotated[
    int | None,
    Query(
        ge=1,
        le=64,
        description="Depth of the modules that drawings show as one box each: 1 means `layer1`.",
        examples=[1],
    ),
]


Expanded = Annotated[
    str | None,
    Query(
        alias="open",
        max_length=65536,
        description="With `format=layout`: the modules to expand, separated by commas; by default all, unless `depth` "
        "is given.",
        examples=["layer3,layer3.0"],
    ),
]


def parse_expanded(expanded: str | None, chosen: GraphFormat, depth: int | None) -> list[str] | None:
    """Parse the modules to expand.

    Raises:
        Problem: 422: the format is not ``layout``, or ``depth`` is given too.
    """
    if expanded is None:
        return None
    if chosen != "layout" or depth is not None:
        reason = "cannot be combined with depth" if chosen == "layout" else "needs format=layout"
        detail = f"query parameter 'open': {reason}"
        raise InvalidRequest(detail, field="open")
    return sorted({module for module in expanded.split(",") if module})


def closed_parts(graph: ModelGraph) -> list[dict[str, str]]:
    """List the submodules that could not be traced, with reasons."""
    return [{"path": part.path, "reason": part.reason} for part in graph.untraceable]


def write(
    graph: ModelGraph, format: GraphFormat, depth: int | None = None, expanded: Sequence[str] | None = None
) -> bytes:
    """Render the eval graph of a model."""
    if format == "json":
        return _document(graph, graph.input_shape, graph.nodes, graph.totals)
    return render(graph, format, depth, expanded).encode()


def write_part(
    extractor: Extractor, format: GraphFormat, depth: int | None = None, measured: Measured | None = None
) -> bytes:
    """Render the graph that an extractor runs, as JSON with its profile if ``measured``."""
    graph = extractor.graph
    if format != "json":
        return render(extractor.module, format, depth, title=graph.entry.name).encode()
    nodes = _part_nodes(extractor)
    totals = {
        "params": sum(node.params for node in nodes),
        "flops": sum(node.flops for node in nodes),
        "nodes": len(nodes),
    }
    return _document(graph, extractor.inputs[0].shape, nodes, totals, measured)


def _part_nodes(extractor: Extractor) -> list[NodeInfo]:
    """Describe the nodes of an extractor's own graph, some of which its transforms may have added or replaced."""
    graph, module = extractor.graph, extractor.module
    of_model = {info.name: info for info in graph.nodes}
    seen: set[int] = set()
    nodes = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        params = own_parameters(module, node, seen)
        stride = graph.stride_of(node)
        info = describe(node, module, graph.shape_of(node), stride=stride, level=None, params=params, flops=0)
        if (known := of_model.get(info.name)) is not None:
            # A grid of tokens is found only in the whole graph.
            info = replace(info, level=known.level, tokens=known.tokens, flops=_flops(info, known, of_model))
        nodes.append(info)
    return nodes


def _flops(info: NodeInfo, known: NodeInfo, of_model: Mapping[str, NodeInfo]) -> int:
    """Return the FLOPs of an extractor's node, given the model's node of that name.

    A convolution with a folded batch norm has the name of the batch norm.
    """
    if info.op in ("placeholder", "get_attr"):
        return 0
    if info.module_type == known.module_type:
        return known.flops
    called = info.target, info.module_type
    folded = (of_model[name] for name in known.args if (of_model[name].target, of_model[name].module_type) == called)
    return next((one.flops for one in folded), 0)


def _document(
    graph: ModelGraph,
    input_shape: Sequence[int | None],
    nodes: Sequence[NodeInfo],
    totals: dict[str, int],
    measured: Measured | None = None,
) -> bytes:
    document = {
        "model": graph.entry.name,
        "input_shape": input_shape,
        "nodes": [asdict(node) for node in nodes],
        "totals": totals,
        "closed": closed_parts(graph),
    }
    if measured is not None:
        profile = measured.profile
        document["profile"] = {
            "backend": "eager",
            "precision": measured.precision,
            "serving": {"backend": measured.backend, "milliseconds": measured.milliseconds},
            "runs": profile.runs,
            "milliseconds": profile.milliseconds,
            "peak_bytes": profile.peak_bytes,
            "nodes": [asdict(node) for node in profile.nodes],
        }
    return orjson.dumps(document)
