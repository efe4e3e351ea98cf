"""Constants of a graph: tensors that the model created while it was traced.

torch.fx records operations on inputs and parameters. ``torch.randn(3)`` involves neither: it runs during the trace, and
its result becomes a constant of the graph, the same in every call.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fxcore.nesting import storage_ids, tensors_in
from fxcore.tracing.dispatch_modes import StateGuard

#: key in ``node.meta`` of the :class:`Origin` of a constant that the model created while it was traced
FROZEN = "frozen"

_FXCORE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (_FXCORE, str(Path(torch.__file__).parent) + os.sep, "<frozen")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_UNSET = ("empty", "empty_strided", "new_empty", "empty_like")
# ``torch.tensor([1, 2])`` dispatches to these.
_LITERALS = ("lift_fresh", "lift_fresh_copy")
_FILLS = ("fill_", "zero_", "copy_")


class FrozenDraw(UserWarning):
    """A model drew random numbers while it was traced; every call of the graph uses the same numbers."""


class StateWrite(RuntimeError):
    """A model tried to write to the parameter or buffer ``name`` while it was traced."""

    def __init__(self, name: str) -> None:
        super().__init__(f"writes to {name}")
        self.name = name


class Origin(NamedTuple):
    """The origin of a constant.

    Attributes:
        function: torch's name of the operator that created it, such as ``randn``.
        source: ``file:line: code`` of the model.
        random: whether running the operator again would give different values.
    """

    function: str
    source: str
    random: bool


class FactoryRecorder(StateGuard):
    """A dispatch mode that records the origin of each tensor that this thread creates without tensor arguments.

    Args:
        model: the model whose parameters and buffers to protect. In train mode, writes to them are undone on exit; in
            eval mode they raise :class:`StateWrite`, since later calls would see them and the graph would not.

    Attributes:
        draws: the origin of each random draw, one for each line of the model.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__(model)
        self._training = isinstance(model, nn.Module) and model.training
        self.draws: dict[str, Origin] = {}
        self._origins: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in self._overwritten(func, args, kwargs):
            if not self._training:
                raise StateWrite(self._state[tensor.untyped_storage()._cdata])
            self._save(tensor)
        result = func(*args, **kwargs)
        name = str(func.overloadpacket.__name__)
        given = tensors_in((args, kwargs))
        if name in _FILLS:
            given = given[1:]  # the first is overwritten
        sources = [self._origins[t] for t in given if t in self._origins]
        fresh = not given and name not in _FILLS
        if name in _LITERALS and not sources:
            name, fresh = "tensor", True
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        made: Origin | None
        if drawn or fresh:
            made = Origin(name.removesuffix("_"), _line(), drawn or name in _UNSET)
            if drawn:
                self.draws.setdefault(made.source, made)
        else:
            made = next((m for m in sources if m.random), sources[0] if sources else None)
        for tensor in tensors_in(result):
            if made is not None:
                self._origins[tensor] = made
            elif name in _FILLS:
                self._origins[tensor] = Origin(name.removesuffix("_"), _line(), False)
        return result

    def kept_in(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer whose memory ``tensor`` shares; None if none, or in train mode."""
        places = () if self._training else storage_ids(tensor)
        return next((self._state[place] for place in places if place in self._state), None)

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of ``tensor``; None if it was not recorded."""
        found: Origin | None = self._origins.get(tensor)
        return found

    def warn(self, model: str) -> None:
        """Warn about random draws."""
        if self.draws:
            lines = "; ".join(f"{made.function} at {made.source}" for made in self.draws.values())
            warnings.warn(
                f"{model} draws random numbers while it is traced, and every call of the graph will use the same "
                f"numbers ({lines}); draw with torch.randn_like(x) or x.new_empty(...).normal_(), which are recorded, "
                "or keep the function that draws whole with leaf_functions",
                FrozenDraw,
                stacklevel=_outside(),
            )


def frozen(graph: fx.Graph) -> dict[str, Origin]:
    """Return the origins of the constants that the model created while it was traced, by attribute name.

    >>> from fxcore import trace
    >>> made = frozen(trace(lambda x: x + torch.arange(3)).graph)["_tensor_constant0"]
    >>> made.function, made.random
    ('arange', False)
    """
    return {str(n.target): n.meta[FROZEN] for n in graph.nodes if FROZEN in n.meta}


def made_constants(graph: fx.Graph) -> list[str]:
    """Return the names of attributes that tracing adds for constants, in order of first use.

    torch.fx records operations on parameters; for operations on buffers it stores only the result:

    >>> import torch
    >>> from fxcore import trace
    >>> from torch import nn
    >>> class Centred(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("mean", torch.zeros(3))
    ...     def forward(self, x):
    ...         return x - self.mean.view(3, 1, 1)
    >>> made_constants(trace(Centred()).graph)
    ['_tensor_constant0']
    """
    targets = (str(node.target) for node in graph.nodes if node.op == "get_attr")
    return list(dict.fromkeys(target for target in targets if target.startswith("_tensor_constant")))


def _line() -> str:
    """Return the model's line that is running, as ``file:line: code``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file)


def _outside() -> int:
    """Return the number of frames from :meth:`FactoryRecorder.warn` to the first frame outside fxcore."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FXCORE):
        frame, level = frame.f_back, level + 1
    return level
