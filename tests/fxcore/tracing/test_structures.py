"""Every model with its default weights, and with none, has the nodes of the model that torchvision builds for these."""

from __future__ import annotations

import inspect

import pytest
from torch import nn
from torchvision.models import WeightsEnum, get_model_builder, get_model_weights
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import get_model, model_graph
from fxcore.memory import give_back
from fxcore.models.entry import weightless
from tests.fxcore.model_list import ALL, FAMILIES, SLOW, each

DIFFERENT = frozenset(("googlenet", "inception_v3", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "resnet18"))
"""Their default weights change the structure; but for the last."""


def torchvisions_own(name: str, weights: WeightsEnum | None, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """What torchvision's builder makes when it is given ``weights``, but for the values of the parameters, which are
    neither downloaded nor loaded."""
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **options: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *args, **options: None)
    builder = get_model_builder(name)
    arguments: dict[str, object] = {}
    if "weights_backbone" in inspect.signature(builder).parameters:
        arguments["weights_backbone"] = None
    if get_model(name).is_quantized(weights.name if weights else "random"):
        return builder(weights=weights, quantize=True).eval()  # its parameters are packed: they cannot be left out
    if weights is None and name.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False  # takes seconds
    with weightless():
        return builder(weights=weights, **arguments).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(pytest.param(*name.values, "random", marks=name.marks) for name in each(ALL, FAMILIES - SLOW)),
        *(pytest.param(*name.values, "DEFAULT", marks=name.marks) for name in each(ALL, DIFFERENT)),
    ],
)
def test_names_are_those_of_the_model_so_built(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = get_model_weights(name)["DEFAULT"] if asked == "DEFAULT" else None
    entry = get_model(name)
    graph = model_graph(entry, entry.structure(asked))
    model = torchvisions_own(name, weights, monkeypatch)
    # What loops over images or depends on shapes is closed to torch.fx; the parts that are not, are compared.
    parts = {"detection": ["backbone"], "optical_flow": ["feature_encoder", "context_encoder"]}.get(entry.task)
    if parts is None:
        train, evaluation = get_graph_node_names(model, suppress_diff_warning=True)
        assert graph.train_nodes == train
        assert graph.eval_nodes == evaluation
        assert graph.untraceable == []
    for part in parts or ():
        inner = get_graph_node_names(model.get_submodule(part), suppress_diff_warning=True)[1]
        # A pyramid is one node to torchvision, and open here. The path of SSD's parameter begins at the traced root.
        expected = [f"{part}.{node}" for node in inner[1:] if node not in ("fpn", "scale_weight")]
        there = set(graph.eval_nodes)
        assert [node for node in expected if node not in there] == []
    give_back()


@pytest.mark.parametrize(
    "name",
    [
        "googlenet",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                "inception_v3",
                "fcn_resnet50",
                "fcn_resnet101",
                "deeplabv3_resnet50",
                "deeplabv3_resnet101",
                "deeplabv3_mobilenet_v3_large",
            )
        ),
    ],
)
def test_the_models_that_their_weights_change(name: str) -> None:
    """Listing only what untrained models have would leave out googlenet's ``cat``, which can be extracted."""
    assert model_graph(name).eval_nodes != model_graph(name, get_model(name).structure()).eval_nodes
