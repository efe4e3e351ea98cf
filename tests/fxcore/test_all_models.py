"""Models that torchvision lists: names, totals and values of each family against independent references; features and
levels of every one."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import WeightsEnum, get_model_builder, get_model_weights
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import ModelEntry, ModelGraph, build_extractor, get_model, model_graph
from fxcore.graph.levels import channels_of
from fxcore.graph.node_info import is_extractable
from fxcore.memory import give_back
from fxcore.models.weightless import weightless
from fxcore.tracing.parts import DetectorParts, FlowParts
from tests.fxcore.model_list import ALL, FAMILIES, FIXED_SIZE, KINDS, OF_FAMILIES, SMALL, each, entry_of, filled


def opened(entry: ModelEntry, model: nn.Module) -> nn.Module:
    """What of the model can be traced, under a module that calls it as the model's own forward does."""
    if entry.task == "detection":
        return DetectorParts(model, "rpn.head" if hasattr(model, "rpn") else "head").eval()
    return FlowParts(model).eval() if entry.task == "optical_flow" else model


def test_there_are_at_least_the_models_of_torchvision_0_26() -> None:
    assert len(ALL) >= 121
    assert set(ALL) == set(torchvision.models.list_models())


def test_one_of_each_family_is_tested() -> None:
    """A module of torchvision's is a family; int8 models are one."""
    modules = {name: torchvision.models.get_model_builder(name).__module__ for name in ALL}
    families = {
        name: ".".join(module.split(".")[: 3 if "quantization" in module else 4]) for name, module in modules.items()
    }
    assert {families[name] for name in FAMILIES} == set(families.values())


DIFFERENT = ("googlenet", "inception_v3", "deeplabv3_mobilenet_v3_large", "fcn_resnet50")
"""Their default weights change the structure."""
WEIGHTED = (*DIFFERENT, "resnet18", "fasterrcnn_mobilenet_v3_large_320_fpn", "vit_b_32", "quantized_googlenet")
"""Those, and some of the others, which are built with their default weights as without any."""


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
        *(pytest.param(*name.values, "random", marks=name.marks) for name in each(OF_FAMILIES)),
        *(pytest.param(*name.values, "DEFAULT", marks=name.marks) for name in each(WEIGHTED, frozenset(["googlenet"]))),
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
        assert "fpn" not in inner or any(node.startswith(f"{part}.fpn.layer_blocks") for node in there)
    if parts is not None:
        closed = {"transform"} if entry.task == "detection" else {"corr_block", "update_block"}
        assert {one.path for one in graph.untraceable} >= closed
        assert all(one.reason for one in graph.untraceable)
    if entry.is_quantized(weights.name if weights else "random"):
        give_back()  # its parameters have values


@pytest.mark.parametrize("name", each(DIFFERENT, frozenset(["googlenet"])))
def test_the_models_that_their_weights_change(name: str) -> None:
    """Listing only what untrained models have would leave out googlenet's ``cat``, which can be extracted."""
    assert model_graph(name).eval_nodes != model_graph(name, get_model(name).structure()).eval_nodes


@pytest.mark.parametrize("name", each(OF_FAMILIES, frozenset(["lraspp_mobilenet_v3_large", "swin_t"])))
def test_totals_agree_with_torch(name: str) -> None:
    entry, graph = get_model(name), model_graph(name)
    model = entry.build_weightless()
    assert graph.totals["params"] == sum(p.numel() for p in model.parameters())
    if entry.task not in ("detection", "optical_flow"):
        assert sum(n.params for n in graph.nodes) <= graph.totals["params"]
    runnable = opened(entry, model).to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        runnable(torch.zeros(1, *graph.input_shape[1:], device="meta"))
    assert graph.totals["flops"] == counter.get_total_flops()


@pytest.mark.parametrize("name", each(ALL))
def test_every_model_gives_features(name: str) -> None:
    """There are nodes to ask for, and every level is one of them, with its channels and stride."""
    graph = model_graph(name)
    extractable = {path for path, node in graph.by_name.items() if is_extractable(node)}
    assert len(extractable) > 10
    for key, level in graph.levels.items():
        assert level.node in extractable
        assert level.channels == channels_of(graph.by_name[level.node])
        assert level.stride == 2 ** int(key[1:])


def _spread(graph: ModelGraph, name: str) -> list[str]:
    names = [n.name for n in graph.nodes if n.extractable]
    levels = [level.node for level in graph.levels.values()]
    dozen = random.Random(name).sample(names, min(12, len(names)))
    return list(dict.fromkeys([names[0], *levels, *dozen, names[-1]]))


def _hooked(module: nn.Module, graph: ModelGraph, wanted: list[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What forward hooks see at the wanted nodes that are calls of leaf modules.

    A hook has no idea of the graph: it copies what a module returns at its n-th call.
    """
    nodes = [n for n in graph.graph.nodes if n.op == "call_module"]
    calls: dict[str, list[str]] = {}
    for node in nodes:
        calls.setdefault(str(node.target), []).append(node.meta["path"])
    seen: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    handles = []
    for target, paths in calls.items():
        if not set(paths) & set(wanted):
            continue

        def hook(_m: nn.Module, _i: object, output: object, target: str = target, paths: list[str] = paths) -> None:
            index = counts.get(target, 0)
            counts[target] = index + 1
            if isinstance(output, torch.Tensor):
                seen[paths[index]] = output.clone()

        handles.append(module.get_submodule(target).register_forward_hook(hook))
    with torch.no_grad():
        module(x)
    for handle in handles:
        handle.remove()
    return {name: seen[name] for name in wanted if name in seen}


@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize(
    "name", each(OF_FAMILIES, KINDS - {"lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large", "vit_b_32"})
)
def test_values_are_those_of_forward_hooks(name: str) -> None:
    entry, graph = entry_of(name), model_graph(entry_of(name))
    reference = opened(entry, filled(name))
    shape = list(graph.input_shape[1:])
    if entry.task in SMALL and not name.startswith(FIXED_SIZE):
        shape[-2:] = [SMALL[entry.task]] * 2
    elif entry.task in ("detection", "optical_flow"):
        shape[-2:] = [300, 320] if name.startswith("ssd") else [160, 192]
    torch.manual_seed(1)
    x = torch.randn(1, *shape)
    wanted = _spread(graph, name)
    modules = [n for n in wanted if graph.by_name[n].op == "call_module"]
    if len(modules) < 8:
        leaves = [n.meta["path"] for n in graph.graph.nodes if n.op == "call_module" and n.meta.get("rows")]
        modules = list(dict.fromkeys([*modules, *random.Random(name).sample(leaves, min(8, len(leaves)))]))
    expected = _hooked(reference, graph, modules, x)
    assert len(expected) >= min(4, len(modules))
    for module in reference.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False
    extractor = build_extractor(graph, reference, graph.resolve(list(dict.fromkeys([*wanted, *modules]))))
    with torch.no_grad():
        values = extractor.module(x)
    for node, value in expected.items():
        assert torch.equal(values[node], value), node
    with torch.no_grad():
        alone = build_extractor(graph, reference, graph.resolve(wanted[len(wanted) // 2 :][:1])).module(x)
    for node, value in alone.items():
        assert torch.equal(values[node], value), node
