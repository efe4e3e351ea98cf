"""Regions are counted before they are placed."""

from __future__ import annotations

import numpy as np
import pytest

from fxcore.errors import BadMask
from fxcore.images.masks import Rle
from service.engine import FeatureOptions
from service.problems import RequestTooLarge
from service.schemas.regions import GivenRegions
from tests.service.engine.running import MakeEngine, built, encoded

pytestmark = pytest.mark.anyio

IMAGE = encoded(np.zeros((8, 8, 3), np.uint8), "PNG")
WHOLE, DAMAGED = Rle(8, 8, [0, 64]), b"no mask"


async def test_masks_are_counted_before_any_is_read(engine: MakeEngine) -> None:
    """As weights they take far more memory than sent: 12,544 floats each on a map of 112 x 112 positions."""
    async with engine(max_inflight_bytes=2**25) as running:
        record = await built(running, "mobilenet_v3_small", nodes=["features.0"])
        for masks, problem, said in (
            ([DAMAGED] * 16_384, BadMask, f"needs {16_384 * 16 * 112 * 112:,} values of the maps"),
            ([DAMAGED] * 1000, RequestTooLarge, "would need"),
            ([WHOLE] * 70 + [DAMAGED], BadMask, "image 0: mask 70 is not a PNG file"),
        ):
            with pytest.raises(problem, match=said):
                await running.features(record, [IMAGE], FeatureOptions(pool="mask"), GivenRegions("mask", [masks]))
        taken = GivenRegions("mask", [[WHOLE] * 70, []])
        outputs = (await running.features(record, [IMAGE, IMAGE], FeatureOptions(pool="mask"), taken)).outputs
        average = (await running.features(record, [IMAGE], FeatureOptions(pool="avg"))).outputs
    np.testing.assert_allclose(outputs["features.0"], average["features.0"].expand(70, -1), rtol=1e-4, atol=1e-5)
