"""CUDA graphs: eager's values, whatever runs between and beside them, in memory that they share."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, Lowered, LoweringFailed, Options
from fxcore.memory import give_back

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CUDA = torch.device("cuda", 0)
MODEL = "resnet18"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_model(get_model(MODEL), "random").to(CUDA)


def lowered(model: torch.nn.Module, *nodes: str) -> tuple[torch.fx.GraphModule, Lowered]:
    graph = model_graph(MODEL)
    module = build_extractor(graph, model, graph.resolve(list(nodes))).module
    example = (torch.rand(2, 3, 224, 224, device=CUDA),)
    return module, BACKENDS["cudagraphs"].lower(module, example, Options())


def test_batch_sizes(model: torch.nn.Module) -> None:
    """Of captured sizes, between them, beyond the largest, and of images of another size."""
    module, run = lowered(model, "layer1", "layer4", "avgpool")
    x = torch.rand(70, 3, 224, 224, device=CUDA)
    for inputs in (x[:1], x[:5], x[:6], x[:32], x, x[:3, :, :160, :160], x[:5]):
        assert verify(module, run, inputs).relative < 1e-4


def test_answers_stay_when_others_run(model: torch.nn.Module) -> None:
    """Two extractors share the memory that they compute in."""
    first, second = lowered(model, "layer2", "layer4"), lowered(model, "layer1")
    x = torch.rand(8, 3, 224, 224, device=CUDA)
    kept = [(module, run(x[:rows]), rows) for rows in (8, 1, 3) for module, run in (first, second)]
    for module, values, rows in kept:
        with torch.inference_mode():
            expected = module(x[:rows])
        for key, value in values.items():
            assert (value - expected[key]).abs().max() < 1e-4 * expected[key].abs().max()


def test_padding_holds_nothing_of_others(model: torch.nn.Module) -> None:
    """Where the rows are indices: those of another extractor's memory would be out of range, and lose the device."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output({"y": graph.call_module("table", (graph.call_method("long", (x,)),))})
    table = torch.fx.GraphModule({"table": torch.nn.Embedding(4, 8).to(CUDA)}, graph)
    given = torch.randint(4, (8, 3), device=CUDA).float()
    looked_up = BACKENDS["cudagraphs"].lower(table, (given[:2],), Options())
    _, other = lowered(model, "layer1")
    for _ in range(2):
        other(1e9 * torch.rand(8, 3, 224, 224, device=CUDA))
        assert torch.equal(looked_up(given[:5])["y"], table(given[:5])["y"])


def test_used_again_after_the_last_was_dropped(model: torch.nn.Module) -> None:
    for _ in range(3):
        module, run = lowered(model, "layer2")
        x = torch.rand(2, 3, 224, 224, device=CUDA)
        assert verify(module, run, x).relative < 1e-4
        del module, run
        give_back()


def test_captured_beside_loading(model: torch.nn.Module) -> None:
    """Other threads load models, free them, and read values meanwhile."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def load() -> None:
        try:
            while not ended.is_set():
                other = copy.deepcopy(model).to("cpu").to(CUDA)
                next(other.parameters()).sum().item()
                del other
                torch.cuda.empty_cache()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        x = torch.rand(32, 3, 224, 224, device=CUDA)
        for nodes in (["layer1"], ["layer2", "layer3"], ["layer4"]):
            module, run = lowered(model, *nodes)
            for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
                assert verify(module, run, x[:rows]).relative < 1e-4
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_model_that_reads_values_is_refused() -> None:
    """Before it is captured: torch's allocator gives nothing back in a process in which a capture failed."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    highest = graph.call_method("item", (graph.call_method("amax", (x,)),))
    graph.output({"y": graph.call_method("mul", (x, highest))})
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(LoweringFailed, match="it reads values on the host"):
        BACKENDS["cudagraphs"].lower(module, (torch.rand(2, 3, 8, 8, device=CUDA),), Options())


def test_fifty_share_their_memory(model: torch.nn.Module) -> None:
    """Graphs of fifty extractors take little more than the one that needs most, which computes all layers and returns
    the largest of them; and all of it is given back with them."""
    give_back()
    x = torch.rand(32, 3, 224, 224, device=CUDA)
    before = reserved()
    nodes = [name for name in model_graph(MODEL).by_name if name.startswith(("layer", "relu", "bn1"))][:50]
    made = [lowered(model, nodes[0], "avgpool")]
    made[0][1](x)
    one = reserved() - before
    for name in nodes[1:]:
        made.append(lowered(model, name))
        made[-1][1](x)
    assert len(made) == 50
    assert reserved() - before < 1.3 * one
    made.clear()
    give_back()
    assert reserved() - before < 64 * 1024**2


def reserved() -> int:
    """Bytes of the device that torch holds, once it keeps none that it does not use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(CUDA)
