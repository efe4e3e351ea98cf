"""What a comparison says of a backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxcore.analysis.verify import OutputErrors, Verification
from fxcore.backends import BACKENDS, Options
from fxcore.extractor import build_extractor
from fxcore.graph.model_graph import trace_graph
from fxcore.models.user_models import UserModel, user_entry
from fxcore.models.weights import load_model
from service.engine.backends import checks
from service.engine.backends.checks import Inputs, Reference, larger_shapes
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


def test_values_are_compared_at_another_size_if_there_is_one() -> None:
    rows: list[Inputs] = [(torch.zeros(1, 3, 64, 64),)]
    assert Reference(torch.nn.ReLU(), rows, "float32").expected_larger() is None
    reference = Reference(torch.nn.ReLU(), rows, "float32", [(3, 91, 89)])
    larger = reference.expected_larger()
    assert larger is not None
    assert larger.inputs[0].shape == (1, 3, 91, 89)
    assert reference.agrees(torch.nn.ReLU(), larger)
    assert not reference.agrees(torch.nn.Softplus(), larger)


@pytest.mark.parametrize(
    ("model", "node", "larger"),
    [
        ("timm.vit_tiny_patch16_224", "blocks.0", None),
        ("timm.vit_tiny_patch16_224", "patch_embed.proj", [(3, 283, 281)]),
        ("timm.hrnet_w18_small", "incre_modules.0", [(3, 288, 288)]),
        ("squeezenet1_1", "features.3", [(3, 283, 281)]),
    ],
)
def test_another_size_is_one_that_the_nodes_accept(model: str, node: str, larger: list[tuple[int, ...]] | None) -> None:
    """Height and width are odd and differ, but branches of HRNet can only be added if they are multiples of 32."""
    runtime = runtime_alone(model, (node,))
    inputs = tuple(torch.zeros(1, *shape) for shape in runtime.description.usual_shapes())
    assert larger_shapes(runtime.extractor, inputs) == larger


class Padded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        if height % 16 or width % 16:
            x = nn.functional.pad(x, (0, -width % 16, 0, -height % 16))
        return x


def test_a_branch_on_the_size_is_not_lowered_for_all_sizes(tmp_path: Path) -> None:
    """OpenVINO would keep what it does for the usual size, which is right for all multiples of 16 only."""
    pytest.importorskip("openvino")
    entry = user_entry(
        "net",
        UserModel(
            lambda: nn.Sequential(Padded(), nn.Conv2d(3, 8, 4, 4)),
            leaf_modules=["0"],
            preprocessing={"resize_size": 64, "crop_size": 64},
        ),
    )
    graph = trace_graph(entry, "builder")
    extractor = build_extractor(graph, load_model(entry, "builder"), graph.resolve(["1"]))
    rows: list[Inputs] = [(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)),)]
    lowered = BACKENDS["openvino"].lower(extractor.module, (torch.cat([rows[0][0]] * 2),), Options(cache=tmp_path))
    reference = Reference(extractor.module, rows, "float32", larger_shapes(extractor, rows[0]))
    expected = reference.expected_larger()
    assert not reference.agrees(lowered, expected)


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
