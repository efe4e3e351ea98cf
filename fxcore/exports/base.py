"""What the formats have in common."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.errors import FxError
from fxcore.extractor import Extractor
from fxcore.photos import check_rows, photos
from fxcore.transforms.base import applied


class UnknownFormat(FxError):
    """No export format of that name; ``format`` and ``available``."""


class ExportUnavailable(FxError):
    """A package that the ``format`` needs is ``missing``."""


class CannotExport(FxError):
    """This model cannot be written in that ``format``."""


def require_float(extractor: Extractor, format: str) -> None:
    """
    Raises:
        CannotExport: the model computes in torch's own int8, which only torch.fx's code and torch's kernels know.
    """
    if extractor.graph.entry.is_quantized(extractor.graph.weights):
        raise CannotExport(
            f"{extractor.graph.entry.name} holds torch's own int8 layers, which {format} cannot express; "
            "export the float model of that name instead",
            format=format,
        )


def example(extractor: Extractor) -> tuple[Tensor, ...]:
    """Two photographs as inputs of the nominal size, on the module's device and in its precision."""
    graph = extractor.graph
    rows = check_rows(graph.preprocessing, extractor.inputs, photos()[:2], graph.input_size)
    device = next((t.device for t in extractor.module.parameters()), torch.device("cpu"))
    return tuple(torch.cat(parts).to(device, extractor.dtype) for parts in zip(*rows, strict=True))


def as_tuple(extractor: Extractor) -> fx.GraphModule:
    """The module returning a tuple in which each value is a tensor of its own.

    Formats with named outputs merge or refuse two names for one tensor, and outputs that are inputs.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned: Mapping[str, fx.Node] = graph.graph_copy(extractor.module.graph, copies)  # type: ignore[assignment]
    seen: set[fx.Node] = set()
    values = []
    for node in returned.values():
        twice = node in seen or node.op in ("placeholder", "get_attr")
        seen.add(node)
        values.append(graph.call_method("clone", (node,)) if twice else node)
    graph.output(tuple(values))
    return fx.GraphModule(extractor.module, graph).eval()


def description(extractor: Extractor) -> dict[str, Any]:
    """What a user of an export has to know, for JSON: inputs, preprocessing, and which key is which node."""
    graph = extractor.graph
    return {
        "model": graph.entry.name,
        "weights": graph.weights,
        "fingerprint": graph.fingerprint,
        "dtype": str(extractor.dtype).removeprefix("torch."),
        "inputs": [{"name": i.name, "layout": i.layout, "shape": list(i.shape)} for i in extractor.inputs],
        "preprocessing": graph.preprocessing.describe(),
        "outputs": [{"key": o.key, "node": o.node, "shape": o.shape, "layout": o.layout} for o in extractor.outputs],
        "transforms": [{"name": a.name, "parameters": dict(a.parameters)} for a in applied(extractor.module)],
    }


def description_json(extractor: Extractor) -> bytes:
    """The description as a file."""
    return json.dumps(description(extractor), indent=2, default=str).encode() + b"\n"


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files, the same bytes for the same files. Weights do not compress: they are stored as they are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def said(error: BaseException, limit: int = 300) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__
