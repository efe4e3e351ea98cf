"""Read state dicts from files without unpickling code, and load them into models."""

from __future__ import annotations

import difflib
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fxcore.errors import UnknownWeights, WeightsUnavailable
from fxcore.wrappers import PREFIXES

StateDict = Mapping[str, Tensor]  # torch stores the modules' versions in the attribute _metadata

FILE_PREFIX = "file:"

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Key prefixes added by DataParallel and AveragedModel, by torch.compile, and by Lightning."""

_AVERAGED = "n_averaged"
"""AveragedModel's counter, beside the model's keys."""

UNREAD = ("aux1.", "aux2.", "AuxLogits.")
"""Prefixes of auxiliary heads that GoogLeNet and Inception run only in training; files may lack them."""

# DenseNet's published files use the module names of 2017; torchvision renames them with this pattern.
_OLD_DENSENET_KEY = re.compile(
    r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$"
)


DOWNLOAD_AGAIN = "delete it so that it is downloaded again"


def read_cached(file: Path, remedy: str = DOWNLOAD_AGAIN) -> StateDict:
    """Read the state dict of published weights from torch.hub's cache, or from a package.

    ``remedy`` says in the error what to do about the file.

    Raises:
        WeightsUnavailable: the file is damaged or missing.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise TypeError("it does not hold a state dict")
    except Exception as error:
        raise damaged(file, error, remedy) from error
    return state


def damaged(file: Path, error: Exception, remedy: str = DOWNLOAD_AGAIN) -> WeightsUnavailable:
    """Return the error for a cached or packaged ``file`` that cannot be read."""
    state = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({first_line(error)})"
    return unavailable(file, f"{file.name} in {file.parent} is {state}; {remedy}, or use weights=random to try without")


def unavailable(file: Path, detail: str) -> WeightsUnavailable:
    """Return the error for a ``file`` that cannot be loaded."""
    return WeightsUnavailable(detail, file=file.name, folder=str(file.parent))


def read_file(name: str, folder: Path | None) -> StateDict:
    """Read a state dict from a file in ``folder``: safetensors, or a torch file that holds only tensors.

    ``name`` must be in a listing of the folder, so it cannot be a path that leaves it.

    Raises:
        UnknownWeights: there is no such file.
        WeightsUnavailable: the file cannot be read without running code, or is damaged.
    """
    names = sorted(p.name for p in folder.iterdir() if p.is_file()) if folder is not None and folder.is_dir() else []
    if folder is None or name not in names:
        holds = f"the weights folder holds {', '.join(names) or 'nothing'}"
        where = "no weights folder is set" if folder is None else holds
        near, known = ([FILE_PREFIX + one for one in some] for some in (difflib.get_close_matches(name, names), names))
        raise UnknownWeights(f"there is no weights file {name!r}: {where}", suggestions=near, available=known)
    path = folder / name
    try:
        if path.suffix == ".safetensors":
            # Not load_file, which maps the file: writing to it would change the loaded weights, and truncating it would
            # kill the process.
            return safetensors.torch.load(path.read_bytes())
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise unavailable(
            path,
            f"{name} is a pickle that holds more than tensors and is not opened; save model.state_dict(), or convert "
            "it to safetensors",
        ) from error
    except Exception as error:
        raise unavailable(path, f"{name} cannot be read ({first_line(error)})") from error
    if isinstance(loaded, Mapping):  # possibly a training checkpoint, as saved by torchvision's scripts
        inner = loaded.get("model", loaded.get("state_dict"))
        loaded = inner if isinstance(inner, Mapping) else loaded
    if not isinstance(loaded, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()
    ):
        raise unavailable(path, f"{name} does not hold a state dict")
    return loaded


def filled(
    name: str,
    model: nn.Module,
    state: StateDict,
    file: Path,
    unread: tuple[str, ...] = UNREAD,
    *,
    assign: bool = True,
) -> nn.Module:
    """Load ``state`` into a weightless ``model``: its tensors become the model's parameters, in its dtypes.

    Args:
        name: the model's name.
        model: the result of :meth:`fxcore.models.entry.ModelEntry.build_weightless`.
        state: the contents of ``file``.
        file: the path to report in errors.
        unread: prefixes of keys that ``state`` may lack.
        assign: False to copy values into the tensors of a ``model`` that has memory for them.

    Raises:
        WeightsUnavailable: ``state`` does not match the model.
    """
    state, versions = _without_inner_wrappers(*_without_prefix(state, model.state_dict()), model.state_dict())
    if name.startswith("densenet"):
        state = {_OLD_DENSENET_KEY.sub(lambda m: m[1] + m[2], key): value for key, value in state.items()}
    expected = model.state_dict()
    # Auxiliary heads do not run in inference and may be in only the file or only the model. Batch counters matter only
    # in training: files of frozen batch norms lack them, and in half-precision state dicts they may be floats.
    fitting = OrderedDict((k, v) for k, v in state.items() if k in expected or not k.startswith("aux"))
    for same in _shared(model):
        # A safetensors file holds a tensor that modules share under only one of its keys.
        if (shared := next((fitting[key] for key in same if key in fitting), None)) is not None:
            fitting.update(dict.fromkeys(same - fitting.keys(), shared))
    for key, value in expected.items():
        given = fitting.get(key)
        counts = key.endswith("num_batches_tracked")
        if (given is None and (counts or key.startswith(unread))) or (
            counts and isinstance(given, Tensor) and given.is_floating_point()
        ):
            given = fitting[key] = torch.zeros_like(value, device="cpu")
        if isinstance(given, Tensor) and (fault := _fault(given, value)) is not None:
            raise misfit(name, file, f"{key} {fault}")
    # Modules convert old key names by version. Without versions (safetensors) they accept either naming; only MNASNet
    # requires a version, that of the top-level module.
    fitting._metadata = versions or {"": expected._metadata[""]}  # type: ignore[attr-defined]
    try:
        model.load_state_dict(fitting, assign=assign)
        # Convert checkpoints of another precision. The extractor's precision is chosen elsewhere.
        return _cast(model, expected)
    except RuntimeError as error:
        raise misfit(name, file, str(error)) from error


def _shared(model: nn.Module) -> list[set[str]]:
    """Return the keys of each parameter and buffer that has several."""
    state = model.state_dict(keep_vars=True)
    keys = defaultdict[int, set[str]](set)
    for key, value in state.items():
        if isinstance(value, Tensor):
            keys[id(value)].add(key)
    return [same for same in keys.values() if len(same) > 1]


def _cast(model: nn.Module, expected: StateDict) -> nn.Module:
    """Cast the floating-point parameters and buffers of ``model`` to the dtypes of ``expected``."""
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != expected[key].dtype:
            value.data = value.data.to(expected[key].dtype)
    return model


def _without_prefix(state: StateDict, expected: StateDict) -> tuple[StateDict, dict[str, Any] | None]:
    """Remove the wrapper prefix that all keys share from ``state`` and its module versions, unless a key already
    matches ``expected``."""
    versions = known = getattr(state, "_metadata", None)
    if not expected.keys().isdisjoint(state):
        return state, known
    found = {key: value for key, value in state.items() if key != _AVERAGED}
    while found and expected.keys().isdisjoint(found):
        prefix = next((p for p in WRAPPERS if all(key.startswith(p) for key in found)), None)
        if prefix is None:
            return state, known  # unchanged, for the error message
        found = {key.removeprefix(prefix): value for key, value in found.items()}
        if versions is not None:
            inside = {path: version for path, version in versions.items() if f"{path}.".startswith(prefix)}
            versions = {path[len(prefix) :]: version for path, version in inside.items()}
    return found, versions


def _without_inner_wrappers(
    state: StateDict, versions: dict[str, Any] | None, expected: StateDict
) -> tuple[StateDict, dict[str, Any] | None]:
    """Remove the names of wrappers of submodules from the keys that match ``expected`` without, and from the paths of
    module versions.

    Models are loaded without such wrappers, but saved with them, as in ``head._orig_mod.weight``.
    """
    found = {}
    for key, value in state.items():
        inside = _inside_wrappers(key)
        fits = key in expected or inside not in expected or inside in state
        if key in expected or not key.endswith(f".{_AVERAGED}"):
            found[key if fits else inside] = value
    if found.keys() == state.keys():
        return state, versions
    return found, versions and {_inside_wrappers(path): version for path, version in versions.items()} | versions


def _inside_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if f"{part}." not in PREFIXES)


def _fault(value: Tensor, expected: Tensor) -> str | None:
    """Return why ``value`` cannot replace ``expected``, ignoring shapes; None if it can."""
    if value.is_meta:
        return "is a meta tensor, which has no values"
    if value.layout != torch.strided:
        return f"is not dense but {value.layout}"
    kinds = [(tensor.is_floating_point(), tensor.is_quantized) for tensor in (value, expected)]
    return f"is {value.dtype} instead of {expected.dtype}" if kinds[0] != kinds[1] else None


def misfit(name: str, file: Path, reason: str) -> WeightsUnavailable:
    """Return the error for a ``file`` whose tensors do not match the model ``name``."""
    reason = " ".join(reason.split())[:300]
    return unavailable(file, f"{file.name} does not fit {name}: {reason}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
