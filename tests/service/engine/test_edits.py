"""Edited requests share batches, see none of each other's edits, and leave requests without edits alone."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxcore.edits import BadEdit, Edit
from fxcore.models.catalog import get_model
from fxcore.models.weights import load_model
from service.engine import FeatureOptions
from service.engine.lifecycle import variants
from tests.service.engine.fake_backends import Held
from tests.service.engine.running import MakeEngine, Watched, built, encoded, tensors, waiting

pytestmark = pytest.mark.anyio

NODE = "features.3.add"
"""A map of 24 channels, 8 x 8 for images of 64 x 64."""

CLS = FeatureOptions(pool="cls")


def hooked(model: nn.Module, edits: list[Edit], x: Tensor) -> Tensor:
    """The model's result with a forward hook that does the edits of :data:`NODE`, written out."""

    def change(module: nn.Module, given: Any, value: Tensor) -> Tensor:
        value = value.clone()
        for edit in edits:
            x1, y1, x2, y2 = edit.box or (0, 0, 8, 8)
            for row in range(len(value)) if edit.images is None else edit.images:
                for channel in range(24) if edit.channels is None else edit.channels:
                    part = value[row, channel, y1:y2, x1:x2]
                    part.mul_(edit.scale).add_(edit.shift)
        return value

    handle = model.get_submodule("features.3").register_forward_hook(change)
    with torch.no_grad():
        result = model(x)
    handle.remove()
    assert isinstance(result, Tensor)
    return result


def random_edits(randomly: random.Random, rows: int) -> list[Edit]:
    found = []
    for _ in range(randomly.choice([0, 1, 1, 2])):
        channels = randomly.sample(range(24), 5) if randomly.random() < 0.7 else None
        box = (1, 0, 5, 7) if randomly.random() < 0.3 else None
        some = [randomly.randrange(rows)] if randomly.random() < 0.5 else None
        found.append(Edit(NODE, randomly.uniform(-2, 2), randomly.uniform(-1, 1), channels, None, box, some))
    return found


@pytest.mark.exhaustive
async def test_mixed_edits_of_eight_clients_equal_hooks(engine: MakeEngine) -> None:
    model = load_model(get_model("mobilenet_v3_small"), "random").eval()
    randomly, generator = random.Random(100), torch.Generator().manual_seed(0)
    async with engine(max_inflight=64) as running:
        record = await built(running, "mobilenet_v3_small", nodes=["classifier"])
        asked = []
        for _ in range(100):
            rows = randomly.randint(1, 3)
            asked.append((torch.rand(rows, 3, 64, 64, generator=generator), random_edits(randomly, rows)))
        await running.features(record, tensors(0.0), edits=[Edit(NODE)])
        watched = Watched(record, record.runtime.variants[NODE,])

        async def client(number: int) -> None:
            for x, edits in asked[number::8]:
                found = (await running.features(record, {"x": x}, edits=edits)).outputs["classifier"]
                expected = hooked(model, edits, x)
                assert torch.dist(found, expected) <= 1e-4 * expected.norm(), edits

        await asyncio.gather(*(client(number) for number in range(8)))
    assert sum(watched.sizes) == sum(len(x) for x, edits in asked if edits)
    assert max(watched.sizes) > 3  # of several requests


async def test_different_edits_of_one_node_are_one_batch(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=[NODE])
        plain = (await running.features(record, tensors(1.0, 2.0))).outputs[NODE]
        await running.features(record, tensors(1.0), edits=[Edit(NODE)])
        watched = Watched(record, record.runtime.variants[NODE,])
        first = await watched.held(running.features(record, tensors(0.0), edits=[Edit(NODE)]))
        edits = [[Edit(NODE, 0, 3, channels=[1])], [Edit(NODE, 2.0, box=(0, 0, 2, 1))], [Edit("features.3", shift=1.0)]]
        tasks = [asyncio.create_task(running.features(record, tensors(1.0, 2.0), edits=each)) for each in edits]
        await waiting(running, 3)
        watched.open.set()
        found = [(await task).outputs[NODE] for task in (first, *tasks)][1:]
    assert watched.sizes == [1, 6]
    expected = [plain.clone(), plain.clone(), plain + 1]
    expected[0][:, 1] = 3
    expected[1][:, :, 0, :2] *= 2
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.exhaustive
async def test_requests_without_edits_stay_where_they_were(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small")
        runtime = record.runtime
        run, module, before = runtime.run, runtime.extractor.module, await running.features(record, tensors(1.0))
        bytes_before = running.eviction.bytes()
        zero = await running.features(record, tensors(1.0), edits=[Edit("features.12", scale=0)])
        after = await running.features(record, tensors(1.0))
        assert not zero.outputs["features.12"].any()
        assert torch.equal(zero.outputs["features.8"], before.outputs["features.8"])
        assert torch.equal(after.outputs["features.12"], before.outputs["features.12"])
        assert (runtime.run, runtime.extractor.module) == (run, module)
        [variant] = runtime.variants.values()
        assert running.eviction.bytes() > bytes_before
        record.retire()
        assert variant.retired


@pytest.mark.exhaustive
async def test_the_least_recently_edited_nodes_go_first(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MOST", 2)
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small")
        for nodes in (["features.1"], ["features.2", "features.1"], ["features.1"], ["features.3"]):
            await running.features(record, tensors(1.0), edits=[Edit(node) for node in nodes])
        names = [[name.split(".")[1] for name in key] for key in record.runtime.variants]
        assert sorted(names) == [["1"], ["3"]]


@pytest.mark.exhaustive
async def test_images_of_several_sizes(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "timm.test_vit", ["blocks"], image_size=64, fit="native")
        sizes = [(64, 64), (64, 96)]
        images = [encoded(np.full((*size, 3), 90, np.uint8), "PNG") for size in sizes]
        edits = [Edit("blocks", 0, 5.0, box=[0, 1, 4, 2]), Edit("blocks", 0, 7.0, tokens=[0], images=[1])]
        for index, (height, width) in enumerate(sizes):
            one = [Edit("blocks", 0, 5.0, box=[0, 1, 4, 2])]
            plain = (await running.features(record, [images[index]])).outputs["blocks"]
            found = (await running.features(record, [images[index]], edits=one)).outputs["blocks"]
            changed = (found != plain).any(2)[0].nonzero().flatten().tolist()
            start = 1 + width // 16
            assert changed == list(range(start, start + 4)), height
        with pytest.raises(BadEdit, match=r"edit 0: its box .* 0 <= x1 < x2 <= 4"):
            await running.features(record, images, CLS, edits=[Edit("blocks", box=[0, 0, 5, 1])])
        pooled = await running.features(record, images, CLS, edits=edits)
        assert pooled.outputs["blocks"][1].unique().tolist() == [7.0]


async def test_an_extractor_that_begins_at_an_inner_node(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=["features.5"], inputs=["features.3"])
        value = torch.rand(2, 24, 8, 8)
        found = await running.features(record, {"features.3": value}, edits=[Edit("features.3", 0, channels=[2])])
        value = value.clone()
        value[:, 2] = 0
        expected = await running.features(record, {"features.3": value})
        torch.testing.assert_close(found.outputs["features.5"], expected.outputs["features.5"])


async def test_an_extractor_that_begins_at_a_vector(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=["classifier.3"], inputs=["flatten"])
        given = {"flatten": torch.rand(2, 576)}
        await running.features(record, given)  # the first batch has one row
        plain = await running.features(record, given)
        found = await running.features(record, given, edits=[Edit("classifier.0", 0), Edit("classifier.3", 0, 7.0)])
        assert found.outputs["classifier.3"].unique().tolist() == [7.0]
        again = await running.features(record, given)
        assert torch.equal(again.outputs["classifier.3"], plain.outputs["classifier.3"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("rest", [{"precision": "bfloat16"}, {"transforms": ["fold_normalization"]}])
async def test_other_precisions_and_transforms(engine: MakeEngine, rest: dict[str, Any]) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=[NODE, "features.5"], **rest)
        image = [encoded(np.full((64, 64, 3), 90, np.uint8), "PNG")]
        found = await running.features(record, image, edits=[Edit(NODE, 0, 0.5, channels=[2])])
        assert found.outputs[NODE][:, 2].unique().tolist() == [0.5]
        plain = (await running.features(record, image)).outputs
        others = [channel for channel in range(24) if channel != 2]
        assert torch.equal(found.outputs[NODE][:, others], plain[NODE][:, others])
        assert not torch.equal(found.outputs["features.5"], plain["features.5"])


@pytest.mark.exhaustive
async def test_a_lowered_variant_serves_channels_and_eager_boxes(engine: MakeEngine, held: Held) -> None:
    held.open.set()
    async with engine(lowering=True) as running:
        record = await built(running, "mobilenet_v3_small", nodes=["features.5"])
        x, channels = tensors(*[1.0] * 8), [Edit(NODE, 0, 0.5, channels=[2])]
        await running.features(record, x, edits=channels)
        before = await running.features(record, x, edits=channels)
        variant = record.runtime.variants[NODE,]
        assert variant.images == 16
        await asyncio.wait({variant.upgrade})
        after = await running.features(record, x, edits=channels)
        torch.testing.assert_close(after.outputs["features.5"], before.outputs["features.5"], rtol=1e-4, atol=1e-4)
        await running.features(record, x, edits=[Edit(NODE, 0, box=[0, 0, 1, 1])])


async def test_edits_that_overflow_together_are_refused(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=["features.8"])
        edits = [Edit(NODE, scale=10.0), Edit(NODE, scale=3e38, images=[0])]
        with pytest.raises(BadEdit, match=r"^edit 0: .*beyond") as caught:
            await running.features(record, tensors(1.0), edits=edits)
        assert caught.value.extra["edit"] == 0


@pytest.mark.exhaustive
async def test_windows_of_another_size_have_the_edits_of_their_image(engine: MakeEngine) -> None:
    """At 160 x 160 this node has 64 windows an image, at 160 x 320 twice as many."""
    node = "stages.0.blocks.0.attn_block.attn.qkv"
    async with engine() as running:
        record = await built(running, "timm.test_maxvit", ["norm"], image_size=160, fit="native")
        x = torch.rand(2, 3, 160, 320, generator=torch.Generator().manual_seed(0))

        async def asked(rows: Tensor, edits: list[Edit]) -> Tensor:
            return (await running.features(record, {"x": rows}, edits=edits)).outputs["norm"]

        first, second = Edit(node, shift=300.0), Edit(node, 0, shift=-300.0)
        plain = await asked(x, [])
        alone = torch.cat([await asked(x[:1], [first]), await asked(x[1:], [second])])
        both = await asked(x, [replace(first, images=[0]), replace(second, images=[1])])
    assert torch.dist(both, alone) <= 1e-4 * alone.norm()
    assert all(torch.dist(one, other) > 0.05 * other.norm() for one, other in zip(both, plain, strict=True))


async def test_the_extractor_of_a_deleted_one_edits_over_the_weights_it_had(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "mobilenet_v3_small", nodes=[NODE])
        runtime = record.runtime
        watched = Watched(record, runtime)
        held = await watched.held(running.features(record, tensors(1.0)))
        weights = runtime.model
        await running.extractors.delete(record.id)
        with ExitStack() as stack:
            another, _ = await running._pipeline._variants.hold(stack, runtime, {NODE}, [])
            assert another.model is weights
        assert not running.models.loaded()
        watched.open.set()
        await held
