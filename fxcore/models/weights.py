"""State dicts: where they come from and how they get into a model.

Published weights go through torch.hub's cache and its download with the hash check; files come from one folder and
are read without unpickling code; ``random`` is torchvision's initialisation under seed 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import pickle
import re
import tempfile
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fxcore.bad_argument import BadArgument
from fxcore.errors import UnknownWeights, WeightsUnavailable
from fxcore.models.entry import FILE_PREFIX, RANDOM, ModelEntry, WeightsInfo
from fxcore.models.hub import HubWeights
from fxcore.models.timm_models import TimmEntry
from fxcore.models.torchvision_models import TorchvisionEntry
from fxcore.models.user_models import UserEntry

StateDict = Mapping[str, Tensor]  # as loaded: torch keeps the modules' versions in its attribute _metadata

# How long to wait for the first word of the server that holds the weights, in seconds. Without a network this is
# answered at once; the download itself may take as long as it needs, so long as it moves.
_REACH_TIMEOUT = 5.0

STALL_TIMEOUT = 30.0
"""Seconds without a byte after which a download is given up."""

_CHUNK = 1024**2

# What only GoogLeNet's and Inception's training runs. A model saved without them computes the same.
_TRAINED_WITH = ("aux1.", "aux2.", "AuxLogits.")

# Detectors whose published weights were trained with frozen batch norms of eps 0; torchvision's builders set it after
# loading (`overwrite_eps`). Here those batch norms are ordinary ones in eval mode, which compute the same.
_ZERO_EPS = {"fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn", "retinanet_resnet50_fpn"}

# DenseNet's published files still use the module names of 2017; torchvision renames them with this same pattern.
_OLD_DENSENET_KEY = re.compile(
    r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$"
)


def load_model(entry: ModelEntry, weights: str, weights_dir: Path | None = None) -> nn.Module:
    """A private float32 model on the CPU, in eval mode, with ``weights`` loaded and every module out-of-place.

    Weights of a file go into the model as torchvision builds it without weights. GoogLeNet and Inception do not
    transform their input then (``transform_input``), as they do with published weights.

    Args:
        entry: the model.
        weights: a canonical name (:meth:`ModelEntry.canonical_weights`).
        weights_dir: the only folder that ``file:NAME`` looks into.

    Raises:
        WeightsUnavailable: the file is missing and cannot be downloaded, is damaged, or does not fit the model.
        UnknownWeights: the model has none of that name, or ``file:NAME`` names nothing in ``weights_dir``.
        BadArgument: ``entry`` is none.

    >>> from fxcore import get_model
    >>> one, other = (load_model(get_model("squeezenet1_1"), "random") for _ in range(2))
    >>> all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
    True
    >>> one.training, any(getattr(m, "inplace", False) for m in one.modules())
    (False, False)
    """
    if not isinstance(entry, ModelEntry):
        raise BadArgument(f"weights are loaded into what get_model returns, not into {entry!r:.100}")
    if not isinstance(weights, str):
        raise BadArgument(f"weights are named by text such as 'random', not by {weights!r:.100}")
    weights = entry.canonical_weights(weights)
    if weights == RANDOM:
        model = entry.build()
    elif weights.startswith(FILE_PREFIX):
        name = weights.removeprefix(FILE_PREFIX)
        model = _filled(entry, RANDOM, read_file(name, weights_dir), str(weights_dir), name)
    elif isinstance(entry, UserEntry):
        file = entry.file(weights)
        if file is None:
            model = entry.build()
        else:
            model = _filled(entry, weights, read_file(file.name, file.parent), str(file.parent), file.name)
    elif isinstance(entry, TimmEntry):
        model = _of_timm(entry, weights)
    else:
        info = entry.published[weights]
        state = published_state_dict(info)
        if isinstance(entry, TorchvisionEntry) and entry.is_quantized(weights):
            try:
                model = entry.build_int8(weights)
            except (RuntimeError, KeyError) as error:
                raise _misfit(entry, info.file.name, str(info.file.parent), str(error)) from error
        else:
            model = _filled(entry, weights, state, str(info.file.parent), info.file.name)
        if weights == "COCO_V1" and entry.name in _ZERO_EPS:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eps = 0.0
    model.eval().requires_grad_(False)
    for module in model.modules():
        # An in-place ReLU would overwrite the very tensor that a client asked for.
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]
    return model


def download_weights(entry: ModelEntry, weights: str) -> None:
    """Have the file of published ``weights`` in its cache, which may take minutes; others need none.

    Raises:
        WeightsUnavailable: it is not there and cannot be downloaded.
    """
    info = missing_weights(entry, weights)
    if info is not None:
        _download(info)


def missing_weights(entry: ModelEntry, weights: str) -> WeightsInfo | None:
    """The published weights that ``weights`` names, if their file would have to be downloaded.

    >>> from fxcore import get_model
    >>> missing_weights(get_model("squeezenet1_1"), "random") is None
    True
    """
    info = None if isinstance(entry, UserEntry) else entry.published.get(weights)
    return info if info is not None and not info.cached else None


def published_state_dict(info: WeightsInfo) -> StateDict:
    """The state dict of published weights, from torch.hub's cache or downloaded into it with its hash checked.

    Raises:
        WeightsUnavailable: no cached file and no way to download one, or a damaged file.
    """
    file = info.file
    if not file.is_file():
        _download(info)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise TypeError("it does not hold a state dict")
    except Exception as error:
        raise _damaged(file, error) from error
    return state


def _of_timm(entry: TimmEntry, weights: str) -> nn.Module:
    info = entry.published[weights]
    if not info.cached:
        _download(info)
    file = info.file
    try:
        with safetensors.safe_open(file, "pt") if file.suffix == ".safetensors" else contextlib.nullcontext():
            pass  # a damaged file is no misfit
        return entry.build_with(weights, file)
    except (safetensors.SafetensorError, pickle.UnpicklingError, OSError, EOFError) as error:
        raise _damaged(file, error) from error
    except (RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise _misfit(entry, file.name, str(file.parent), str(error)) from error


def _damaged(file: Path, error: Exception) -> WeightsUnavailable:
    return WeightsUnavailable(
        f"{file.name} in {file.parent} is damaged ({_first_line(error)}); delete it so that it is fetched again, "
        "or ask for weights=random to try without",
        file=file.name,
        folder=str(file.parent),
    )


def _download(info: WeightsInfo) -> None:
    if isinstance(info, HubWeights):
        info.download()
        return
    file = info.file
    try:
        with urllib.request.urlopen(urllib.request.Request(info.url, method="HEAD"), timeout=_REACH_TIMEOUT):
            pass
        file.parent.mkdir(parents=True, exist_ok=True)
        _fetch(info.url, file)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        raise WeightsUnavailable(
            f"{file.name} is not in {file.parent} and could not be downloaded ({_first_line(error)}); put the file "
            "there, or ask for weights=random to try without",
            file=file.name,
            folder=str(file.parent),
        ) from error


def _fetch(url: str, file: Path) -> None:
    """Download ``url`` to ``file``, which is there only once it is whole and its hash is right.

    ``torch.hub.download_url_to_file`` does the same, but waits without end for a server that stops sending.

    Raises:
        OSError, http.client.HTTPException: the download broke off, stalled, or could not be written.
        ValueError: the hash is not the one in the file's name.
    """
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        partial = Path(stack.enter_context(tempfile.NamedTemporaryFile(dir=file.parent, delete=False)).name)
        stack.callback(partial.unlink, missing_ok=True)
        source = stack.enter_context(urllib.request.urlopen(url, timeout=STALL_TIMEOUT))
        with partial.open("wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
        length = source.headers["content-length"]
        if length is not None and partial.stat().st_size != int(length):
            raise OSError(f"it broke off after {partial.stat().st_size:,} of {int(length):,} bytes")
        # torchvision puts the first digits of the SHA-256 into the file name: name-<digits>.pth.
        wanted = re.search(r"-([a-f0-9]+)\.", file.name)
        if wanted is not None and not digest.hexdigest().startswith(wanted.group(1)):
            raise ValueError(f"its SHA-256 hash is {digest.hexdigest()[:16]}…, not {wanted.group(1)}…")
        partial.chmod(0o644)
        partial.replace(file)


def read_file(name: str, folder: Path | None) -> StateDict:
    """A state dict from a file in ``folder``: safetensors, or a torch file that holds tensors only.

    ``name`` is looked up in a listing of the folder, so it cannot lead out of it.

    Raises:
        UnknownWeights: there is no such file.
        WeightsUnavailable: the file cannot be read, or would run code.
    """
    names = sorted(p.name for p in folder.iterdir() if p.is_file()) if folder is not None and folder.is_dir() else []
    if folder is None or name not in names:
        holds = f"the weights folder holds {', '.join(names) or 'nothing'}"
        where = "no weights folder is set" if folder is None else holds
        raise UnknownWeights(f"there is no weights file {name!r}: {where}", available=[FILE_PREFIX + n for n in names])
    path = folder / name
    try:
        if path.suffix == ".safetensors":
            # load_file would map the file, and who writes to it would change the weights that are served, or, by
            # cutting it short, have the process killed.
            return safetensors.torch.load(path.read_bytes())
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsUnavailable(
            f"{name} is a pickle that holds more than tensors and is not opened; save model.state_dict(), or convert "
            "it to safetensors",
            file=name,
            folder=str(folder),
        ) from error
    except Exception as error:
        raise WeightsUnavailable(
            f"{name} cannot be read ({_first_line(error)})", file=name, folder=str(folder)
        ) from error
    if isinstance(loaded, Mapping):  # perhaps a training checkpoint, as torchvision's scripts save it
        inner = loaded.get("model", loaded.get("state_dict"))
        loaded = inner if isinstance(inner, Mapping) else loaded
    if not isinstance(loaded, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in loaded.items()
    ):
        raise WeightsUnavailable(f"{name} does not hold a state dict", file=name, folder=str(folder))
    return loaded


def _filled(entry: ModelEntry, structure: str, state: StateDict, folder: str, file: str) -> nn.Module:
    """A model that holds ``state``, which becomes its memory: nothing is initialised first."""
    model = entry.build_weightless(structure)
    versions = getattr(state, "_metadata", None)
    if entry.name.startswith("densenet"):
        state = {_OLD_DENSENET_KEY.sub(lambda m: m[1] + m[2], key): value for key, value in state.items()}
    expected = model.state_dict()
    # Auxiliary heads that inference never runs may be in the file and not in the model, or the other way round. Batch
    # counters only matter in training: files of frozen batch norms lack them, and who halves every tensor of a state
    # dict halves them too.
    unread = () if isinstance(entry, UserEntry) else _TRAINED_WITH
    fitting = OrderedDict((k, v) for k, v in state.items() if k in expected or not k.startswith("aux"))
    for key, value in expected.items():
        given = fitting.get(key)
        counts = key.endswith("num_batches_tracked")
        if (given is None and (counts or key.startswith(unread))) or (
            counts and isinstance(given, Tensor) and given.is_floating_point()
        ):
            given = fitting[key] = torch.zeros_like(value, device="cpu")
        if isinstance(given, Tensor) and (fault := _fault(given, value)) is not None:
            raise _misfit(entry, file, folder, f"{key} {fault}")
    # Modules read old key names by version. A file without versions (safetensors) may hold either, and modules take
    # it so; only MNASNet as a whole insists on a version.
    fitting._metadata = versions or {"": expected._metadata[""]}  # type: ignore[attr-defined]
    try:
        model.load_state_dict(fitting, assign=True)
        # Half-precision checkpoints are widened once here; the extractor's precision is chosen elsewhere.
        return model.float()
    except RuntimeError as error:
        raise _misfit(entry, file, folder, str(error)) from error


def _fault(value: Tensor, expected: Tensor) -> str | None:
    """Why no model computes with ``value`` in the place of ``expected``, whatever their shapes; None if one may."""
    if value.is_meta:
        return "is a meta tensor, which has no values"
    if value.layout != torch.strided:
        return f"is not dense but {value.layout}"
    kinds = [(tensor.is_floating_point(), tensor.is_quantized) for tensor in (value, expected)]
    return f"is {value.dtype} instead of {expected.dtype}" if kinds[0] != kinds[1] else None


def _misfit(entry: ModelEntry, file: str, folder: str, reason: str) -> WeightsUnavailable:
    reason = " ".join(reason.split())[:300]
    return WeightsUnavailable(f"{file} does not fit {entry.name}: {reason}", file=file, folder=folder)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
