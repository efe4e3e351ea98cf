"""Extractors' life: made once, named, failed, built again, deleted."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.testing import assert_close
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore.errors import BadTensor, FxError, UnknownModel, UnknownWeights
from fxcore.graph.model_graph import model_graph
from fxcore.models.catalog import get_model, register
from fxcore.models.weights import load_model
from service.engine import ExtractorRecord
from service.engine.description import Description
from service.engine.extractors import resolving
from service.engine.lifecycle.records import MAX_NAMES
from service.problems import NameTaken, NotReady, UnknownExtractor, Unsupported
from service.schemas.specs import ExtractorSpec
from tests.service.engine.running import OUT_OF_MEMORY, PATIENCE, MakeEngine, Watched, built, runtime_alone, spec, until

pytestmark = pytest.mark.anyio


async def test_one_spec_is_one_extractor(engine: MakeEngine) -> None:
    async with engine() as running:
        nodes = ["features.8", "features.12"]
        responses = await asyncio.gather(
            *(running.extractors.get(spec("mobilenet_v3_small", nodes=nodes), PATIENCE) for _ in range(10))
        )
        assert len({id(record) for record, _ in responses}) == 1
        assert [created for _, created in responses].count(True) == 1
        record = responses[0][0]
        as_map, created = await running.extractors.get(
            spec("mobilenet_v3_small", nodes={node: node for node in nodes}), PATIENCE
        )
        assert (as_map, created) == (record, False)
        others = [
            spec("mobilenet_v3_small", nodes=nodes[::-1]),
            spec("mobilenet_v3_small", nodes={node: node + "!" for node in nodes}),
            spec("mobilenet_v3_small", nodes=nodes, precision="bfloat16"),
            spec("mobilenet_v3_small", nodes=nodes, image_size=160),
            spec("mobilenet_v3_large", nodes),
        ]
        made = [(await running.extractors.get(other, PATIENCE))[0] for other in others]
        assert len({record.id, *(other.id for other in made)}) == 6
        assert all(other.state == "ready" for other in made)
        assert running.records.list() == [record, *made]
        assert running.models.loaded_weights() == {("mobilenet_v3_small", "random"), ("mobilenet_v3_large", "random")}


async def test_a_spec_in_use_is_not_resolved_again_among_many(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_REMEMBERED_SPECS", 2)
    resolve, resolved = resolving.resolve, []

    def counting(spec: ExtractorSpec, *others: Any) -> Description:
        resolved.extend(spec.return_nodes)
        return resolve(spec, *others)

    monkeypatch.setattr(resolving, "resolve", counting)
    async with engine() as running:
        for node in ("features.1", "features.2", "features.1", "features.3", "features.1", "features.2"):
            await running.extractors.get(spec(nodes=[node]))
    assert resolved == ["features.1", "features.2", "features.3", "features.2"]


async def test_extractors_share_weights(engine: MakeEngine) -> None:
    async with engine() as running:
        records = [await built(running, nodes=[f"features.{i}"]) for i in (4, 8, 12)]
        first = [next(iter(record.runtime.extractor.module.parameters())).data_ptr() for record in records]
        assert len(first) == 3
        assert len(set(first)) == 1


async def test_image_size(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", image_size=96)
        assert (await running.features(record, jpegs[:1])).outputs["features.12"].shape == (1, 576, 3, 3)
        described = {output.key: output for output in record.outputs}["features.12"]
        assert described.shape == [None, 576, 3, 3]
        assert described.bytes_per_image == 576 * 3 * 3 * 4
        with pytest.raises(BadTensor, match=r"image_size: vit_b_16 cannot take .* 100 x 100: height and width are"):
            await running.extractors.get(spec("vit_b_16", ["encoder"], image_size=100))


async def test_suggestions_are_served_models(engine: MakeEngine) -> None:
    async with engine(models=("mobilenet_v3_*", "alexnet")) as running:
        with pytest.raises(UnknownModel, match=r"; served: alexnet, mobilenet_v3_\*; did you mean mob") as caught:
            await running.extractors.get(spec("mobilenet_v2"))
        assert set(caught.value.extra["suggestions"][:2]) == {"mobilenet_v3_small", "mobilenet_v3_large"}


async def test_wrong_specs_leave_nothing(engine: MakeEngine) -> None:
    async with engine() as running:
        for wrong in ({"model": "resnet5"}, {"nodes": ["features.99"]}, {"transforms": ["fuse"]}):
            with pytest.raises(FxError):
                await running.extractors.get(spec(**wrong), PATIENCE)
        assert running.records.list() == []


async def test_what_is_available_is_said(engine: MakeEngine) -> None:
    async with engine() as running:
        with pytest.raises(Unsupported, match=r"float precisions, not int8\); available: float32,") as caught:
            await running.extractors.get(spec(backend="inductor", precision="int8"))
    available = ["float32", "bfloat16", "float16"]
    assert caught.value.extra == {"field": "precision", "value": "int8", "available": available}


async def test_names(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, name="small")
        other = await built(running, nodes=["features.3"])
        assert running.records.find("small") is running.records.find(record.id) is record
        with pytest.raises(NameTaken) as caught:
            await running.extractors.get(spec(nodes=["features.5"], name="small"), PATIENCE)
        assert caught.value.extra["extractor"] == record.id
        with pytest.raises(NameTaken):
            await running.extractors.get(spec(nodes=["features.3"], name="small"), PATIENCE)
        with pytest.raises(NameTaken):
            await running.extractors.get(spec(nodes=["features.3"]).model_copy(update={"name": record.id}), PATIENCE)
        assert running.records.list() == [record, other]
        again, created = await running.extractors.get(spec(name="another"), PATIENCE)
        assert (again, created) == (record, False)
        assert running.records.find("another") is running.records.find("small") is record
        with pytest.raises(UnknownExtractor) as unknown:
            running.records.find("smal")
        assert unknown.value.extra["suggestions"] == ["small"]
        await running.extractors.delete("small")
        for gone in ("small", "another", record.id):
            with pytest.raises(UnknownExtractor) as unknown:
                running.records.find(gone)
            assert gone not in unknown.value.extra["suggestions"]
        assert (await built(running, nodes=["features.5"], name="small")).name == "small"


async def test_an_extractor_keeps_its_latest_names(engine: MakeEngine) -> None:
    """Clients go on with the name that each gave; what names one again and again takes no more for it."""
    async with engine() as running:
        other = await built(running, nodes=["features.3"], name="other")
        record = await built(running)
        names = [f"name-{number}" for number in range(MAX_NAMES + 3)]
        for name in [*names, names[3]]:
            assert (await running.extractors.get(spec(name=name)))[0] is record
            assert record.name == name
        assert [running.records.known(name) for name in names] == [None] * 3 + [record] * MAX_NAMES
        assert running.records.known("other") is other
        await running.extractors.get(spec(name="another"))
        assert [running.records.known(names[3]), running.records.known(names[4])] == [record, None]
        with pytest.raises(UnknownExtractor):
            running.records.find(names[0])
        assert (await running.extractors.get(spec(nodes=["features.3"], name=names[0])))[0] is other


async def test_what_failed_gives_up_its_name(engine: MakeEngine) -> None:
    async with engine() as running:
        failed, _ = await running.extractors.get(spec(weights="file:none.pth", name="first"), PATIENCE)
        await running.extractors.get(spec(weights="file:none.pth", name="mine"), PATIENCE)
        assert (failed.state, failed.name) == ("failed", "mine")
        record = await built(running, name="mine")
        assert running.records.find("mine") is record
        assert (failed.name, running.records.find("first")) == ("first", failed)
        with pytest.raises(NameTaken):
            await running.extractors.get(spec(weights="file:none.pth", name="mine"), PATIENCE)
        with pytest.raises(NameTaken):  # an id is no name that could be given up
            await running.extractors.get(spec().model_copy(update={"name": failed.id}), PATIENCE)
        await running.extractors.delete("mine")
        await built(running, name="first")
        assert (failed.name, running.records.find(failed.id)) == (None, failed)


async def test_deleting_lets_requests_finish(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running)
        watched = Watched(record)
        task = await watched.held(running.features(record, jpegs))
        await running.extractors.delete(record.id)
        assert running.models.loaded_weights() == set()
        watched.open.set()
        assert (await task).images == 3


async def test_deleting_before_it_is_built_lets_requests_finish(
    engine: MakeEngine, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that asked for it, whether they wait for the build or not, and compute with it afterwards."""
    async with engine() as running:
        expected = await running.features(await built(running, nodes=["features.3"]), jpegs)
        await running.extractors.delete(running.records.list()[0].id)
        gate = threading.Event()

        def held(*args: Any) -> Any:
            assert gate.wait(PATIENCE)
            return load_model(*args)

        monkeypatch.setattr("service.engine.memory.weights.load_model", held)
        for waits in (True, False):
            gate.clear()
            creating = asyncio.create_task(
                running.extractors.get(spec(nodes=["features.3"]), PATIENCE if waits else 0.0)
            )
            await until(running.records.list)
            [record] = running.records.list()
            await asyncio.sleep(0)  # it returns, or begins to wait
            await running.extractors.delete(record.id)
            gate.set()
            assert (await creating)[0] is record
            assert record.failure is None
            given = await running.features(record, jpegs)
            for key, value in expected.outputs.items():
                assert_close(given.outputs[key], value, rtol=1e-5, atol=1e-5)  # images may share a batch or not


async def test_a_failed_build_is_tried_again_after_its_back_off(
    engine: MakeEngine, tmp_path: Path, jpegs: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By id as by spec."""
    builds = 0

    def count(*args: Any) -> Any:
        nonlocal builds
        builds += 1
        return load_model(*args)

    monkeypatch.setattr("service.engine.memory.weights.load_model", count)
    async with engine(weights_dir=tmp_path) as running:
        wanted = spec("mobilenet_v3_small", weights="file:mine.pth")
        record, created = await running.extractors.get(wanted, PATIENCE)
        assert (record.state, created) == ("failed", True)
        for attempts in (1, 2):
            record.phase.retry_at += PATIENCE  # a busy machine may take longer than the first back-off
            for _ in range(5):
                with pytest.raises(UnknownWeights):
                    await running.features(record, jpegs)
                assert await running.extractors.get(wanted, PATIENCE) == (record, False)
            assert (record.state, builds) == ("failed", attempts)
            record.phase.retry_at = time.monotonic()
            if attempts == 1:
                with pytest.raises(UnknownWeights):
                    await running.features(record, jpegs)
        torch.manual_seed(3)
        torch.save(get_model("mobilenet_v3_small").builder(weights=None).state_dict(), tmp_path / "mine.pth")
        assert (await running.features(record, jpegs)).images == 3
        assert (record.state, record.failure, builds) == ("ready", None, 3)


def test_the_back_off_doubles_up_to_a_minute() -> None:
    record = ExtractorRecord(runtime_alone().description)
    waits = []
    for _ in range(9):
        record.fail(NotReady("no threads"))
        assert isinstance(record.failure, NotReady)
        waits.append(round(record.failure.retry_after))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    record.fail(UnknownWeights("gone"))
    assert isinstance(record.failure, UnknownWeights)


async def test_features_wait_for_the_build(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record, _ = await running.extractors.get(spec("resnet18", ["layer4"]), 0)
        assert record.state == "building"
        with pytest.raises(NotReady, match="is still being built"):
            await running.runtimes.load(record, 0.0)
        assert (await running.features(record, jpegs)).images == 3
        assert record.state == "ready"


async def test_preload(engine: MakeEngine) -> None:
    async with engine(
        preload="mobilenet_v3_small@random:C4,features.12=top;mobilenet_v3_small@random:features.2.block.*,C4"
    ) as running:
        assert running.readiness() == (False, "the service is starting")
        await until(lambda: running.readiness()[0])
        assert [record.pinned for record in running.records.list()] == [True, True]
        assert list(running.records.list()[0].description.return_nodes) == ["C4", "top"]
        for nodes in (
            {"C4": "C4", "features.12": "top"},
            ["features.2.block.*", "C4"],
            {**{f"features.2.block.{i}": f"features.2.block.{i}" for i in range(3)}, "C4": "C4"},
        ):
            _, created = await running.extractors.get(spec("mobilenet_v3_small", nodes=nodes))
            assert not created


async def test_a_preload_without_nodes_has_those_of_its_model(engine: MakeEngine, tmp_path: Path) -> None:
    """Its levels, or its last value. A model of the operator's own is known only while the engine runs."""
    arguments = 'model_name = "vit_tiny_patch16_224", img_size = 32, depth = 1, num_classes = 5'
    (tmp_path / "models.toml").write_text(
        f'[models.mine]\nbuilder = "timm:create_model"\narguments = {{ {arguments} }}\n'
        "preprocessing = { resize_size = 32, crop_size = 32 }\n"
    )
    try:
        async with engine(preload="mobilenet_v3_small@random;mine", models_dir=tmp_path) as running:
            await until(lambda: running.readiness()[0])
            levels, last = running.records.list()
            assert list(levels.description.return_nodes) == list(model_graph("mobilenet_v3_small").levels)
            assert levels.description.weights == "random"
            module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
            assert list(last.description.return_nodes) == get_graph_node_names(module)[1][-1:] == ["head"]
    finally:
        register({})


async def test_a_missing_configured_model_is_reported(engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(models="resnet18,resnet5"):
        pass
    (told,) = [record.getMessage() for record in caplog.records if record.name == "fxserve.models"]
    assert told.startswith("FXSERVE_MODELS: there is no model 'resnet5'; did you mean resnet50")


async def test_a_preload_may_be_called_failed(engine: MakeEngine) -> None:
    """Whether one has failed is not read from a sentence with the operator's own words."""
    async with engine(preload="squeezenet1_1@random:features.3=failed") as running:
        await until(lambda: "failed" in running.readiness()[1])
        assert not running.preload_failed
        await until(lambda: running.readiness()[0])
        assert not running.preload_failed


@pytest.mark.parametrize(
    "preload",
    [
        "mobilenet_v3_small:",
        "resnet5@random",
        "resnet5@random:C4",
        "squeezenet1_1@random:layer9",
        "resnet18@random:layer1.*,fc=logits",
    ],
)
async def test_a_preload_that_fails_is_never_ready(engine: MakeEngine, preload: str) -> None:
    async with engine(preload=preload) as running:
        await until(lambda: "failed" in running.readiness()[1])
        ready, reason = running.readiness()
        assert not ready
        assert preload in reason
        assert running.preload_failed


@pytest.mark.exhaustive
async def test_a_preload_that_failed_is_tried_again(engine: MakeEngine, tmp_path: Path) -> None:
    async with engine(preload="mobilenet_v3_small@file:mine.pth:C4", weights_dir=tmp_path) as running:
        await until(lambda: running.preload_failed)
        torch.save(get_model("mobilenet_v3_small").builder(weights=None).state_dict(), tmp_path / "mine.pth")
        await until(lambda: running.readiness()[0])
        assert not running.preload_failed
        assert [(record.state, record.pinned) for record in running.records.list()] == [("ready", True)]


async def test_a_preload_deleted_before_its_retry_stays_deleted(engine: MakeEngine, tmp_path: Path) -> None:
    async with engine(preload="mobilenet_v3_small@file:mine.pth:C4", weights_dir=tmp_path) as running:
        await until(lambda: running.preload_failed)
        (record,) = running.records.list()
        await running.extractors.delete(record.id)
        await until(lambda: running.readiness()[0])
        assert running.records.list() == []


async def test_a_preload_that_raises_is_logged(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*asked: object) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr("service.engine.backends.upgrades.Upgrades.improve", defect)
    async with engine(preload="squeezenet1_1@random:features.3", lowering=True) as running:
        await until(lambda: "failed" in running.readiness()[1])
        assert running.readiness() == (
            False,
            "preloading squeezenet1_1@random:features.3 failed: LookupError: nobody thought of this",
        )


@pytest.mark.exhaustive
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
        started = time.process_time()  # what a busy machine gives to others does not count
        await built(running, "efficientnet_b2", ["features.7"])
        spent = time.process_time() - started
        counter.cancel()
    assert turns > spent / 0.005 / 10


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_too_little_memory_is_no_fault_of_the_transforms(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none_left(*args: object) -> None:
        raise error

    monkeypatch.setattr("service.engine.memory.transforms.verify", none_left)
    async with engine() as running:
        record, _ = await running.extractors.get(spec("mobilenet_v3_small", transforms=["fuse_conv_bn"]), PATIENCE)
    assert isinstance(record.problem, NotReady)
    assert str(error) in record.problem.detail
