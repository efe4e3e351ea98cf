"""Undo what a forward does to plain attributes of a model, such as caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fxcore.copies import is_copied, is_hooks

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
        self._modules = [(vars(part), dict(vars(part))) for part in model.modules()]
        self._state = [
            (name, state, dict(state))
            for name, part in model.named_modules()
            for state in (part._parameters, part._buffers)
            if isinstance(state, dict)  # TorchScript's are not
        ]
        values = [(key, value) for held, _ in self._modules for key, value in held.items() if isinstance(value, _KINDS)]
        plain = [value for key, value in values if not is_copied(key)]
        self._containers = {id(held): (held, _copied(held)) for value in plain for held in _containers(value)}
        self._hooks = [(hooks, dict(hooks)) for key, hooks in values if is_hooks(key)]

    def assigned(self) -> Iterator[tuple[str, Any]]:
        """Yield the names of parameters and buffers that are others now, and these."""
        for name, state, before in self._state:
            for key, value in before.items():
                if state.get(key) is not value:
                    yield f"{name}.{key}".lstrip("."), state.get(key)

    def restore(self, kept: Collection[str] = ()) -> None:
        """Restore all attributes and contents, except new attributes with a name in ``kept``.

        Modules, parameters and buffers that the forward registered stay, since graphs refer to them.
        """
        for held, before in self._modules:
            new = {key: value for key, value in held.items() if key in kept and key not in before}
            _restore(held, {**before, **new})
        for _, state, before in self._state:
            state.update(before)
        for held, before in self._containers.values():
            _restore(held, before)

    def remove_hooks(self) -> None:
        """Remove the hooks that the forward registered: the next trace of a model registers them again.

        Those of a successful trace stay, since the graph calls modules that have them.
        """
        for hooks, before in self._hooks:
            _restore(hooks, before)


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
    elif held.keys() == before.keys() and list(held) == list(before):
        held.update(before)
    else:
        for key in list(held):
            if key not in before:
                del held[key]
        for key, value in before.items():  # in their order, by which caches drop the oldest
            held.pop(key, None)
            held[key] = value


def _identities(held: Any) -> list[Any]:
    """Return the ids of the elements, since ``==`` of tensors is no boolean."""
    return [(key, id(value)) for key, value in held.items()] if isinstance(held, dict) else list(map(id, held))
