"""Tensors that a model makes while it is traced: the graph holds what came out that once.

torch.fx records what is done to its inputs and parameters. ``torch.randn(3)`` has neither: it runs, and its numbers
become a constant of the graph, the same in every call.
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

#: key in ``node.meta`` of a constant that the model made while it was traced: a :class:`Made`
FROZEN = "frozen"

_OWN = str(Path(__file__).parents[1]) + os.sep
_ELSEWHERE = (_OWN, str(Path(torch.__file__).parent) + os.sep, "<frozen")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_UNSET = ("empty", "empty_strided", "new_empty", "empty_like")
# What ``torch.tensor([1, 2])`` comes to.
_LITERALS = ("lift_fresh", "lift_fresh_copy")
_FILLS = ("fill_", "zero_", "copy_")


class FrozenDraw(UserWarning):
    """A model draws random numbers while it is traced; every call of the graph has the same."""


class Overwrite(RuntimeError):
    """A model was about to write to a tensor of its own while it was traced; ``name`` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"writes to {name}")
        self.name = name


class Made(NamedTuple):
    """Where a constant comes from.

    Attributes:
        function: torch's name of what made it, as ``randn``.
        source: ``file:line: code`` of the model.
        random: whether it would be another if it were made again.
    """

    function: str
    source: str
    random: bool


class Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, knows of each tensor that this thread makes from nothing where it was made.

    Args:
        model: whose parameters and buffers are left as they are. What it writes to them in training is undone
            afterwards; in eval mode it raises :class:`Overwrite`, since later calls would see what was written and
            the graph would not.

    Attributes:
        draws: one for each line that drew at random, whatever became of the numbers.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._training = False
        self._own: dict[int, str] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        if isinstance(model, nn.Module):
            self._training = model.training
            tensors = (*model.named_parameters(), *model.named_buffers())
            self._own = {t.untyped_storage()._cdata: name for name, t in tensors}
        self.draws: dict[str, Made] = {}
        self._made: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._guard(func, args, kwargs)
        result = func(*args, **kwargs)
        name = str(func.overloadpacket.__name__)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in _FILLS:
            given = given[1:]  # what was there is gone
        sources = [self._made[t] for t in given if t in self._made]
        fresh = not given and name not in _FILLS
        if name in _LITERALS and not sources:
            name, fresh = "tensor", True
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        made: Made | None
        if drawn or fresh:
            made = Made(name.removesuffix("_"), _line(), drawn or name in _UNSET)
            if drawn:
                self.draws.setdefault(made.source, made)
        else:
            made = next((m for m in sources if m.random), sources[0] if sources else None)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                if made is not None:
                    self._made[tensor] = made
                elif name in _FILLS:
                    self._made[tensor] = Made(name.removesuffix("_"), _line(), False)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    def _guard(self, func: Any, args: Any, kwargs: Any) -> None:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        targets = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        for tensor in pytree.tree_leaves(targets):
            place = tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None
            if place in self._own and not self._training:
                raise Overwrite(self._own[place])
            if place in self._own and place not in self._before:
                whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
                self._before[place] = whole, whole.clone()

    def of(self, tensor: Tensor) -> Made | None:
        """Where ``tensor`` was made, if this saw it."""
        found: Made | None = self._made.get(tensor)
        return found

    def warn(self, model: str) -> None:
        """Warn of draws at random."""
        if self.draws:
            lines = "; ".join(f"{made.function} at {made.source}" for made in self.draws.values())
            warnings.warn(
                f"{model} draws random numbers while it is traced, and every call of the graph will have those of "
                f"this once ({lines}); draw with the likes of torch.randn_like(x) or x.new_empty(...).normal_(), which "
                "are recorded, or keep the function that draws whole with leaf_functions",
                FrozenDraw,
                stacklevel=_outside(),
            )


def frozen(graph: fx.Graph) -> dict[str, Made]:
    """The constants that the model made while it was traced, by the name of the attribute.

    >>> from fxcore import trace
    >>> made = frozen(trace(lambda x: x + torch.arange(3)).graph)["_tensor_constant0"]
    >>> made.function, made.random
    ('arange', False)
    """
    return {str(n.target): n.meta[FROZEN] for n in graph.nodes if FROZEN in n.meta}


def made_constants(graph: fx.Graph) -> list[str]:
    """Attributes that tracing made of tensors that the model computes from its buffers, in order of first use.

    torch.fx records what is done to parameters, and keeps of what is done to buffers the result alone:

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
    """The line of the model that runs."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_elsewhere(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"


def _is_elsewhere(file: str) -> bool:
    return file.startswith(_ELSEWHERE) or (file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file)


def _outside() -> int:
    """How many frames above :meth:`Factories.warn` fxcore ends."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    return level
