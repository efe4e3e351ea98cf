"""What a comparison says of a backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fxcore.analysis.verify import OutputErrors, Verification
from service.engine.backends import checks
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
        larger = reference.expected_larger()
        assert (larger is None) is one_size
        if larger is not None:
            assert larger.inputs[0].shape == (1, 3, 96, 96)
            assert reference.agrees(torch.nn.ReLU(), larger)
            assert not reference.agrees(torch.nn.Softplus(), larger)


@pytest.mark.parametrize(("node", "one_size"), [("patch_embed.proj", False), ("blocks.0", True)])
def test_the_first_nodes_of_a_model_of_one_size_may_take_others(node: str, one_size: bool) -> None:
    runtime = runtime_alone("timm.vit_tiny_patch16_224", (node,))
    inputs = tuple(torch.zeros(1, *shape) for shape in runtime.description.usual_shapes())
    assert takes_one_size(runtime.description, runtime.extractor, inputs) is one_size


def test_the_fastest_of_many_short_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads slow some; a long one is not repeated, since requests wait for it."""
    now = 0.0
    monkeypatch.setattr(checks, "time", SimpleNamespace(perf_counter=lambda: now))
    for passes, fastest, left in (((0.016, 0.017, 0.004, 0.02, 0.01), 0.004, 1), ((0.1, 0.01), 0.1, 1)):
        seconds = iter(passes)

        def run(x: torch.Tensor, seconds: Iterator[float] = seconds) -> dict[str, torch.Tensor]:
            nonlocal now
            now += next(seconds)
            return {"x": x}

        reference = Reference(run, [(torch.zeros(1, 3, 8, 8),)], "float32")
        assert reference.fastest(run, 1, 0.05) == pytest.approx(fastest)  # type: ignore[arg-type]
        assert len(list(seconds)) == left
