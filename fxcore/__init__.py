"""fxcore: everything torch.fx is for, for vision models.

A model is traced once without weights into a :class:`ModelGraph`; its nodes carry torchvision's names. From the graph
and a model with weights comes an :class:`Extractor` that returns the nodes that were asked for.
"""

from fxcore.catalog import ModelEntry, WeightsInfo, get_model, list_models
from fxcore.errors import FxError
from fxcore.extractor import Extractor, OutputInfo, build_extractor
from fxcore.graphs import ModelGraph, NodeInfo, TensorSpec, model_graph
from fxcore.images import Preprocessing, open_image
from fxcore.levels import Level
from fxcore.tracing import trace
from fxcore.user_models import UserModel
from fxcore.weights import load_model

__all__ = [
    "Extractor",
    "FxError",
    "Level",
    "ModelEntry",
    "ModelGraph",
    "NodeInfo",
    "OutputInfo",
    "Preprocessing",
    "TensorSpec",
    "UserModel",
    "WeightsInfo",
    "build_extractor",
    "get_model",
    "list_models",
    "load_model",
    "model_graph",
    "open_image",
    "trace",
]
