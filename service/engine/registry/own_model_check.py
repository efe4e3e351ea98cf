"""Check an operator's own model by running it, before any request does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.agreement import GraphDiffers, Rows, check_graph, compare_rows, other_inputs
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, Options
from fxcore.copies import private_copy
from fxcore.errors import summarize
from fxcore.extractor import whole_module
from fxcore.graph.model_graph import ModelGraph
from fxcore.models.user_models import BadUserModel, UserEntry

log = logging.getLogger("fxserve.models")

_SMALLER = 2
"""Divides height and width of the second images, for models that take any size."""

_LOWERED = 5e-3
"""Largest error of the lowered graph, relative to the largest magnitude of an output."""


def checked(entry: UserEntry, graph: ModelGraph) -> UserEntry:
    """Run a model, its graph and the lowered graph on random images, as a batch and one by one, on the CPU.

    Other backends than eager are compared with it before they serve, see :mod:`service.engine.backends.checks`.

    Returns:
        ``entry`` with the names of the nodes whose rows are not those of one image. A model that cannot run on the CPU
        is not checked, and a warning logged.

    Raises:
        GraphDiffers: the graph computes something else.
        BadUserModel: an image's values depend on the others in its batch, and the entry does not say ``batch = false``.
        WeightsUnavailable: its weights cannot be loaded.
    """
    module = entry.load_published(str(entry.default_weights)).eval().requires_grad_(False)
    dtype = next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.float32)
    traced = whole_module(graph, _out_of_place(module), dtype)
    try:
        images = _images(graph, 1, dtype, 1)
        check_graph(module, traced, images)
        others = _checked_batch(module, traced, graph, images)
        rows = compare_rows(traced, others) if entry.batch else Rows()
    except GraphDiffers:
        raise
    except Exception as error:
        log.warning("model %r could not be checked, since it does not run on the CPU: %s", entry.name, summarize(error))
        return entry
    if rows.dependent is not None:
        raise BadUserModel(
            f"what it computes for an image depends on the other images in its batch, first in {rows.dependent}; write "
            "batch = false to have it compute one image at a time"
        )
    lowered = BACKENDS["eager"].lower(traced, tuple(others), Options())
    found = verify(traced, lowered, tuple(others), rtol=_LOWERED, atol=_LOWERED)
    if not found.allclose:
        raise GraphDiffers("the graph computes other values once its layers are folded", node=found.first_divergence)
    return replace(entry, apart=frozenset(rows.apart))


def _images(graph: ModelGraph, count: int, dtype: torch.dtype, divisor: int) -> list[Tensor]:
    """``count`` random images for each input of the model, height and width divided by ``divisor``."""
    made = []
    for seed, spec in enumerate(graph.inputs):
        *rest, height, width = (size or 1 for size in spec.shape[1:])
        draw = torch.Generator().manual_seed(divisor * 1000 + seed)
        made.append(torch.randn(count, *rest, height // divisor, width // divisor, generator=draw).to(dtype))
    return made


def _checked_batch(
    module: nn.Module, traced: fx.GraphModule, graph: ModelGraph, images: Sequence[Tensor]
) -> list[Tensor]:
    """Check the graph on two other images, smaller ones if the model takes any size; returns them."""
    count = 2 if graph.entry.batch else 1
    if not graph.preprocessing.fixed_size:
        smaller = _images(graph, count, images[0].dtype, _SMALLER)
        try:
            check_graph(module, traced, smaller)
        except GraphDiffers:
            raise
        except Exception as error:  # the model takes no other size
            log.debug("%s is checked at its usual size: %s", graph.model, summarize(error))
        else:
            return smaller
    usual = other_inputs([x.expand(count, *x.shape[1:]) for x in images])
    check_graph(module, traced, usual)
    return usual


def _out_of_place(module: nn.Module) -> nn.Module:
    made = private_copy(module)
    for part in made.modules():
        if getattr(part, "inplace", None) is True:
            part.inplace = False  # type: ignore[assignment]
    return made
