"""The main path: photographs in, tensors out, equal to what torch itself gives."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fxcore.errors import BadImage, BadTensor, ImageTooLarge
from fxcore.graph.tokens.prefix_tokens import NO_PREFIX
from service.engine import FeatureOptions, FeatureResult
from service.problems import ResponseTooLarge
from tests.service.engine.running import PATIENCE, MakeEngine, Watched, built, encoded, spec, until, waiting

pytestmark = pytest.mark.anyio


async def test_large_images_are_close_when_fast(engine: MakeEngine, large_jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running)
        option = FeatureOptions(preprocess="fast")
        fast = await running.features(record, large_jpegs, option)
        exact = await running.features(record, large_jpegs)
        one_by_one = [await running.features(record, [jpeg], option) for jpeg in large_jpegs]
    for key, value in exact.outputs.items():
        assert not torch.equal(fast.outputs[key], value)
        assert torch.cosine_similarity(fast.outputs[key].flatten(1), value.flatten(1)).min() > 0.9998
        assert_close(torch.cat([one.outputs[key] for one in one_by_one]), fast.outputs[key], rtol=1e-5, atol=1e-5)


async def test_the_same_request_gives_the_same_bits(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running)
        first = await running.features(record, jpegs[:1])
        for _ in range(5):
            again = await running.features(record, jpegs[:1])
            assert all(torch.equal(again.outputs[key], first.outputs[key]) for key in first.outputs)


def test_single_values_are_normalised_each_by_itself() -> None:
    """Not over the images of a batch, which are other clients'."""
    values = torch.tensor([3.0, -4.0, 0.0])
    assert FeatureOptions(normalize="l2").finish(values, None, NO_PREFIX, (), None, {})[0].tolist() == [1.0, -1.0, 0.0]


async def test_requests_with_different_options_share_a_batch(engine: MakeEngine, jpegs: list[bytes]) -> None:
    options = [
        FeatureOptions(),
        FeatureOptions(pool="max"),
        FeatureOptions(dtype="bfloat16"),
        FeatureOptions(keys=frozenset({"features.12"})),
        FeatureOptions(),
    ]
    async with engine() as running:
        record = await built(running)
        alone = [(await running.features(record, jpegs[:1], o)).outputs for o in options]
        watched = Watched(record)
        blocker = await watched.held(running.features(record, jpegs[:1]))
        tasks = [asyncio.create_task(running.features(record, jpegs[:1], o)) for o in options]
        await waiting(running, len(options))
        watched.open.set()
        responses = [(await task).outputs for task in tasks]
        await blocker
    assert watched.sizes == [1, 4, 1]  # five are made a batch of a usual size and one more
    for wanted, response, expected in zip(options, responses, alone, strict=True):
        assert list(response) == (["features.12"] if wanted.keys else ["features.8", "features.12"])
        for key in response:
            assert response[key].dtype == expected[key].dtype
            assert_close(response[key].float(), expected[key].float(), rtol=1e-2, atol=1e-5)
            # Nobody's answer keeps the whole batch in memory.
            assert response[key].untyped_storage().nbytes() == response[key].nbytes


async def test_half_precision(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        exact = await built(running)
        record = await built(running, precision="bfloat16")
        assert record.id != exact.id
        wide = (await running.features(exact, jpegs)).outputs
        narrow = (await running.features(record, jpegs)).outputs
        assert [info.dtype for info in record.outputs] == ["bfloat16", "bfloat16"]
    for key in wide:
        assert narrow[key].dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(narrow[key].float().flatten(), wide[key].flatten(), dim=0) > 0.999


async def test_two_keys_of_one_node_are_two_tensors(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine() as running:
        record = await built(running, "resnet18", {"layer4": "a", "layer4.1.relu_1": "b"})
        outputs = (await running.features(record, jpegs[:1])).outputs
    assert torch.equal(outputs["a"], outputs["b"])
    assert outputs["a"].data_ptr() != outputs["b"].data_ptr()


async def test_a_response_over_the_limit_is_refused_before_any_work(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine(max_response_bytes=200_000) as running:
        record = await built(running, "mobilenet_v3_small")
        watched = Watched(record)
        size = sum(values.nbytes for values in (await running.features(record, jpegs[:1])).outputs.values())
        assert watched.sizes == [1]
        with pytest.raises(ResponseTooLarge) as caught:
            await running.features(record, jpegs * 20)
        assert caught.value.extra["bytes"] == size * 60
        assert caught.value.extra["limit"] == 200_000
        ways = ["pool=avg", "project=4096", "dtype=float16", "fewer images per request", "fewer nodes"]
        assert caught.value.extra["ways"] == ways
        assert watched.sizes == [1]
        assert (await running.features(record, jpegs * 20, FeatureOptions(pool="avg", dtype="float16"))).images == 60


async def test_bad_images_say_which(engine: MakeEngine, jpegs: list[bytes]) -> None:
    async with engine(max_pixels=300_000) as running:
        record = await built(running)
        watched = Watched(record)
        with pytest.raises(BadImage, match=r"^image 1: ") as caught:
            await running.features(record, [jpegs[0], b"no image", b""])
        assert caught.value.extra["index"] == 1
        with pytest.raises(ImageTooLarge) as large:
            await running.features(record, [jpegs[0], encoded(np.zeros((600, 600, 3), np.uint8))])
        assert large.value.extra["index"] == 1
        assert watched.sizes == []
        with pytest.raises(BadImage, match=r"^image 2: ") as caught:  # its header is whole
            await running.features(record, [jpegs[0], jpegs[2], jpegs[0][:3000], jpegs[0][:2000]])
        assert caught.value.extra["index"] == 2
        assert running.admission.requests == running.admission.bytes == 0
        assert (await running.features(record, jpegs[:1])).images == 1


BAD_TENSORS: list[tuple[Any, str]] = [
    ({"y": torch.zeros(1, 3, 224, 224)}, "tensors named x"),
    ({"x": torch.zeros(3, 224, 224)}, "takes float32 NCHW with 3 channels"),
    ({"x": torch.zeros(1, 4, 224, 224)}, "takes float32 NCHW with 3 channels"),
    ({"x": torch.zeros(1, 3, 224, 224, dtype=torch.uint8)}, "takes uint8 NHWC with 3 channels"),
    ({"x": torch.zeros(1, 3, 224, 224, dtype=torch.int32)}, "is int32"),
    ({"x": torch.zeros(0, 3, 224, 224)}, "at least 1"),
    ({"x": torch.tensor(1.0)}, "at least 1"),
    ({}, "the request has none"),
    ([], "no image"),
]


async def test_bad_tensors_are_refused(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running)
        for tensors, said in BAD_TENSORS:
            with pytest.raises(BadTensor, match=said):
                await running.features(record, tensors)


@pytest.mark.exhaustive
async def test_a_size_the_model_does_not_take(engine: MakeEngine) -> None:
    async with engine() as running:
        record = await built(running, "vit_b_32", ["encoder"])
        watched = Watched(record)
        with pytest.raises(BadTensor, match="vit_b_32 cannot take an input of 3 x 200 x 224"):
            await running.features(record, {"x": torch.zeros(1, 3, 200, 224)})
        assert watched.sizes == []


@pytest.mark.exhaustive
async def test_building_twenty_extractors_delays_no_request(engine: MakeEngine, jpegs: list[bytes]) -> None:
    """Every answer while twenty extractors are traced and built is bit-equal to the quiet one."""
    models = ["resnet18", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5"]
    async with engine() as running:
        record = await built(running)
        quiet = [(await running.features(record, [jpeg])).outputs for jpeg in jpegs]
        done = asyncio.Event()
        responses = 0

        async def hammer(place: int) -> None:
            nonlocal responses
            while not done.is_set():
                outputs = (await running.features(record, [jpegs[place]])).outputs
                responses += 1
                assert all(torch.equal(outputs[key], quiet[place][key]) for key in outputs)

        client = asyncio.create_task(hammer(0))
        specs = []
        for model in models:
            graph = (await built(running, model, ["x"])).runtime.extractor.graph
            nodes = [n.name for n in graph.nodes if n.extractable]
            specs += [spec(model, nodes[-3 - i :: -7]) for i in range(5)]
        made = await asyncio.gather(*(running.extractors.get(one, PATIENCE) for one in specs))
        assert len({built.id for built, _ in made}) == 20
        assert all(built.state == "ready" for built, _ in made)
        before = responses
        assert before, "nothing was answered while they were built"
        while responses < before + 3:
            await asyncio.sleep(0.01)
        done.set()
        await client


async def test_close_finishes_what_was_accepted(engine: MakeEngine, jpegs: list[bytes]) -> None:
    before = set(threading.enumerate())
    async with engine() as running:
        record = await built(running)
        watched = Watched(record)
        watched.open.clear()

        async def one_request(jpeg: bytes) -> FeatureResult:
            with running.in_flight:
                return await running.features(record, [jpeg])

        accepted = [asyncio.create_task(one_request(jpeg)) for jpeg in jpegs * 4]
        await watched.begun()
        closing = asyncio.create_task(running.close())
        await asyncio.sleep(0.05)
        assert running.in_flight.count == len(accepted)
        assert running.readiness() == (False, "the service is shutting down")
        assert not closing.done()
        watched.open.set()
        responses = await asyncio.gather(*accepted)
        await closing
        assert [response.images for response in responses] == [1] * 12
    await until(lambda: not {t for t in threading.enumerate() if t.name.startswith("fxserve")} - before)
