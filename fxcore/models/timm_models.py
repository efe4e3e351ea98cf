"""timm's models, read from its registry: ``timm.ARCHITECTURE``, with pretrained tags as names of weights.

timm is imported when its models are first requested, since the import takes seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
from torch import nn

from fxcore.copies import narrowed
from fxcore.errors import UnknownModel, Unsupported
from fxcore.images.sizes import ImageSize
from fxcore.images.timm_preprocessing import TimmPreprocessing
from fxcore.models.entry import RANDOM, FeatureMap, ModelEntry, WeightsInfo
from fxcore.models.hub import HubWeights
from fxcore.models.state_dicts import damaged, misfit
from fxcore.models.weightless import assigning, building, weightless

PREFIX = "timm."
"""Prefix of the names of timm's models."""


# Their forward has a mask argument. A trace makes it a proxy, which is not None, so timm's own graphs cannot run.
_WITH_MASKS = ("hiera_", "gemma4_vit_")


@dataclass(frozen=True)
class TimmEntry(ModelEntry):
    """A timm model.

    >>> entry = timm_model("timm.vit_small_patch14_dinov2")
    >>> entry.weights, entry.default_weights
    (('lvd142m',), 'lvd142m')
    >>> entry.preprocessing().describe()["crop_size"], entry.preprocessing().describe()["interpolation"]
    ([518, 518], 'bicubic')
    """

    @property
    def architecture(self) -> str:
        """The name in timm."""
        return self.name.removeprefix(PREFIX)

    @property
    def one_size(self) -> bool:
        return bool(self._config(RANDOM).fixed_input_size)

    def sized(self, model: nn.Module, structure: str) -> nn.Module:
        """Build the model as timm does with ``img_size``; timm's checkpoint filter resamples the weights."""
        try:
            with building(), weightless():
                return self._sized(model, structure)
        except RuntimeError:  # see build_weightless
            return self._sized(model, structure)

    def _sized(self, model: nn.Module, structure: str) -> nn.Module:
        state = dict(model.state_dict())
        with building(), assigning(state):
            built = _traceable(
                _timm().create_model(
                    self._variant(structure),
                    pretrained=True,
                    pretrained_cfg_overlay={"state_dict": state},
                    img_size=self.input_size,
                ),
                self.architecture,
            ).eval()
        if any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
            raise RuntimeError(f"timm's filter of checkpoints leaves out weights of {self.architecture}")
        return built

    def preprocessing(self, weights: str = "DEFAULT", image_size: ImageSize | None = None) -> TimmPreprocessing:
        config = _timm().data.resolve_data_config(pretrained_cfg=self._config(weights).to_dict())
        return TimmPreprocessing(config, image_size)

    def build_weightless(self, weights: str = RANDOM) -> nn.Module:
        try:
            return super().build_weightless(weights)
        except RuntimeError:  # Swin v2 and ViTamin compute with their parameters while they are built
            return self.build(weights)

    def load_published(self, weights: str) -> nn.Module:
        info = self.published[weights]
        info.download()
        file = info.file
        try:
            with safetensors.safe_open(file, "pt") if file.suffix == ".safetensors" else contextlib.nullcontext():
                pass  # raise SafetensorError for a damaged file, rather than a misfit below
            with building():
                model: nn.Module = _timm().create_model(
                    self._variant(weights), pretrained=True, pretrained_cfg_overlay={"file": str(file)}
                )
                return model.eval()
        except (safetensors.SafetensorError, pickle.UnpicklingError, OSError, EOFError) as error:
            raise damaged(file, error) from error
        except (RuntimeError, KeyError, ValueError, AttributeError) as error:
            raise misfit(self.name, file, str(error)) from error

    def leaf_modules(self) -> Sequence[type[nn.Module] | str]:
        """Return timm's own leaf modules, which replace torchvision's, and modules that cannot be traced."""
        return (*_timm().models.get_notrace_modules(), "auto")

    def leaf_functions(self) -> Sequence[Callable[..., Any]]:
        found = _timm().models.get_notrace_functions()
        return [function for function in found if callable(function)]

    def feature_maps(self, model: nn.Module) -> Sequence[FeatureMap]:
        info: Any = getattr(model, "feature_info", None) or ()
        found = info.get_dicts() if hasattr(info, "get_dicts") else info
        return [FeatureMap(f["module"], f["num_chs"], f["reduction"]) for f in found if f.get("module")]

    def _structure(self, weights: str) -> dict[str, Any]:
        sized = {} if self.input_size is None else {"img_size": self.input_size}
        return {"variant": self._variant(weights), **sized}

    def _variant(self, weights: str) -> str:
        return f"{self.architecture}.{weights}" if weights in self.published else self.architecture

    def _config(self, weights: str) -> Any:
        """Return timm's ``PretrainedCfg`` of ``weights``, or of the architecture's default weights."""
        return _timm().get_pretrained_cfg(self._variant(weights))


def installed() -> bool:
    """Return whether timm is installed, without importing it."""
    try:
        return importlib.util.find_spec("timm") is not None
    except ValueError:  # it is None in sys.modules
        return False


def imported() -> bool:
    """Return whether timm's models were listed before, so that listing them again takes no time."""
    return timm_models.cache_info().currsize > 0


def timm_model(name: str) -> TimmEntry:
    """Return the model called ``name``, which begins with :data:`PREFIX`.

    Raises:
        UnknownModel: timm has no model of that name; the error suggests similar names.
        Unsupported: timm is not installed.
    """
    registry = timm_models()
    if name in registry:
        return registry[name]
    architecture, _, tag = name.removeprefix(PREFIX).partition(".")
    if tag and PREFIX + architecture in registry:
        known = registry[PREFIX + architecture]
        raise UnknownModel(
            f"there is no model {name!r}: ask for model {known.name} with "
            + (f"weights={tag}" if tag in known.weights else f"weights {', '.join((*known.weights, RANDOM))}"),
            name=name,
            suggestions=[known.name],
        )
    suggestions = difflib.get_close_matches(name, registry, n=5, cutoff=0.5)
    hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; see the list of models"
    raise UnknownModel(f"there is no model {name!r}{hint}", name=name, suggestions=suggestions)


@functools.cache
def timm_models() -> dict[str, TimmEntry]:
    """Return all of timm's models, by name.

    Raises:
        Unsupported: timm is not installed.
    """
    names = _timm().list_models()
    return {PREFIX + name: _entry(name) for name in sorted(names)}


@functools.cache
def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise Unsupported(
            "models of timm need timm, which is not installed here; pip install 'fxserve[timm]'",
            field="model",
            value="timm",
            available=[],
        ) from error
    return timm


def _entry(architecture: str) -> TimmEntry:
    timm = _timm()
    configs = timm.models.get_arch_pretrained_cfgs(architecture)
    published = {c.tag: _weights(c) for c in configs.values() if c.tag and (c.url or c.hf_hub_id)}
    default = timm.get_pretrained_cfg(architecture)
    tag = default.tag if default is not None and default.tag in published else next(iter(published), None)
    return TimmEntry(PREFIX + architecture, "classification", _build, published, tag)


def _weights(config: Any) -> WeightsInfo:
    if config.hf_hub_id:
        files = {"repository": config.hf_hub_id, "filename": config.hf_hub_filename}
        return HubWeights(config.tag, "", None, {}, (), config.num_classes, **files)
    return WeightsInfo(config.tag, config.url, None, {}, (), config.num_classes)


def _build(weights: None = None, variant: str = "", **arguments: Any) -> nn.Module:
    """Build a timm model. ``weights`` is unused; entries pass it since torchvision's builders require it."""
    return _traceable(_timm().create_model(variant, pretrained=False, **arguments), variant)


def _traceable(model: nn.Module, architecture: str) -> nn.Module:
    return narrowed(model, ["x"]) if architecture.startswith(_WITH_MASKS) else model
