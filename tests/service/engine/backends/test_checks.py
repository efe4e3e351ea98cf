"""What a comparison says of a backend."""

from __future__ import annotations

import math
import time

import pytest
import torch

from fxcore.analysis.verify import OutputErrors, Verification
from service.engine.backends.checks import Reference, takes_one_size
from service.engine.runtime.candidate import Candidate
from tests.service.engine.running import runtime_alone


def test_what_is_not_a_number_differs() -> None:
    nan = OutputErrors(max_abs=math.nan, relative=math.nan, cosine=1.0, allclose=False)
    fine = OutputErrors(max_abs=0.0, relative=0.0, cosine=1.0, allclose=True)
    for precision in ("float32", "int8"):
        candidate = Candidate("openvino")
        for errors in (fine, nan, fine):
            candidate.take(Verification({"a": errors}, errors.allclose, None), precision)
        assert not candidate.agrees


def test_a_model_of_one_size_is_not_tried_at_another() -> None:
    rows = [(torch.zeros(1, 3, 64, 64),)]
    for one_size in (False, True):
        reference = Reference(torch.nn.ReLU(), rows, "float32", one_size)
        assert reference.takes_another_size(torch.nn.ReLU()) is not one_size


@pytest.mark.parametrize(("node", "one_size"), [("patch_embed.proj", False), ("blocks.0", True)])
def test_the_first_nodes_of_a_model_of_one_size_may_take_others(node: str, one_size: bool) -> None:
    runtime = runtime_alone("timm.vit_tiny_patch16_224", (node,))
    inputs = tuple(torch.zeros(1, *shape) for shape in runtime.description.usual_shapes())
    assert takes_one_size(runtime.description, runtime.extractor, inputs) is one_size


def test_the_fastest_of_many_short_passes_counts() -> None:
    """Other threads slow some; a long one is not repeated, since requests wait for it."""
    pauses = iter((0.05, 0.05, 0.0, 0.5, 0.5))

    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(next(pauses))
        return {"x": x}

    reference = Reference(run, [(torch.zeros(1, 3, 8, 8),)], "float32")
    assert reference.fastest(run, 1, 0.2) < 0.04  # type: ignore[arg-type]
    assert list(pauses) == [0.5]
    pauses = iter((0.5, 0.5))
    assert reference.fastest(run, 1, 0.2) > 0.4  # type: ignore[arg-type]
    assert list(pauses) == [0.5]
