"""torch.fx for vision models: trace, inspect, extract features, rewrite, measure, compile, export.

A model is traced once, without weights, to a :class:`ModelGraph` whose nodes have torchvision's names. From the graph
and a model with weights, an :class:`Extractor` is built, which returns the values of chosen nodes. Graph passes are in
:mod:`fxcore.transforms`, file formats in :mod:`fxcore.exports`, compilers in :mod:`fxcore.backends`.

From a model's name and a photograph to features:

>>> import torch
>>> from fxcore import build_extractor, get_model, load_model, model_graph
>>> from fxcore.photos import photos
>>> entry = get_model("squeezenet1_1")
>>> graph = model_graph(entry)
>>> extractor = build_extractor(graph, load_model(entry, "random"), graph.resolve({"features.5": "early"}))
>>> image = entry.preprocessing().image(photos()[0])[None]
>>> with torch.inference_mode():
...     features = extractor.module(image)
>>> extractor.outputs[0].node, features["early"].shape
('features.5', torch.Size([1, 128, 27, 27]))
"""

from fxcore.analysis.profile import profile
from fxcore.analysis.verify import verify
from fxcore.edits import Edit
from fxcore.errors import FxError
from fxcore.extractor import Extractor, OutputInfo, build_extractor
from fxcore.graph.levels import Level
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.graph.node_info import NodeInfo
from fxcore.images.files import open_image
from fxcore.images.preprocessing import Preprocessing
from fxcore.int8.quantize import quantize
from fxcore.models.catalog import get_model, list_models
from fxcore.models.entry import ModelEntry, WeightsInfo
from fxcore.models.user_models import UserModel
from fxcore.models.weights import load_model
from fxcore.module_extractor import create_extractor
from fxcore.rendering.render import render
from fxcore.tensors import TensorSpec
from fxcore.toolbox.health import check_health
from fxcore.toolbox.transformer import Transformer
from fxcore.tracing.interpreter import Interpreter
from fxcore.tracing.tracer import trace
from fxcore.transforms import apply_transforms, list_transforms

__all__ = [
    "Edit",
    "Extractor",
    "FxError",
    "Interpreter",
    "Level",
    "ModelEntry",
    "ModelGraph",
    "NodeInfo",
    "OutputInfo",
    "Preprocessing",
    "TensorSpec",
    "Transformer",
    "UserModel",
    "WeightsInfo",
    "apply_transforms",
    "build_extractor",
    "check_health",
    "create_extractor",
    "get_model",
    "list_models",
    "list_transforms",
    "load_model",
    "model_graph",
    "open_image",
    "profile",
    "quantize",
    "render",
    "trace",
    "verify",
]
