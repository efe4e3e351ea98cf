"""Undo what a forward does to plain attributes of a model, such as caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fxcore.copies import is_copied

_KINDS = (dict, list, set)


class Attributes:
    """The attributes of a model's modules, and the contents of dictionaries, lists and sets in them.

    A model that is traced stores traced values in them. Private copies of a model share its dictionaries, lists and
    sets, so the model itself, and the next trace, would read those values.

    >>> model = nn.ReLU()
    >>> model.seen, model.last = {}, None
    >>> before = Attributes(model)
    >>> model.seen["x"] = model.last = model.extra = 1
    >>> before.restore()
    >>> model.seen, model.last, hasattr(model, "extra")
    ({}, None, False)
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [vars(part) for part in model.modules()]
        self._modules = [(held, dict(held)) for held in parts]
        # Modules and tensors that a forward registers stay, since graphs refer to them.
        plain = [value for held in parts for key, value in held.items() if not is_copied(key)]
        self._containers = {id(held): (held, _copied(held)) for value in plain for held in _containers(value)}

    def restore(self, kept: Collection[str] = ()) -> None:
        """Restore all attributes and contents, except new attributes with a name in ``kept``."""
        for held, before in self._modules:
            new = {key: value for key, value in held.items() if key in kept and key not in before}
            _restore(held, {**before, **new})
        for held, before in self._containers.values():
            _restore(held, before)


def _containers(value: Any) -> Iterator[Any]:
    """Yield ``value`` if it is a dictionary, list or set, and those in it."""
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, _KINDS) and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += one.values() if isinstance(one, dict) else one


def _copied(held: Any) -> Any:
    kind = next(kind for kind in _KINDS if isinstance(held, kind))
    return kind(held)


def _restore(held: Any, before: Any) -> None:
    if _identities(held) == _identities(before):
        return  # it may not even be possible to write to it
    if isinstance(held, list):
        held[:] = before
    elif isinstance(held, set):
        held &= before
        held |= before
    else:
        for key in held.keys() - before.keys():
            del held[key]
        held.update(before)


def _identities(held: Any) -> list[Any]:
    """Return the ids of the elements, since ``==`` of tensors is no boolean."""
    return [(key, id(value)) for key, value in held.items()] if isinstance(held, dict) else list(map(id, held))
