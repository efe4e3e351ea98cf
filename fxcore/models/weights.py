"""Load models with published weights, weights from a file, or ``random``: the library's initialisation with seed 0."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from fxcore.errors import BadArgument, BadTensor, summarize
from fxcore.layer_types import has_inplace_setting
from fxcore.models.entry import RANDOM, ModelEntry, WeightsInfo
from fxcore.models.state_dicts import FILE_PREFIX, read_file


def load_model(entry: ModelEntry, weights: str, weights_dir: Path | None = None) -> nn.Module:
    """Build a new model on the CPU, in eval mode and its own dtype, load ``weights``, and turn off in-place modules.

    Weights from a file are loaded into the model that its library builds without weights. GoogLeNet and Inception then
    do not transform their input (``transform_input``), unlike with published weights.

    Args:
        entry: the model.
        weights: a canonical name (:meth:`ModelEntry.canonical_weights`).
        weights_dir: the folder of ``file:NAME``.

    Raises:
        WeightsUnavailable: the file is missing and cannot be downloaded, is damaged, or does not match the model.
        UnknownWeights: the model has no such weights, or ``file:NAME`` is not in ``weights_dir``.
        BadArgument: ``entry`` is not a :class:`ModelEntry`, or ``weights`` is not a string.

    >>> import torch
    >>> from fxcore import get_model
    >>> one, other = (load_model(get_model("squeezenet1_1"), "random") for _ in range(2))
    >>> all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
    True
    >>> one.training, any(getattr(m, "inplace", False) for m in one.modules())
    (False, False)
    """
    if not isinstance(entry, ModelEntry):
        raise BadArgument(f"weights are loaded into a model entry from get_model, not into {entry!r:.100}")
    if not isinstance(weights, str):
        raise BadArgument(f"weights are named by text such as 'random', not by {weights!r:.100}")
    weights = entry.canonical_weights(weights)
    if weights == RANDOM:
        model = entry.build()
    elif weights.startswith(FILE_PREFIX):
        name = weights.removeprefix(FILE_PREFIX)
        state = read_file(name, weights_dir)  # checks that the name is in the folder
        model = entry.filled(RANDOM, state, Path(str(weights_dir), name))
    else:
        model = entry.load_published(weights)
    return _frozen(model)


def sized_model(entry: ModelEntry, model: nn.Module, structure: str) -> nn.Module:
    """Build a model for the size of ``entry`` with the weights of ``model``; see :meth:`ModelEntry.sized`.

    Args:
        entry: an entry from :meth:`ModelEntry.at`.
        model: a model from :func:`load_model`, possibly moved and cast.
        structure: the weights that determine the structure of ``model``.

    Raises:
        BadTensor: the weights cannot be adapted to that size.
    """
    try:
        made = _frozen(entry.sized(model, structure))
    except Exception as error:  # libraries reject weights with all kinds of exceptions
        height, width = entry.input_size or (0, 0)
        usual = " x ".join(map(str, entry.preprocessing(structure).nominal_size()))
        resized = re.findall(r"size mismatch for ([\w.]+)", str(error))
        why = (
            f"its library has no way to resample {resized[0]}" if resized else " ".join(summarize(error).split())[:300]
        )
        raise BadTensor(
            f"image_size: the weights of {entry.name} cannot be adapted to {height} x {width}: {why}; ask for its "
            f"usual size, {usual}"
        ) from error
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    return made if like is None else made.to(like.device, like.dtype)


def _frozen(model: nn.Module) -> nn.Module:
    """Prepare ``model`` for inference: eval mode, no gradients, and no in-place modules."""
    model.eval().requires_grad_(False)
    for module in model.modules():
        # An in-place ReLU would overwrite a tensor that an extractor returns.
        if has_inplace_setting(module):
            module.inplace = False  # type: ignore[assignment]
    return model


def download_weights(entry: ModelEntry, weights: str) -> None:
    """Download the file of published ``weights`` unless it is cached; do nothing for other weights.

    Raises:
        WeightsUnavailable: the file cannot be downloaded.
    """
    info = entry.published.get(weights)
    if info is not None:
        info.download()


def missing_weights(entry: ModelEntry, weights: str) -> WeightsInfo | None:
    """Return the published ``weights`` if their file is not cached, else None.

    >>> from fxcore import get_model
    >>> missing_weights(get_model("squeezenet1_1"), "random") is None
    True
    """
    info = entry.published.get(weights)
    return info if info is not None and not info.cached else None
