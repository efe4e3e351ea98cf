"""Build modules without memory for their parameters, and load state dicts without copying them.

Both patch methods of ``nn.Module`` for calls of the thread that builds; calls of other threads are not affected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxcore.layer_types import BATCH_NORMS, INSTANCE_NORMS
from fxcore.models.state_dicts import StateDict
from fxcore.quiet import quiet

_assigning = threading.local()
"""``on`` is True in a thread while that thread registers loaded parameters."""

BUILD_LOCK = threading.RLock()
"""Held while ``nn.Module`` is patched or the global random generator is seeded."""


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Let no other thread build a model within the block, restore the global random generator, and silence warnings."""
    with BUILD_LOCK, torch.random.fork_rng(devices=[]), quiet():
        yield


@contextlib.contextmanager
def assigning(own: StateDict) -> Iterator[None]:
    """Make modules in this thread assign tensors of state dicts instead of copying values, within the block.

    Tensors that equal those of ``own`` are replaced by those of ``own``.
    """
    thread = threading.get_ident()
    load = nn.Module.load_state_dict

    def assign(module: nn.Module, state: StateDict, strict: bool = True, assign: bool = False) -> Any:
        if threading.get_ident() != thread:
            return load(module, state, strict, assign)
        shared = {key: _same(tensor, own.get(key)) for key, tensor in state.items()}
        _assigning.on = True
        try:
            return load(module, shared, strict, True)
        finally:
            _assigning.on = False

    nn.Module.load_state_dict = assign  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]


def _same(tensor: Any, own: torch.Tensor | None) -> Any:
    """Return ``own`` if it equals ``tensor``, else ``tensor``."""
    return own if own is not None and isinstance(tensor, torch.Tensor) and torch.equal(tensor, own) else tensor


_ON_META = "fxcore_on_meta"
"""Attribute of a parameter: its copy on the meta device."""


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Put parameters and batch statistics on the meta device when modules of this thread register them in the block.

    ``torch.device("meta")`` would do so for all tensors, but RegNet reads a computed tensor while it is built, and
    index buffers are structure, not weights: MaxViT's become constants in its graph. Batch statistics must be on the
    same device as the parameters, because SSDlite runs its backbone while it is built.
    """
    thread = threading.get_ident()
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        ours = threading.get_ident() == thread and not getattr(_assigning, "on", False)
        if param is not None and ours and not param.is_meta:
            if not hasattr(param, _ON_META):  # one that several modules share stays one
                setattr(param, _ON_META, nn.Parameter(param.to("meta"), requires_grad=param.requires_grad))
            param = getattr(param, _ON_META)
        register_parameter(module, name, param)

    def buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        statistic = isinstance(module, (*BATCH_NORMS, *INSTANCE_NORMS))
        if tensor is not None and statistic and threading.get_ident() == thread:
            tensor = tensor.to("meta")
        register_buffer(module, name, tensor, persistent)

    nn.Module.register_parameter = parameter  # type: ignore[assignment, method-assign]
    nn.Module.register_buffer = buffer  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
