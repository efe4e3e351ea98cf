"""Extractors' life: made once, named, failed, evicted, built again, deleted."""

import asyncio
import gc
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from fxcore.backends import BACKENDS, LoweringFailed
from fxcore.catalog import get_model
from fxcore.errors import BadTensor, DuplicateKey, UnknownModel, UnknownNode, UnknownWeights
from fxcore.graphs import kept_graphs, model_graph
from fxcore.transforms import UnknownTransform
from service.engine.errors import BackendRefused, ExtractorFailed, NameTaken, UnknownExtractor, Unsupported
from service.engine.memory import tidy
from service.engine.names import MOST_NAMES
from tests.service.engine.running import OUT_OF_MEMORY, MakeEngine, Watched, built, spec, tensors

pytestmark = pytest.mark.anyio

MiB = 1024**2


async def test_one_spec_is_one_extractor(engine: MakeEngine) -> None:
    async with engine() as running:
        nodes = ["features.8", "features.12"]
        answers = await asyncio.gather(*(running.extractor(spec(nodes=nodes), 60) for _ in range(10)))
        assert len({id(record) for record, _ in answers}) == 1
        assert [created for _, created in answers].count(True) == 1
        record = answers[0][0]
        as_map, created = await running.extractor(spec(nodes={node: node for node in nodes}), 60)
        assert (as_map, created) == (record, False)
        others = [
            spec(nodes=nodes[::-1]),
            spec(nodes={node: node + "!" for node in nodes}),
            spec(nodes=nodes, precision="bfloat16"),
            spec(nodes=nodes, image_size=160),
            spec("mobilenet_v3_large", nodes),
        ]
        made = [(await running.extractor(other, 60))[0] for other in others]
        assert len({record.id, *(other.id for other in made)}) == 6
        assert all(other.state == "ready" for other in made)
        assert running.list() == [record, *made]
        assert running.models_loaded() == {("mobilenet_v3_small", "random"), ("mobilenet_v3_large", "random")}


async def test_extractors_share_weights(engine: MakeEngine) -> None:
    async with engine() as running:
        records = [await built(running, nodes=[f"features.{i}"]) for i in (4, 8, 12)]
        first = [next(iter(record.extractor.module.parameters())).data_ptr() for record in records if record.extractor]
        assert len(first) == 3
        assert len(set(first)) == 1


async def test_image_size(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running, image_size=96)
        assert (await running.features(record, jpegs[:1])).outputs["features.12"].shape == (1, 576, 3, 3)
        described = {output.key: output for output in record.outputs}["features.12"]
        assert described.shape == [None, 576, 3, 3]
        assert described.bytes_per_image == 576 * 3 * 3 * 4
        with pytest.raises(BadTensor, match="image_size: vit_b_16 cannot take an input of 96 x 96; its usual"):
            await running.extractor(spec("vit_b_16", ["encoder"], image_size=96))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": "resnet5"}, UnknownModel),
        ({"weights": "V9"}, UnknownWeights),
        ({"nodes": ["features.99"]}, UnknownNode),
        ({"nodes": {"features.1": "a", "features.2": "a"}}, DuplicateKey),
        ({"backend": "openvino", "precision": "bfloat16"}, Unsupported),
        ({"backend": "inductor", "precision": "int8"}, Unsupported),
        ({"transforms": ["fuse"]}, UnknownTransform),
        ({"model": "vgg11"}, UnknownModel),
    ],
)
async def test_wrong_specs_leave_nothing(engine: MakeEngine, wrong: dict[str, object], error: type[Exception]) -> None:
    async with engine(models=("mobilenet_v3_small",)) as running:
        with pytest.raises(error):
            await running.extractor(spec(**wrong), 60)  # type: ignore[arg-type]
        assert running.list() == []


async def test_what_is_available_is_said(engine: MakeEngine) -> None:
    async with engine() as running:
        with pytest.raises(Unsupported, match=r"float precisions, not int8\); available: float32,") as caught:
            await running.extractor(spec(backend="inductor", precision="int8"))
    available = ["float32", "bfloat16", "float16"]
    assert caught.value.extra == {"field": "precision", "value": "int8", "available": available}


async def test_names(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, name="small")
        other = await built(running, nodes=["features.3"])
        assert running.find("small") is running.find(record.id) is record
        with pytest.raises(NameTaken) as caught:
            await running.extractor(spec(nodes=["features.5"], name="small"), 60)
        assert caught.value.extra["extractor"] == record.id
        with pytest.raises(NameTaken):
            await running.extractor(spec(nodes=["features.3"], name="small"), 60)
        with pytest.raises(NameTaken):
            await running.extractor(spec(nodes=["features.3"], name=record.id), 60)
        assert running.list() == [record, other]
        again, created = await running.extractor(spec(name="another"), 60)
        assert (again, created) == (record, False)
        assert running.find("another") is running.find("small") is record
        with pytest.raises(UnknownExtractor) as unknown:
            running.find("smal")
        assert unknown.value.extra["suggestions"] == ["small"]
        await running.delete("small")
        for gone in ("small", "another", record.id):
            with pytest.raises(UnknownExtractor) as unknown:
                running.find(gone)
            assert gone not in unknown.value.extra["suggestions"]
        assert (await built(running, nodes=["features.5"], name="small")).name == "small"


async def test_an_extractor_keeps_its_latest_names(engine: MakeEngine) -> None:
    """Clients go on with the name that each gave; what names one again and again takes no more for it."""
    async with engine() as running:
        other = await built(running, nodes=["features.3"], name="other")
        record = await built(running)
        names = [f"name-{number}" for number in range(MOST_NAMES + 3)]
        for name in [*names, names[3]]:
            assert (await running.extractor(spec(name=name)))[0] is record
            assert record.name == name
        assert [running.known(name) for name in names] == [None] * 3 + [record] * MOST_NAMES
        assert running.known("other") is other
        await running.extractor(spec(name="another"))
        assert [running.known(names[3]), running.known(names[4])] == [record, None]
        with pytest.raises(UnknownExtractor):
            running.find(names[0])
        assert (await running.extractor(spec(nodes=["features.3"], name=names[0])))[0] is other


async def test_what_failed_gives_up_its_name(engine: MakeEngine) -> None:
    async with engine() as running:
        failed, _ = await running.extractor(spec(weights="file:none.pth", name="first"), 60)
        await running.extractor(spec(weights="file:none.pth", name="mine"), 60)
        assert (failed.state, failed.name) == ("failed", "mine")
        record = await built(running, name="mine")
        assert running.find("mine") is record
        assert (failed.name, running.find("first")) == ("first", failed)
        with pytest.raises(NameTaken):
            await running.extractor(spec(weights="file:none.pth", name="mine"), 60)
        with pytest.raises(NameTaken):  # an id is no name that could be given up
            await running.extractor(spec(name=failed.id), 60)
        await running.delete("mine")
        await built(running, name="first")
        assert (failed.name, running.find(failed.id)) == (None, failed)


async def test_deleting_lets_requests_finish(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running)
        watched = Watched(record)
        watched.open.clear()
        task = asyncio.create_task(running.features(record, jpegs))
        await asyncio.to_thread(watched.entered.wait, 10)
        await running.delete(record.id)
        assert running.models_loaded() == set()
        watched.open.set()
        assert (await task).images == 3


async def test_a_failed_build_is_told_and_tried_again(engine: MakeEngine, tmp_path: Path, jpegs: list[bytes]) -> None:
    async with engine(weights_dir=tmp_path) as running:
        wanted = spec(weights="file:mine.pth")
        record, created = await running.extractor(wanted, 60)
        assert (record.state, created) == ("failed", True)
        assert isinstance(record.problem, UnknownWeights)
        with pytest.raises(UnknownWeights):
            await running.features(record, jpegs)
        torch.manual_seed(3)
        torch.save(get_model("mobilenet_v3_small").builder(weights=None).state_dict(), tmp_path / "mine.pth")
        record, created = await running.extractor(wanted, 60)
        assert (record.state, created, record.problem) == ("ready", False, None)
        assert (await running.features(record, jpegs)).images == 3


@pytest.mark.parametrize(
    ("precision", "cause", "told"), [("float32", ValueError, ExtractorFailed), ("int8", LoweringFailed, BackendRefused)]
)
async def test_a_failed_build_keeps_nothing_in_memory(
    engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    cause: type[Exception],
    told: type[Exception],
) -> None:
    """What it had built goes at once, and its model with the budget's next eviction."""
    built_over: list[weakref.ref[torch.nn.Module]] = []

    def fail(module: torch.nn.Module, *rest: object) -> None:
        built_over.append(weakref.ref(module))
        raise cause("no such operation")

    monkeypatch.setattr(BACKENDS["eager"], "lower", fail)
    monkeypatch.setattr("service.engine.extractors.log.exception", lambda *said: None)  # pytest keeps what is logged
    async with engine() as running:
        record, _ = await running.extractor(spec(precision=precision, backend="eager"), 60)
        assert isinstance(record.problem, told)
        for _ in range(100):  # the thread that failed may be about to let go of it
            gc.collect()
            if built_over[0]() is None:
                break
            await asyncio.sleep(0.02)
        assert [module() for module in built_over] == [None]
        (model,) = running._extractors._models.loaded().values()
        weights = weakref.ref(model.module)
        del model
        running._extractors._memory_budget = 1
        running.make_room()
        tidy()
        assert weights() is None
        assert "no such operation" in record.problem.detail


async def test_a_failed_build_keeps_no_request(engine: MakeEngine) -> None:
    """The problem is told to each anew; raised itself, it would keep the images of the last one."""
    async with engine() as running:
        record, _ = await running.extractor(spec(weights="file:mine.pth"), 60)
        sent = tensors(0)
        images = weakref.ref(sent["x"])
        for _ in range(2):
            with pytest.raises(UnknownWeights) as caught:
                await running.features(record, sent)
            assert (caught.value.detail, caught.value.extra) == (record.problem.detail, record.problem.extra)
        del sent, caught
        gc.collect()
        assert images() is None
        assert record.problem.__traceback__ is None


async def test_features_wait_for_the_build(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record, _ = await running.extractor(spec("resnet18", ["layer4"]), 0)
        assert record.state == "building"
        assert (await running.features(record, jpegs)).images == 3
        assert record.state == "ready"


async def test_eviction(engine: MakeEngine, no_graphs: None, jpegs: list[bytes]) -> None:
    """Of resnet18 (45 MiB, and 42 folded), squeezenet (5) and mobilenet (10 and 4) two fit; the oldest goes."""
    large, small, third = ("resnet18", "random"), ("squeezenet1_1", "random"), ("mobilenet_v3_small", "random")
    async with engine(memory_budget=103 * MiB) as running:
        records = {
            large: await built(running, "resnet18", ["layer4"]),
            small: await built(running, "squeezenet1_1", ["features.12"]),
        }
        assert running.models_loaded() == {large, small}
        expected = (await running.features(records[large], jpegs)).outputs["layer4"]
        records[third] = await built(running)
        assert running.models_loaded() == {large, third}
        await running.features(records[small], jpegs)
        assert running.models_loaded() == {small, third}
        assert records[large].run is None
        assert running.find(records[large].id) is records[large]
        again = (await running.features(records[large], jpegs)).outputs["layer4"]
        assert_close(again, expected, rtol=1e-5, atol=1e-5)
        assert running._extractors.bytes() <= 103 * MiB
        for record in records.values():
            assert record.state == "ready"
            assert record.outputs


async def test_graphs_are_kept_under_the_budget(
    engine: MakeEngine, no_graphs: None, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was only listed goes first, what an extractor is of stays; what is gone is traced again, to the same."""
    async with engine() as running:
        pinned = await built(running, "squeezenet1_1", ["features.3"], image_size=96)
        other = await built(running, "resnet18", ["layer4"])
        expected = (await running.features(other, jpegs[:1])).outputs["layer4"]  # what runs packs its weights
        taken = running._extractors.bytes()
        listed = [model_graph(model) for model in ("mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5")]
        maps = model_graph("vit_b_32").with_nodes_of("attention_maps")
        listed.append(model_graph("vit_b_32"))
        assert running._extractors.bytes() == taken + maps.bytes + sum(graph.bytes for graph in listed)
        pinned.pinned = True
        own = [model_graph("squeezenet1_1"), model_graph("resnet18")]
        model_graph("mobilenet_v3_small")  # used last

        budget = taken + listed[0].bytes
        monkeypatch.setattr("service.engine.extractors.GRAPH_SHARE", listed[0].bytes / budget)
        running._extractors._memory_budget = budget
        running.make_room()
        assert kept_graphs() == [*own, listed[0]]
        assert other.run is not None

        running._extractors._memory_budget = 1
        running.make_room()
        assert kept_graphs() == own[:1]
        assert (other.run, other.held) == (None, None)
        assert pinned.run is not None

        running._extractors._memory_budget = taken
        again = (await running.features(other, jpegs[:1])).outputs["layer4"]
        assert_close(again, expected, rtol=1e-5, atol=1e-5)
        assert other.held is model_graph("resnet18") is not own[1]
        assert other.fingerprint == own[1].fingerprint
        assert running._extractors.bytes() == taken


async def test_what_is_in_use_or_pinned_stays(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine(memory_budget=1) as running:
        record, _ = await running.extractor(spec(), 60)
        assert running.models_loaded() == set()
        with record.in_use():
            await running.load(record)
            watched = Watched(record)
            watched.open.clear()
            task = asyncio.create_task(running.features(record, jpegs))
            await asyncio.to_thread(watched.entered.wait, 10)
        await built(running, "squeezenet1_1", ["features.12"])
        assert running.models_loaded() == {("mobilenet_v3_small", "random")}
        record.pinned = True
        watched.open.set()
        await task
        await built(running, "squeezenet1_1", ["features.3"])
        assert running.models_loaded() == {("mobilenet_v3_small", "random")}


async def test_what_was_in_use_goes_once_it_is_not(engine: MakeEngine) -> None:
    """Though nothing is built any more that would have to make room for itself."""
    async with engine(memory_budget=1) as running:
        record, _ = await running.extractor(spec())
        with record.in_use():
            await running.load(record)
        assert running.models_loaded() == {("mobilenet_v3_small", "random")}
        deadline = time.monotonic() + 20
        while running.models_loaded() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert running.models_loaded() == set()
        assert record.run is None


async def test_extractors_over_a_model_in_use_are_evicted_one_by_one(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        records = [await built(running, nodes=[f"features.{i}"]) for i in range(1, 12)]
        running._extractors._memory_budget = running._extractors.bytes()
        with records[-1].in_use():
            await built(running, nodes=["features.12"])
            assert records[0].run is None
            assert all(record.run is not None for record in records[-3:])
            assert running._extractors.bytes() <= running._extractors._memory_budget
        assert (await running.features(records[0], jpegs)).images == 3


async def test_preload(engine: MakeEngine) -> None:
    async with engine(
        preload="mobilenet_v3_small@random:C4,features.12=top;squeezenet1_1@random:features.3"
    ) as running:
        ready, reason = running.readiness()
        assert not ready
        assert reason == "the service is starting"
        deadline = time.monotonic() + 60
        while not running.readiness()[0]:
            assert time.monotonic() < deadline, running.readiness()
            await asyncio.sleep(0.02)
        assert [record.pinned for record in running.list()] == [True, True]
        assert list(running.list()[0].return_nodes) == ["C4", "top"]
        _, created = await running.extractor(spec(nodes={"C4": "C4", "features.12": "top"}))
        assert not created


@pytest.mark.parametrize("preload", ["mobilenet_v3_small", "resnet5@random:C4", "squeezenet1_1@random:layer9"])
async def test_a_preload_that_fails_is_never_ready(engine: MakeEngine, preload: str) -> None:
    async with engine(preload=preload) as running:
        deadline = time.monotonic() + 60
        while "failed" not in running.readiness()[1]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        ready, reason = running.readiness()
        assert not ready
        assert preload in reason


async def test_the_loop_goes_on_while_extractors_are_built(engine: MakeEngine) -> None:
    """Tracing and loading hold the interpreter now and then, never the event loop: it turns all the time."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    async with engine() as running:
        counter = asyncio.create_task(count())
        started = time.monotonic()
        await built(running, "efficientnet_b2", ["features.7"])
        spent = time.monotonic() - started
        counter.cancel()
    assert turns > spent / 0.005 / 10


FIFTY = """
import asyncio, gc, json
from service.engine import Engine
from service.schemas import ExtractorSpec
from service.settings import Settings

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main():
    engine = Engine(Settings(device="cpu", preload=()))
    await engine.start()
    before = resident()
    graph = None
    sizes = []
    for count in (1, 50):
        while len(engine.list()) < count:
            nodes = ["layer4"] if graph is None else [graph[-3 - len(engine.list())], graph[-90]]
            spec = ExtractorSpec(model="resnet50", weights="random", return_nodes=nodes)
            record, _ = await engine.extractor(spec, 60)
            assert record.state == "ready", record.problem
            graph = [node.name for node in record.graph.nodes if node.extractable]
        sizes.append(resident())
    nodes = sum(len(r.extractor.module.graph.nodes) for r in engine.list()[1:])
    print(json.dumps({"before": before, "one": sizes[0], "fifty": sizes[1], "node": (sizes[1] - sizes[0]) / nodes}))
    await engine.close()

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures resident memory as Linux tells it")
async def test_fifty_extractors_cost_little_more_than_one() -> None:
    done = subprocess.run([sys.executable, "-c", FIFTY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    weights = 25_557_032 * 4
    assert measured["one"] - measured["before"] > 0.9 * weights
    # Against what the first one added, not against a process that holds torch as well.
    assert measured["fifty"] - measured["before"] < 1.3 * (measured["one"] - measured["before"])


async def test_bad_specs_cannot_take_the_memory(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.extractors.REMEMBERED_RECORDS", 4)
    async with engine() as running:
        good = await built(running, "squeezenet1_1", ["features.3"])
        named = await built(running, "squeezenet1_1", ["features.5"], name="kept")
        await running.unload("kept")
        for number in range(12):
            name = f"bad-{number}" if number % 2 else None
            record, created = await running.extractor(spec(weights=f"file:{number}.pth", name=name), 60)
            assert created
            assert record.state == "failed"
        remembered = [record.spec.weights for record in running.list()]
        assert remembered == ["random", "random", *(f"file:{number}.pth" for number in range(8, 12))]
        assert (await running.features(good, {"x": torch.zeros(1, 3, 64, 64)})).images == 1
        assert running.find("kept").id == named.id
        found = [running.known(f"bad-{number}") is not None for number in range(1, 12, 2)]
        assert found == [False] * 4 + [True] * 2
        with pytest.raises(UnknownExtractor) as unknown:
            running.find("bad-1")
        assert set(unknown.value.extra["suggestions"]) == {"bad-9", "bad-11"}
        assert (await built(running, name="bad-1")).name == "bad-1"
        _, created = await running.extractor(spec(weights="file:0.pth"), 60)  # a forgotten one is made anew
        assert created


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_too_little_memory_is_no_fault_of_the_transforms(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none_left(*args: object) -> None:
        raise error

    monkeypatch.setattr("service.engine.transforming.verify", none_left)
    async with engine() as running:
        record, _ = await running.extractor(spec(transforms=["fuse_conv_bn"]), 60)
    assert isinstance(record.problem, ExtractorFailed)
    assert str(error) in record.problem.detail
