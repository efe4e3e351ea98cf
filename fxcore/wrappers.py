"""Remove wrappers, modules that only call another: compiled modules, data-parallel training, averages of weights.

The classes of torch.compile and of other packages are private or not always installed. They are recognised by name, so
that nothing is imported; unknown classes are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fxcore.errors import NotTraceable

PREFIXES = ("module.", "_orig_mod.")
"""Prefixes of paths in wrappers."""

_CLASSES: tuple[type[nn.Module], ...] = (nn.DataParallel, DistributedDataParallel, AveragedModel)

_NAMES = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("timm.utils.model_ema", "ModelEma"): "ema",
    ("timm.utils.model_ema", "ModelEmaV2"): "module",
    ("timm.utils.model_ema", "ModelEmaV3"): "module",
    ("ema_pytorch.ema_pytorch", "EMA"): "ema_model",
}
"""The attribute that holds the model, by module and name of further classes."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside ``module`` if it is a (nested) wrapper, else ``module``.

    Wrappers with hooks, and subclasses with their own forward, are kept, since they do more.

    >>> model = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(AveragedModel(model, use_buffers=True))).in_features, unwrapped(model) is model
    (2, True)
    """
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def unwrap_parts(model: nn.Module) -> None:
    """Replace wrappers inside ``model`` by the models in them, and undo in-place compilation (``model.compile()``)."""
    for part in list(model.modules()):
        vars(part).pop("_compiled_call_impl", None)
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = unwrapped(child)


def without_prefix(path: str) -> str:
    """Convert a path in a wrapper to the path in the model inside.

    >>> without_prefix("module._orig_mod.layer1.0"), without_prefix("layer1.0")
    ('layer1.0', 'layer1.0')
    """
    while path.startswith(PREFIXES):
        path = path.partition(".")[2]
    return path


def check_python(module: Any) -> None:
    """Check that ``module`` runs Python code that can be traced.

    Raises:
        NotTraceable: ``module`` is TorchScript, or a program of ``torch.export``.
    """
    if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        how, advice = "TorchScript", "pass the model that was given to torch.jit.script or torch.jit.trace"
    elif isinstance(module, torch.export.ExportedProgram) or hasattr(module, "_guards_fn"):
        how, advice = "a program of torch.export", "pass the model that was given to torch.export.export"
    else:
        return
    name = type(module).__name__
    problem = f"{name} is {how}, which has no Python code to trace"
    raise NotTraceable.because(problem, advice, kind="module", module=name)


def _inner(module: nn.Module) -> nn.Module | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    kind = type(module)
    attribute = _NAMES.get((kind.__module__, kind.__name__))
    if attribute is None and any(isinstance(module, c) and kind.forward is c.forward for c in _CLASSES):
        attribute = "module"
    found = getattr(module, attribute, None) if attribute is not None else None
    return found if isinstance(found, nn.Module) else None
