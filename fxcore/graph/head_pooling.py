"""Detect how a transformer pools its tokens before the head, as declared by timm's models."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

from torch import Tensor, fx, nn

from fxcore.tracing.names import PATH

DISTILLED = "distilled"
"""A method of :func:`fxcore.pooling.pool` that requests cannot name: the mean of the class token and the distillation
token, as used by the heads of distilled models."""

_METHODS = {"avg": "avg", "max": "max", "token": "cls", DISTILLED: DISTILLED}
"""timm's pooling names, mapped to methods of :func:`fxcore.pooling.pool`."""

_ATTENTION_POOL = "attn_pool"
"""timm's name for the module that pools tokens by attention."""


def declared_pooling(model: nn.Module) -> str | None:
    """Return the :func:`fxcore.pooling.pool` method that ``model``, or a transformer in it, uses before its head.

    It is read from timm's attributes ``global_pool`` and ``head_dist``. None if they are missing, parts of the model
    differ, or the model pools in another way.

    >>> import torch
    >>> vit = nn.Module()
    >>> vit.cls_token, vit.global_pool = nn.Parameter(torch.zeros(1, 1, 8)), "avg"
    >>> declared_pooling(nn.Sequential(vit)), declared_pooling(nn.Identity())
    ('avg', None)
    """
    found = {pooled for part in model.modules() if hasattr(part, "cls_token") and (pooled := _pooling(part))}
    return _METHODS.get(found.pop()) if len(found) == 1 else None


def attention_pools(graph: fx.Graph, modules: Collection[str]) -> Mapping[str, str]:
    """Map the name of each node whose tokens the model pools by attention to the name of the pooled vectors' node.

    Args:
        graph: an annotated graph.
        modules: paths of the model's modules.
    """
    pools: dict[str, str] = {}
    for path in (one for one in modules if one.rpartition(".")[2] == _ATTENTION_POOL):
        inside = [node for node in graph.nodes if node.meta.get(PATH, "").startswith(f"{path}.")]
        if not inside or not isinstance(value := inside[-1].meta["value"], Tensor) or value.ndim != 2:
            continue
        given = {above for node in inside for above in node.all_input_nodes}.difference(inside)
        given |= {above for node in given if node.target is operator.getitem for above in node.all_input_nodes}
        pools |= {node.meta[PATH]: inside[-1].meta[PATH] for node in given if PATH in node.meta}
    return pools


def _pooling(module: nn.Module) -> str | None:
    if getattr(module, "head_dist", None) is not None:
        return DISTILLED
    how = getattr(module, "global_pool", None)
    return how if isinstance(how, str) else None
