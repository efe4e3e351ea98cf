"""Pass an extractor to the child process that exports it, and read the result."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from fxcore.backends import process
from fxcore.exports.description import description_json
from fxcore.exports.subject import CannotExport, Subject
from fxcore.passes.base import erase_dead, fork

RESULT, REFUSAL = "export", "refusal.json"
"""Names of the files that the child process writes: the exported file, or the error that says why there is none."""


@dataclass(frozen=True)
class Captured:
    """An extractor in the child process.

    Attributes:
        model: the model's name.
        module: the module, on the CPU; returns a dict, or a tuple of distinct tensors for formats with named outputs.
        inputs: example inputs in the extractor's dtype, with two rows or more if the number of rows is dynamic.
        input_names, keys: names of inputs and outputs, in order.
        description: JSON, see :meth:`fxcore.exports.subject.Subject.description`.
        calibration: int8 calibration inputs, one row each; empty to export in float.
    """

    model: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    input_names: list[str]
    keys: list[str]
    description: bytes
    calibration: list[tuple[Tensor, ...]]


def written(
    subject: Subject,
    format: str,
    named_outputs: bool,
    cancelled: threading.Event | None = None,
    calibration: Sequence[tuple[Tensor, ...]] = (),
) -> bytes:
    """Export ``subject`` in a child process (:mod:`fxcore.exports.export_child`) and return the file.

    Args:
        named_outputs: whether the format names outputs, and does not support dicts.
        cancelled: when set, the process is killed.
        calibration: see :func:`fxcore.exports.export`.

    Raises:
        CannotExport: the child rejected the model or failed.
    """
    with tempfile.TemporaryDirectory(prefix="fxserve-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        module = _with_fixed_windows(subject.module, subject.windows) if subject.windows else subject.module
        module = as_tuple(module) if named_outputs else module
        process.save_module(
            folder,
            module,
            format=format,
            model=subject.name,
            inputs=subject.examples(),
            input_names=[spec.name for spec in subject.inputs],
            keys=[output.key for output in subject.outputs],
            description=description_json(subject, bool(calibration)),
            calibration=list(calibration),
        )
        try:
            process.run("fxcore.exports.export_child", folder, {}, cancelled)
        except process.ProcessFailed as error:
            if (folder / REFUSAL).exists():
                refusal = json.loads((folder / REFUSAL).read_text())
                raise CannotExport(refusal["detail"], **refusal["extra"]) from None
            raise CannotExport(f"{subject.name} cannot be exported to {format}: it {error}", format=format) from None
        return (folder / RESULT).read_bytes()


def rows_of(inputs: tuple[Tensor, ...]) -> list[bool]:
    """Return for each input whether it has as many rows as the first one, and more than one."""
    count = inputs[0].shape[0] if inputs and inputs[0].ndim else 0
    return [count > 1 and x.ndim > 0 and x.shape[0] == count for x in inputs]


def _with_fixed_windows(module: fx.GraphModule, windows: Mapping[str, int]) -> fx.GraphModule:
    """Copy a module so that its edits of windows have the number of windows of an image as a constant.

    From the number of rows, torch.export derives that there is more than one. Images have one size in these formats.

    Args:
        windows: see :class:`~fxcore.exports.subject.Subject`.
    """
    private = fork(module)
    for scale in private.graph.find_nodes(op="placeholder"):
        for images in [user for user in scale.users if user.target == "size" and scale.target in windows]:
            for node in [user for user in images.users if user.target == "unflatten"]:
                node.args = (*node.args[:2], (-1, windows[scale.target]))
            erase_dead(private, images)
    private.recompile()
    return private


def as_tuple(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a module that returns a dict so that it returns a tuple of distinct tensors.

    Formats with named outputs merge or reject two names for one tensor, and outputs that are inputs.
    """
    graph = fx.Graph()
    returned: Mapping[str, fx.Node] = graph.graph_copy(module.graph, {})  # type: ignore[assignment]
    seen: set[fx.Node] = set()
    values = []
    for node in returned.values():
        twice = node in seen or node.op in ("placeholder", "get_attr")
        seen.add(node)
        # Copy with cat(), which exporters keep; OpenVINO removes clone().
        values.append(graph.call_function(torch.cat, ((node,),)) if twice else node)
    graph.output(tuple(values))
    return fx.GraphModule(module, graph).eval()
