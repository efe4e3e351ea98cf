"""The first backend of an extractor, and its availability on this machine in the requested precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxcore.backends import BACKENDS, Backend, faster_than_eager, first_choice, why_bfloat16_is_slow
from fxcore.models.entry import ModelEntry
from service.engine.description import PRECISIONS, Description, precision_dtype
from service.problems import Unsupported
from service.schemas.specs import ExtractorSpec

_NAMES = ("auto", "eager", "openvino", "inductor")


def chosen_backend(spec: ExtractorSpec, device: torch.device) -> Backend:
    """Return the backend that a spec names; if it names none, the one to start with."""
    if spec.backend != "auto":
        return BACKENDS[spec.backend]
    return BACKENDS["eager"] if _keeps_floats(spec) else first_choice(device, spec.precision)


def faster_backends(description: Description) -> Sequence[Backend]:
    """Return the backends that may run an extractor faster than eager."""
    return _faster(description.spec, torch.device(description.device), description.entry, description.weights)


def _faster(spec: ExtractorSpec, device: torch.device, entry: ModelEntry, weights: str) -> Sequence[Backend]:
    # For int8 there is no faster alternative: chosen_backend has already picked its backend.
    if spec.backend != "auto" or spec.precision == "int8":
        return []
    if entry.is_quantized(weights) or entry.dtype != torch.float32:
        return []
    return faster_than_eager(device, spec.precision)


def served_precisions(
    device: torch.device, entry: ModelEntry, weights: str, lowering: bool
) -> dict[str, dict[str, Any]]:
    """Return, for each precision, the backends that ``backend=auto`` uses for a model, and a note to clients.

    The last backend serves at first; those before it replace it if they are faster.

    Args:
        lowering: whether ``auto`` searches for a backend faster than eager.
    """
    found: dict[str, dict[str, Any]] = {}
    for precision in PRECISIONS:
        spec = ExtractorSpec.model_validate({"model": entry.name, "return_nodes": ["x"], "precision": precision})
        try:
            check_backend(spec, device, entry, weights)
        except Unsupported as error:
            found[precision] = {"backends": [], "note": error.detail}
            continue
        faster = _faster(spec, device, entry, weights) if lowering else ()
        found[precision] = {
            "backends": [backend.name for backend in (*faster, chosen_backend(spec, device))],
            "note": why_bfloat16_is_slow(device) if precision_dtype(entry, precision) == torch.bfloat16 else None,
        }
    return found


def check_backend(spec: ExtractorSpec, device: torch.device, entry: ModelEntry, weights: str) -> None:
    """Check that ``device`` supports the backend and precision of ``spec``.

    Args:
        entry, weights: the model. Only eager runs torch's own int8 layers, and parameters other than float32.

    Raises:
        Unsupported: it does not; the error says why.
    """
    if entry.is_quantized(weights):
        _check_served("backend", spec.backend, ("auto", "eager"))
        _check_served("precision", spec.precision, ("float32",))
    elif entry.dtype != torch.float32:
        _check_served("backend", spec.backend, ("auto", "eager"))
        _check_served("precision", spec.precision, ("float32", "bfloat16", "float16"))
    if spec.backend != "auto":
        why = BACKENDS[spec.backend].unavailable(device, "float32")
        if why is not None:
            here = [n for n in _NAMES if n == "auto" or BACKENDS[n].unavailable(device, "float32") is None]
            raise Unsupported.choice("backend", spec.backend, here, why)
    backend = chosen_backend(spec, device)
    why = backend.unavailable(device, spec.precision)
    if why is not None:
        here = [p for p in PRECISIONS if backend.unavailable(device, p) is None]
        raise Unsupported.choice("precision", spec.precision, here, why)
    if spec.precision == "int8" and backend.name != "eager" and _keeps_floats(spec):
        why = "it quantizes every layer and does not support keep_float"
        raise Unsupported.choice("backend", spec.backend, ("auto", "eager"), why)


def _check_served(field: str, value: str, available: Sequence[str]) -> None:
    if value not in available:
        raise Unsupported.choice(field, value, available)


def _keeps_floats(spec: ExtractorSpec) -> bool:
    """Return whether a spec names nodes to keep in float under int8, which only torch's own int8 supports."""
    return any((step if isinstance(step, str) else step.name) == "keep_float" for step in spec.transforms)
