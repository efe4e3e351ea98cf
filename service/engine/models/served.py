"""The served models, according to the names and shell patterns of the setting ``models``."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fxcore.errors import UnknownModel
from fxcore.models.catalog import list_models
from fxcore.models.timm_models import PREFIX, imported


def is_served(name: str, allowed: Collection[str] | None) -> bool:
    """Return whether the model ``name`` is among ``allowed``; None allows all.

    >>> is_served("timm.vit_tiny_patch16_224", ["resnet50", "timm.vit_*"]), is_served("resnet18", ["resnet50"])
    (True, False)
    """
    return allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed)


def may_serve(prefix: str, allowed: Collection[str] | None) -> bool:
    """Return whether ``allowed`` may match a name that begins with ``prefix``.

    >>> may_serve("timm.", ["resnet*"]), may_serve("timm.", ["resnet*", "*_tiny"]), may_serve("timm.", ["timm.vit_*"])
    (False, True, True)
    """
    return allowed is None or any(pattern.startswith((prefix, "*", "?", "[")) for pattern in allowed)


def require_served(name: str, allowed: Collection[str] | None) -> None:
    """Check that the model ``name`` is among ``allowed``.

    Raises:
        UnknownModel: it is not among them; ``suggestions`` has similar names that are.
    """
    if is_served(name, allowed):
        return
    known = list_models("timm" if name.startswith(PREFIX) and imported() else None)
    served = [entry.name for entry in known if is_served(entry.name, allowed)]
    suggestions = get_close_matches(name[:128], served, n=5, cutoff=0.5)
    hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
    patterns = ", ".join(sorted(allowed or ()))
    raise UnknownModel(
        f"the model {name!r} is not served here; served: {patterns}{hint}", name=name, suggestions=suggestions
    )
