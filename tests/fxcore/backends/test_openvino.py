"""OpenVINO: the same values for every batch, from memory of torch's own, compiled once."""

from __future__ import annotations

import copy
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from fxcore import create_extractor, trace
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, Lowered, LoweringFailed, Options, lowering_child, residents
from fxcore.backends.artifacts import prune
from fxcore.backends.ir import converted
from fxcore.errors import FxError
from fxcore.photos import augmented, input_rows, photos
from tests.e2e.forked import script
from tests.fxcore.backends.conftest import Build

pytest.importorskip("openvino")
CPU = torch.device("cpu")
OPENVINO = BACKENDS["openvino"]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that other tests have left in this process take no places from these."""
    monkeypatch.setattr(residents, "FIXED_MODELS", 1000)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(64, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(self.stem(x))
        return made


@pytest.fixture(scope="module")
def plain(batch: torch.Tensor) -> fx.GraphModule:
    """An extractor with a key twice over one node, and the input itself."""
    return create_extractor(
        Small().eval().requires_grad_(False),
        {"stem": "stem", "body": "path", "x": "image", "body.2": "node"},
        batch[:2],
    )


@pytest.fixture(scope="module")
def small(plain: fx.GraphModule, batch: torch.Tensor, artifacts: Path) -> Lowered:
    return OPENVINO.lower(plain, (batch[:2],), Options(threads=2, cache=artifacts))


def test_values(plain: fx.GraphModule, batch: torch.Tensor, small: Lowered) -> None:
    for inputs in (batch, batch[:1], batch[1:4], batch.repeat(5, 1, 1, 1), batch[:2, :, :160, :192]):
        for _ in range(2):  # the first batch of a size tells which memory the next ones need
            found = verify(plain, small, inputs)
            assert found.relative < 1e-4, (inputs.shape, found)


@pytest.mark.exhaustive
def test_values_of_every_size_in_any_order(plain: fx.GraphModule, batch: torch.Tensor, small: Lowered) -> None:
    """Up to eight rows are computed by a model of their size, and more by several."""
    rows = torch.cat([batch, batch.flip(0), batch.flip(-1), batch.flip(-2), batch.roll(9, -1)])
    for size in (1, 8, 2, 12, 3, 9, 16, 6, 1, 12, 17, 8, 5, 7, 4, 2):
        found = verify(plain, small, rows[-size:])
        assert found.relative < 1e-4, (size, found)


@pytest.mark.exhaustive
def test_a_large_batch_is_computed_in_parts_that_fit_in_the_cache(
    plain: fx.GraphModule, batch: torch.Tensor, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = batch.repeat(3, 1, 1, 1)
    largest = 64 * 56 * 56 * 4  # what the stem makes of a row
    for bytes_each, part in ((largest, 2), (2.9 * largest, 4), (100 * largest, 8)):
        monkeypatch.setattr("fxcore.backends.openvino._CACHED", int(bytes_each))
        lowered = OPENVINO.lower(plain, (batch[:2],), Options(threads=2, cache=artifacts))
        before = lowered.grown
        assert verify(plain, lowered, rows[: 2 * part]).relative < 1e-4
        one_model = lowered.grown - before
        assert one_model > 0
        lowered(rows[:part])
        assert lowered.grown - before == one_model  # the same
        lowered(rows[: part - 1])
        assert lowered.grown - before > one_model


@pytest.mark.exhaustive
def test_models_of_a_size_are_counted_and_few(
    plain: fx.GraphModule, batch: torch.Tensor, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    many, other = batch.repeat(3, 1, 1, 1)[..., :220], batch[:2, :, :160, :192]

    def lower() -> Lowered:
        lowered = OPENVINO.lower(plain, (batch[:2],), Options(threads=2, cache=artifacts))
        lowered(many)  # what the model of any size keeps of its largest pass is counted, too
        return lowered

    def grows(lowered: Lowered, inputs: torch.Tensor) -> int:
        before = lowered.grown
        for _ in range(2):
            assert verify(plain, lowered, inputs).relative < 1e-4
        return lowered.grown - before

    lowered = lower()
    single = grows(lowered, batch[:1])
    assert single > weights
    assert grows(lowered, batch[:3]) > single
    assert grows(lowered, batch[:3]) == 0  # there is one already
    assert grows(lowered, other) == 0  # not the usual size
    monkeypatch.setattr("fxcore.backends.openvino._FIXED_BYTES", 2 * single)
    lowered = lower()
    assert grows(lowered, batch[:1]) == single
    assert grows(lowered, batch) <= 0  # no room for a second one
    assert grows(lowered, batch[:2]) == 0
    monkeypatch.setattr("fxcore.backends.openvino._FIXED_WEIGHTS", weights // 2)
    assert grows(lower(), batch[:1]) == 0


def endless() -> None:
    while True:
        pass


@contextmanager
def over(seconds: float) -> Iterator[None]:
    yield
    raise TimeoutError


@pytest.mark.exhaustive
def test_a_model_whose_export_for_any_size_takes_minutes(
    extractor: Build, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is exported for one size once the time for it is over."""
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s of CPU time"), lowering_child._cpu_limit(0.1):
        endless()
    monkeypatch.setattr(lowering_child, "_cpu_limit", over)
    plain = extractor("resnet18", "relu").module
    made = lowering_child.exported(plain, (batch[:2],)).module()
    for inputs in (batch[:1], batch[:3]):
        assert verify(plain, made, inputs).relative < 1e-4
    with pytest.raises(FxError):
        verify(plain, made, batch[:1, :, :160, :192])


@pytest.mark.exhaustive
def test_outputs_whose_size_is_known_only_afterwards(artifacts: Path) -> None:
    positive = trace(lambda x: {"places": torch.nonzero(x > 0)})
    lowered = OPENVINO.lower(positive, (torch.randn(2, 6),), Options(threads=2, cache=artifacts))
    for rows in (2, 3, 2, 2):
        x = torch.randn(rows, 6)
        assert torch.equal(lowered(x)["places"], torch.nonzero(x > 0))


def quarters(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four rows for each image."""
    return {"y": 2 * x.unflatten(-1, (2, -1)).unflatten(2, (2, -1)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)}


def largest(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One value for all images."""
    return {"y": 2 * x, "largest": x.amax()}


def scaled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """torch exports it for any size, and OpenVINO does not know its division of sizes."""
    return {"y": x * x.shape[-1] ** -0.5}


def test_a_model_lowered_for_one_size_takes_no_other(artifacts: Path) -> None:
    """The size of the example is a constant in it, and other sizes would be scaled by that, too."""
    x = torch.rand(2, 16)
    lowered = OPENVINO.lower(trace(scaled), (x,), Options(threads=2, cache=artifacts))
    for given in (x, x[:1], torch.rand(3, 16)):
        assert torch.allclose(lowered(given)["y"], given / 4)
    with pytest.raises(RuntimeError, match="shape"):
        lowered(torch.rand(2, 4))


class Large(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[-1] > 40 else x


def doubled(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Large()(output)
    return made


class Ending(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 1), last

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.last(self.conv(x))}


def with_leaf() -> fx.GraphModule:
    return trace(Ending(Large()).eval(), leaf_modules=["last"])


def with_hook() -> fx.GraphModule:
    last = nn.ReLU()
    last.register_forward_hook(doubled)
    return trace(Ending(last).eval())


def with_leaf_function() -> fx.GraphModule:
    return trace(lambda x: {"y": x * max(x.shape[-1], 40)}, leaf_functions=[max])


@pytest.mark.parametrize("traced", [with_leaf, with_hook, with_leaf_function])
def test_code_that_may_branch_on_the_size_is_lowered_for_one(
    artifacts: Path, traced: Callable[[], fx.GraphModule]
) -> None:
    """A lowered model would take the branch of the example for all sizes."""
    module, x = traced(), torch.rand(2, 3, 32, 32)
    lowered = OPENVINO.lower(module, (x,), Options(threads=2, cache=artifacts))
    for given in (x, x[:1]):
        assert verify(module, lowered, given).relative < 1e-4
    with pytest.raises(RuntimeError, match="shape"):
        lowered(torch.rand(2, 3, 48, 48))


def test_hooks_of_torch_keep_a_model_of_any_size(artifacts: Path) -> None:
    with pytest.warns(FutureWarning):  # its successor computes the weight without a hook
        normalized = nn.utils.weight_norm(nn.Conv2d(4, 4, 3))
    module = trace(Ending(normalized).eval())
    lowered = OPENVINO.lower(module, (torch.rand(2, 3, 32, 32),), Options(threads=2, cache=artifacts))
    assert verify(module, lowered, torch.rand(2, 3, 48, 40)).relative < 1e-4


def test_clips_may_have_any_number_of_frames(artifacts: Path) -> None:
    x = torch.rand(2, 3, 4, 16, 16)
    module = create_extractor(nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU()).eval(), ["1"], x)
    lowered = OPENVINO.lower(module, (x,), Options(threads=2, cache=artifacts))
    for given in (x, x[:1], torch.rand(3, 3, 7, 16, 24)):
        assert verify(module, lowered, given).relative < 1e-4


def the_same(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dropout, clone() and casts have no effect here."""
    y = x * 2
    return {"dropout": nn.functional.dropout(y, training=False), "y": y, "clone": y.clone(), "cast": y.float()}


def difference(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Channels go last, so the image is copied, and OpenVINO keeps none of its memory."""
    return {"y": x - 2 * x.flip(1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", [quarters, largest, the_same, difference])
def test_outputs_of_any_form(
    function: Callable[[torch.Tensor], dict[str, torch.Tensor]], batch: torch.Tensor, artifacts: Path
) -> None:
    rows = torch.cat([batch, batch.flip(-1), batch.flip(-2)])[..., :32, :32]
    traced = trace(function)
    lowered = OPENVINO.lower(traced, (rows[:2],), Options(threads=2, cache=artifacts))
    for size in (12, 3, 11, 3):
        assert verify(traced, lowered, rows[:size]).relative < 1e-6


def test_outputs_outlive_the_next_call(batch: torch.Tensor, small: Lowered) -> None:
    for _ in range(2):
        first = small(batch[:1])
        kept = {key: value.clone() for key, value in first.items()}
        small(batch[1:2])
        assert all(torch.equal(value, kept[key]) for key, value in first.items())


def test_inputs_of_any_memory_format(batch: torch.Tensor, small: Lowered) -> None:
    strided = batch.contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(a, b) for a, b in zip(small(batch).values(), small(strided).values(), strict=True))


def test_it_is_compiled_once(
    plain: fx.GraphModule, batch: torch.Tensor, artifacts: Path, small: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = sorted(artifacts.glob("openvino-*"))
    monkeypatch.setattr(subprocess, "Popen", None)  # making it anew would take a process of its own
    again = OPENVINO.lower(plain, (batch[:2],), Options(threads=2, cache=artifacts))
    assert sorted(artifacts.glob("openvino-*")) == kept
    assert not list(artifacts.glob(".making-*"))
    assert all(torch.equal(a, b) for a, b in zip(small(batch).values(), again(batch).values(), strict=True))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("allowed", [True, False])
def test_stored_weights_are_mapped_where_they_may_be(
    extractor: Build,
    batch: torch.Tensor,
    artifacts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool,
) -> None:
    """So that processes share their pages."""
    module = extractor("resnet18", "C3").module
    OPENVINO.lower(module, (batch[:2],), Options(threads=2, cache=artifacts))
    own = shutil.copytree(artifacts, tmp_path / "own")  # other tests may have mapped the others
    monkeypatch.setattr("fxcore.backends.openvino.may_be_mapped", lambda folder: allowed)
    lowered = OPENVINO.lower(module, (batch[:2],), Options(threads=2, cache=own))
    assert (str(own) in Path("/proc/self/maps").read_text()) == allowed
    assert lowered.storages()  # it is still there


@pytest.mark.exhaustive
@pytest.mark.skipif(OPENVINO.unavailable(CPU, "bfloat16") is not None, reason="needs a processor with bfloat16")
def test_bfloat16(plain: fx.GraphModule, batch: torch.Tensor, artifacts: Path) -> None:
    """As near to float32 as eager is in bfloat16, at every size, through torch's own memory."""
    half = copy.deepcopy(plain).bfloat16()
    lowered = OPENVINO.lower(half, (batch[:2].bfloat16(),), Options(precision="bfloat16", threads=2, cache=artifacts))
    for rows in (batch, batch[:1], batch[1:4], batch.repeat(5, 1, 1, 1), batch[:2, :, :160, :192]):
        rows = rows.bfloat16()
        expected = plain(rows.float())
        own = half(rows)
        for _ in range(2):  # the first batch of a size tells which memory the next ones need
            values = lowered(rows)
            for key, value in values.items():
                assert value.dtype == torch.bfloat16
                assert _far(value, expected[key]) < 2 * _far(own[key], expected[key]) + 1e-6
    assert torch.equal(lowered(rows)["image"], rows)


@pytest.mark.exhaustive
def test_dtypes_of_inputs_and_outputs_are_the_modules() -> None:
    """Whether batch norms can be folded in float32 or, with a narrow dtype in the code, not."""

    class Mixed(torch.nn.Module):
        def __init__(self, dtype: torch.dtype | None) -> None:
            super().__init__()
            self.conv, self.dtype = torch.nn.Conv2d(3, 4, 3), dtype

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = self.conv(x if self.dtype is None else x.to(self.dtype))
            return z, z.float() + y, z.argmax(1)

    def export(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
        return torch.export.export(module, inputs)

    for narrow, own, name in ((torch.bfloat16, None, "bf16"), (torch.float16, torch.float16, "f16")):
        example = torch.rand(2, 3, 8, 8, dtype=narrow), torch.rand(2, 4, 6, 6)
        model = converted(Mixed(own).to(narrow), example, export)
        assert [x.element_type.get_type_name() for x in model.inputs] == [name, "f32"]
        assert [x.element_type.get_type_name() for x in model.outputs] == [name, "f32", "i64"]


def _far(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.float() - expected).norm() / expected.norm())


@pytest.mark.exhaustive
def test_int8_is_near(extractor: Build, batch: torch.Tensor, artifacts: Path) -> None:
    pytest.importorskip("nncf")
    plain = extractor("resnet18", "layer2")
    graph = plain.graph
    rows = input_rows(graph.preprocessing, graph.inputs, augmented(photos(), 8), (224, 224))
    options = Options(threads=2, precision="int8", cache=artifacts, calibration=rows)
    lowered = OPENVINO.lower(plain.module, (batch[:2],), options)
    found = verify(plain.module, lowered, batch)
    assert 1e-4 < found.relative < 0.15
    assert found.cosine > 0.98
    with pytest.raises(LoweringFailed, match="calibrate"):
        OPENVINO.lower(plain.module, (batch[:2],), Options(precision="int8"))


def test_a_module_that_computes_nothing_is_refused(batch: torch.Tensor) -> None:
    image = create_extractor(Small().eval(), {"x": "image"}, batch[:2])
    with pytest.raises(LoweringFailed, match="returns only its inputs"):
        OPENVINO.lower(image, (batch[:2],), Options())


@pytest.mark.exhaustive
def test_a_lowering_can_be_cancelled(extractor: Build, batch: torch.Tensor, tmp_path: Path) -> None:
    cancelled = threading.Event()
    threading.Timer(1.0, cancelled.set).start()
    with pytest.raises(LoweringFailed, match="was cancelled"):
        OPENVINO.lower(extractor("resnet18", "C3").module, (batch[:2],), Options(cache=tmp_path, cancelled=cancelled))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_what_cannot_be_lowered_says_why(extractor: Build, tmp_path: Path) -> None:
    module = extractor("resnet18", "C3").module
    with pytest.raises(LoweringFailed, match=r"lowering to openvino failed: .+"):
        OPENVINO.lower(module, (torch.zeros(2, 5, 64, 64),), Options(cache=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_where_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OPENVINO.unavailable(CPU, "float32") is None
    assert "float32, bfloat16 and int8" in str(OPENVINO.unavailable(CPU, "float16"))
    for machine, has, why in (("x86_64", True, None), ("x86_64", False, "AVX-512 BF16"), ("aarch64", True, "or AMX")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr("fxcore.backends.openvino.computes_bfloat16", lambda has=has: has)
        said = OPENVINO.unavailable(CPU, "bfloat16")
        assert said is None if why is None else why in str(said)
    assert "runs on the CPU" in str(OPENVINO.unavailable(torch.device("cuda"), "float32"))


_LOWERED = """
import torch
import fxcore
from fxcore.backends import BACKENDS, Options
if __name__ == "__main__":
    module = fxcore.trace(lambda x: {"out": x.relu()})
    BACKENDS["openvino"].lower(module, (torch.ones(2, 4),), Options())
"""


@pytest.mark.exhaustive
def test_nobody_is_told(tmp_path: Path) -> None:
    """OpenVINO keeps the number of the client that it tells of in the home directory, unless it runs in CI."""
    settings = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD", "JENKINS_URL")}
    settings |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    assert script(_LOWERED, tmp_path, environment=settings).wait(300) == 0, (tmp_path / "stderr").read_text()
    assert not (tmp_path / "intel").exists()


def test_prune_keeps_what_was_used_last(tmp_path: Path) -> None:

    for age, name in enumerate(("a", "b", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    prune(tmp_path, 250)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    prune(tmp_path, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]  # the last one was just made
