"""Checks of an operator's own model by running it before any request does."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.agreement import GraphDiffers, Rows, changing_node, check_graph, compare_rows, draws
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, Options
from fxcore.copies import private_copy
from fxcore.errors import summarize
from fxcore.extractor import whole_module
from fxcore.graph.model_graph import ModelGraph
from fxcore.layer_types import has_inplace_setting
from fxcore.models.user_models import BadUserModel, UserEntry
from fxcore.nesting import tensors_in
from fxcore.passes.effects import is_random, is_uninitialized
from fxcore.tracing.dispatch_modes import LenientMode
from fxcore.tracing.names import public_name

log = logging.getLogger("fxserve.models")

_SMALLER = 4
"""Divisor of the image height and width for models that accept any size; it halves the time of a check."""

_LOWERED = 5e-3
"""Maximum error of the lowered graph, relative to the largest magnitude of an output."""


def checked(entry: UserEntry, graph: ModelGraph) -> UserEntry:
    """Run a model, its graph and the lowered graph on random images, as a batch and one by one, on the CPU.

    Backends other than eager are compared with it before they serve; see :mod:`service.engine.backends.checks`.

    Returns:
        ``entry`` with the names of the nodes whose rows do not belong to one image each. A model that fails here, such
        as one that cannot run on the CPU, is not checked, and a warning is logged.

    Raises:
        GraphDiffers: the graph computes something else.
        BadUserModel: an image's values depend on the others in its batch, and the entry does not say ``batch = false``;
            or it keeps state between calls, or computes with tensors that have no values.
        WeightsUnavailable: its weights cannot be loaded.
    """
    module = entry.load_published(str(entry.default_weights)).eval().requires_grad_(False)
    training = [path for path, part in module.named_modules() if part.training]
    dtype = next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.float32)
    traced = whole_module(graph, _out_of_place(module), dtype)
    try:
        others = _checked_images(module, traced, graph, dtype)
        changing = changing_node(traced, others)
        rows = compare_rows(traced, others) if entry.batch and changing is None else Rows()
    except Exception as error:
        if _computes_without_values(module, _images(graph, dtype, 1)):
            raise BadUserModel(
                "it computes with tensors that have no values (device meta), although its weights are loaded; its "
                "builder must make a new module at each call, and parts of it must read parameters and buffers from "
                "the module rather than keep them elsewhere"
            ) from error
        if isinstance(error, GraphDiffers):
            raise
        log.warning(
            "model %r could not be checked, since it fails on random images on the CPU: %s",
            entry.name,
            summarize(error),
        )
        return entry
    if changing is not None:
        raise BadUserModel(
            f"{changing} computes another value from the same image when it is called again: it keeps state between "
            "calls, which requests would share; make it depend on its inputs alone"
        )
    if rows.dependent is not None:
        raise BadUserModel(
            f"its result for an image depends on the other images in its batch, first in {rows.dependent}; set batch "
            "= false to compute one image at a time"
        )
    random = [node for node in traced.graph.nodes if is_random(traced, node)]
    drawing = next((public_name(node) for node in random if not is_uninitialized(node)), None)
    if training:
        log.warning(
            "model %r: eval() leaves %s in train mode; layers of torch are served in eval mode nevertheless",
            entry.name,
            training[0],
        )
    elif drawing is not None:
        log.warning(
            "model %r draws random numbers in eval mode, first in %s, so its values differ between calls; a dropout "
            "needs training=self.training",
            entry.name,
            drawing,
        )
    if not random:
        lowered = BACKENDS["eager"].lower(traced, tuple(others), Options())
        found = verify(traced, lowered, tuple(others), rtol=_LOWERED, atol=_LOWERED)
        if not found.allclose and not draws(traced, others):
            node = found.first_divergence
            raise GraphDiffers("the graph computes different values once its layers are folded", node=node)
    return replace(entry, apart=frozenset(rows.apart))


def _checked_images(module: nn.Module, traced: fx.GraphModule, graph: ModelGraph, dtype: torch.dtype) -> list[Tensor]:
    """Check the graph on two random images.

    The images are small unless the model accepts its usual size only. A graph is meant for all sizes that its model
    accepts: branches on the size are not traced.

    Returns the images to check the lowered graph on: both, or only the last if the model takes one image at a time.
    """
    for divisor in (_SMALLER, 1):
        images = _images(graph, dtype, divisor)
        batches = [images] if graph.entry.batch else [[x[:1] for x in images], [x[1:] for x in images]]
        try:
            for batch in batches:
                check_graph(module, traced, batch)
            break
        except GraphDiffers:
            raise
        except Exception as error:  # the model accepts no other size
            if divisor == 1:
                raise
            log.debug("%s is checked at its usual size: %s", graph.model, summarize(error))
    return batches[-1]


def _images(graph: ModelGraph, dtype: torch.dtype, divisor: int) -> list[Tensor]:
    """Return two random images for each model input, with height and width divided by ``divisor``."""
    made = []
    for seed, spec in enumerate(graph.inputs):
        *rest, height, width = (size or 1 for size in spec.shape[1:])
        draw = torch.Generator().manual_seed(divisor * 1000 + seed)
        made.append(torch.randn(2, *rest, height // divisor, width // divisor, generator=draw).to(dtype))
    return made


class _MetaTensors(LenientMode):
    """Note in ``seen`` whether an operation takes or returns a meta tensor."""

    seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= any(t.is_meta for t in tensors_in((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self.seen |= any(t.is_meta for t in tensors_in(result))
        return result


def _computes_without_values(module: nn.Module, images: list[Tensor]) -> bool:
    """Return whether ``module`` runs on meta tensors for images on the CPU, as if its weights had not been loaded."""
    with torch.no_grad(), _MetaTensors() as watched, contextlib.suppress(Exception):
        module(*images)
    return bool(watched.seen)


def _out_of_place(module: nn.Module) -> nn.Module:
    made = private_copy(module)
    for part in made.modules():
        if has_inplace_setting(part):
            part.inplace = False  # type: ignore[assignment]
    return made
