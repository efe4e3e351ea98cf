"""An extractor as it is sent to the process that exports it, and the result as it comes back."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from fxcore import process
from fxcore.exports.description import description_json
from fxcore.exports.subject import CannotExport, Subject

_JOB, _DESCRIPTION, _RESULT, _REFUSAL = "job.json", "description.json", "export", "refusal.json"


@dataclass(frozen=True)
class Captured:
    """What a format that torch traces is written from.

    Attributes:
        model: the model's name.
        module: on the CPU; returns a dict, or, for formats with named outputs, a tuple of tensors of their own.
        inputs: two rows or more to run it on; in an extractor's own precision two photographs.
        input_names, keys: names of inputs and outputs, in order.
        description: JSON, see :meth:`fxcore.exports.subject.Subject.description`.
        calibration: inputs, one row each, for a format that makes int8 of it; none where it stays as it is.
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
    """The file that a process of its own (:mod:`fxcore.exports.export_child`) makes of ``subject``.

    Args:
        named_outputs: the format names its outputs itself and takes no dict.
        cancelled: once set, the process is ended.
        calibration: see :func:`fxcore.exports.export`.

    Raises:
        CannotExport: the process said so, or failed.
    """
    job = {
        "format": format,
        "model": subject.name,
        "input_names": [spec.name for spec in subject.inputs],
        "keys": [output.key for output in subject.outputs],
    }
    with tempfile.TemporaryDirectory(prefix="fxserve-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        module = as_tuple(subject.module) if named_outputs else subject.module
        process.save_module(folder, module, inputs=subject.examples(), calibration=list(calibration))
        (folder / _JOB).write_text(json.dumps(job))
        (folder / _DESCRIPTION).write_bytes(description_json(subject, bool(calibration)))
        try:
            process.run("fxcore.exports.export_child", folder, {}, cancelled)
        except process.ProcessFailed as error:
            if (folder / _REFUSAL).exists():
                refusal = json.loads((folder / _REFUSAL).read_text())
                raise CannotExport(refusal["detail"], **refusal["extra"]) from None
            raise CannotExport(f"{subject.name} cannot be exported to {format}: it {error}", format=format) from None
        return (folder / _RESULT).read_bytes()


def load(folder: Path) -> tuple[str, Captured]:
    """The format that is wanted, and what :func:`written` put into ``folder``."""
    job = json.loads((folder / _JOB).read_text())
    module, beside = process.load_module(folder)
    description = (folder / _DESCRIPTION).read_bytes()
    return job["format"], Captured(
        job["model"], module, beside["inputs"], job["input_names"], job["keys"], description, beside["calibration"]
    )


def finish(folder: Path, result: bytes) -> None:
    """Leave the file for the parent process."""
    (folder / _RESULT).write_bytes(result)


def refuse(folder: Path, error: CannotExport) -> None:
    """Leave the reason for the parent process."""
    (folder / _REFUSAL).write_text(json.dumps({"detail": error.detail, "extra": error.extra}))


def as_tuple(module: fx.GraphModule) -> fx.GraphModule:
    """A module that returns a dict returning a tuple in which each value is a tensor of its own.

    Formats with named outputs merge or refuse two names for one tensor, and outputs that are inputs.
    """
    graph = fx.Graph()
    returned: Mapping[str, fx.Node] = graph.graph_copy(module.graph, {})  # type: ignore[assignment]
    seen: set[fx.Node] = set()
    values = []
    for node in returned.values():
        twice = node in seen or node.op in ("placeholder", "get_attr")
        seen.add(node)
        # A copy that no exporter takes for an alias, as OpenVINO takes clone().
        values.append(graph.call_function(torch.cat, ((node,),)) if twice else node)
    graph.output(tuple(values))
    return fx.GraphModule(module, graph).eval()
