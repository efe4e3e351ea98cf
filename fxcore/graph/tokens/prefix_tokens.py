"""The tokens that a transformer puts before those of its patches: a class token, registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from fxcore.graph.tokens.patches import is_class_token

DECLARED = "declared_prefix"
"""Key in a node's ``meta`` of the :class:`PrefixTokens` that its model declares, or None."""

ADDS_PREFIX = "adds_prefix"
"""Key in a node's ``meta``: whether it reads parameters that are named like prefix tokens."""


@dataclass(frozen=True)
class PrefixTokens:
    """The tokens before those that stand for positions of the input.

    Attributes:
        count: number of prefix tokens.
        class_token: whether the first one is a class token.
        known: whether these are all such tokens. If not, others are among or after those of the positions, as when a
            class token is appended.
    """

    count: int = 0
    class_token: bool = False
    known: bool = field(default=True, repr=False)


NO_PREFIX = PrefixTokens()
"""For values that are not tokens, or tokens that all stand for positions."""

UNKNOWN_PREFIX = PrefixTokens(known=False)
"""For tokens of which some stand for no position, and it is not known that these come first."""


def declared_prefix(model: nn.Module) -> PrefixTokens | None:
    """Return the prefix tokens that ``model``, or a transformer in it, declares by timm's attributes.

    None if it declares none, or parts of the model differ. timm's transformers have ``num_prefix_tokens``, and one or
    more of ``has_class_token``, ``num_reg_tokens`` and ``cls_token``. Their attention layers have only the first.

    >>> vit = nn.Module()
    >>> vit.num_prefix_tokens, vit.num_reg_tokens = 4, 4
    >>> declared_prefix(nn.Sequential(vit))
    PrefixTokens(count=4, class_token=False)
    """
    own = _declared(model)
    if own is not None:
        return own
    inside = {declared for part in model.modules() if (declared := _declared(part)) is not None}
    return inside.pop() if len(inside) == 1 else None


def adds_prefix(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether ``node`` reads a parameter that is named like a class token or register.

    Args:
        module: the module that it calls; None for other nodes.
    """
    if module is not None:
        return any(_is_token(path) for path, _ in module.named_parameters())
    return node.op == "get_attr" and _is_token(str(node.target))


def _is_token(path: str) -> bool:
    last = path.rpartition(".")[2]
    return is_class_token(path) or "token" in last or "reg" in last


def _declared(module: nn.Module) -> PrefixTokens | None:
    count = getattr(module, "num_prefix_tokens", None)
    if type(count) is not int or count < 0:
        return None
    has_class_token = getattr(module, "has_class_token", None)
    registers = getattr(module, "num_reg_tokens", None)
    if isinstance(has_class_token, bool):
        return PrefixTokens(count, has_class_token and count > 0)
    if type(registers) is int:
        return PrefixTokens(count, count > registers)
    if hasattr(module, "cls_token"):
        return PrefixTokens(count, module.cls_token is not None and count > 0)
    return None
