"""Weights from files of the weights folder."""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from fxcore import get_model, load_model
from fxcore.errors import UnknownWeights, WeightsUnavailable
from fxcore.models.user_models import UserModel, user_entry
from tests.fxcore.models.test_weights import DAMAGE, SMALL, Bomb, drawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "weights"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def state() -> OrderedDict[str, Tensor]:
    return drawn(torchvision.models.shufflenet_v2_x0_5)


def _same(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert loaded[key].dtype == value.dtype, key
        assert torch.equal(loaded[key], value), key
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())


def test_safetensors_and_torch_files(folder: Path, state: OrderedDict[str, Tensor]) -> None:
    safetensors.torch.save_file(state, folder / "own.safetensors")
    torch.save(state, folder / "own.pth")
    torch.save({"model": state, "epoch": 3, "optimizer": {"lr": 0.1}}, folder / "training.pth")
    torch.save({"state_dict": state}, folder / "lightning.ckpt")
    for name in ("own.safetensors", "own.pth", "training.pth", "lightning.ckpt"):
        _same(load_model(get_model(SMALL), f"file:{name}", folder), state)


def test_what_is_loaded_is_not_the_files_memory(folder: Path, state: OrderedDict[str, Tensor]) -> None:
    """Who copies another file over it changes no model that runs."""
    zeros = {key: torch.zeros_like(value) for key, value in state.items()}
    for save, name in ((safetensors.torch.save_file, "own.safetensors"), (torch.save, "own.pth")):
        save(state, folder / name)
        model = load_model(get_model(SMALL), f"file:{name}", folder)
        save(zeros, folder / "other")
        shutil.copyfile(folder / "other", folder / name)
        _same(model, state)


def test_a_file_without_versions_fits_a_model_that_insists_on_one(folder: Path) -> None:
    """MNASNet refuses a state dict that carries no version, and safetensors carry none."""
    state = drawn(torchvision.models.mnasnet0_5)
    safetensors.torch.save_file(state, folder / "own.safetensors")
    _same(load_model(get_model("mnasnet0_5"), "file:own.safetensors", folder), state)


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("quantized_googlenet", 64)])
@pytest.mark.exhaustive
def test_heads_that_only_training_runs_may_be_missing(name: str, size: int, folder: Path) -> None:
    build = torchvision.models.get_model_builder(name)
    state = drawn(build, aux_logits=False, init_weights=False)
    torch.save(state, folder / "own.pth")
    theirs = build(weights=None, aux_logits=False, init_weights=False).eval()
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(x)
        assert torch.equal(load_model(get_model(name), "file:own.pth", folder)(x), expected)
    assert expected.std() > 0
    head = next(key for key in state if key.endswith("fc.weight"))
    torch.save({key: value for key, value in state.items() if key != head}, folder / "other.pth")
    with pytest.raises(WeightsUnavailable, match=r"fc\.weight"):
        load_model(get_model(name), "file:other.pth", folder)


def test_a_users_model_has_no_heads_that_may_be_missing(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(aux1=nn.Conv2d(3, 4, 1), last=nn.ReLU()))

    state = {key: value for key, value in build().state_dict().items() if key != "aux1.weight"}
    torch.save(state, tmp_path / "own.pth")
    entry = user_entry("own", UserModel(build, weights=tmp_path / "own.pth"))
    with pytest.raises(WeightsUnavailable, match=r"aux1\.weight"):
        load_model(entry, "own.pth")


class Shared(nn.Module):
    """A parameter of three modules, assigned in both ways, and a module with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        weight = nn.Parameter(torch.zeros(3, 3, 3, 3))
        self.one.weight = self.two.weight = weight
        self.three.weight = self.two.weight
        self.head = nn.BatchNorm2d(3)
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.again(self.three(self.two(self.head(self.one(x)))))
        return result


def test_files_that_hold_a_shared_tensor_once(tmp_path: Path) -> None:
    trained = Shared().eval()
    for tensor in trained.state_dict().values():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    safetensors.torch.save_model(trained, str(tmp_path / "own.safetensors"))
    entry = user_entry("own", UserModel(Shared, weights=tmp_path / "own.safetensors"))
    x = torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(load_model(entry, "own.safetensors")(x), trained(x), rtol=0, atol=0)
    assert entry.weights_info("DEFAULT").num_params == sum(p.numel() for p in trained.parameters())


@pytest.mark.parametrize("counters", [False, True])
def test_half_precision_files_are_widened(folder: Path, state: OrderedDict[str, Tensor], counters: bool) -> None:
    half = {k: v.half() if v.is_floating_point() or counters else v for k, v in state.items()}
    safetensors.torch.save_file(half, folder / "half.safetensors")
    _same(
        load_model(get_model(SMALL), "file:half.safetensors", folder),
        {k: half[k].float() if v.is_floating_point() else torch.zeros_like(v) for k, v in state.items()},
    )


def test_a_pickle_with_code_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    torch.save({"model": Bomb(tmp_path / "ran")}, folder / "bomb.pth")
    (folder / "bare.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    torch.save(torchvision.models.get_model(SMALL, weights=None), folder / "whole model.pth")
    for name in ("bomb.pth", "bare.pkl", "whole model.pth"):
        with pytest.raises(WeightsUnavailable, match="safetensors") as caught:
            load_model(get_model(SMALL), f"file:{name}", folder)
        assert caught.value.extra["file"] == name
    assert not (tmp_path / "ran").exists()


def test_names_lead_nowhere_else(folder: Path, state: OrderedDict[str, Tensor]) -> None:
    (folder / "sub").mkdir()
    for file in (folder / "own.pth", folder / "sub" / "own.pth", folder.parent / "outside.pth"):
        torch.save(state, file)
    for name in ("sub", "own.pth\x00", "missing.pth"):
        with pytest.raises(UnknownWeights) as caught:
            load_model(get_model(SMALL), f"file:{name}", folder)
        assert caught.value.extra["available"] == ["file:own.pth"]
    for path in ("../outside.pth", "./own.pth", "sub/own.pth", "..", folder / "own.pth"):
        with pytest.raises(UnknownWeights, match=r"ask for one of .*file:NAME"):
            load_model(get_model(SMALL), f"file:{path}", folder)


def test_no_folder_holds_nothing(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        with pytest.raises(UnknownWeights) as caught:
            load_model(get_model(SMALL), "file:own.pth", folder)
        assert caught.value.extra["available"] == []


@pytest.mark.parametrize("damage", [*DAMAGE, "broken safetensors"])
def test_files_that_are_no_state_dict_of_the_model(damage: str, folder: Path, state: OrderedDict[str, Tensor]) -> None:
    if damage == "broken safetensors":
        file = folder / "own.safetensors"
        file.write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    else:
        file = folder / "own.pth"
        torch.save(state, file)
        DAMAGE[damage](file)
    with pytest.raises(WeightsUnavailable) as caught:
        load_model(get_model(SMALL), f"file:{file.name}", folder)
    assert caught.value.extra == {"file": file.name, "folder": str(folder)}
    assert len(caught.value.detail) < 600


UNFIT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda weight: weight.to("meta"), "meta"),
    "sparse": (Tensor.to_sparse, "sparse_coo"),
    "quantized": (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "qint8"),
    "complex": (lambda weight: weight.to(torch.complex64), "complex64"),
    "integers": (Tensor.long, "int64"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Validating sparse", "ignore:TypedStorage")
def test_tensors_that_no_model_computes_with(kind: str, folder: Path, state: OrderedDict[str, Tensor]) -> None:
    """Of the right shape, they would be served with other memory's values or fail at every request."""
    change, said = UNFIT[kind]
    torch.save({**state, "conv1.0.weight": change(state["conv1.0.weight"])}, folder / "own.pth")
    with pytest.raises(WeightsUnavailable, match=rf"conv1\.0\.weight is .*{said}") as caught:
        load_model(get_model(SMALL), "file:own.pth", folder)
    assert caught.value.extra == {"file": "own.pth", "folder": str(folder)}


def test_floats_that_cannot_be_widened(folder: Path, state: OrderedDict[str, Tensor]) -> None:
    weight = torch.empty(state["conv1.0.weight"].shape, dtype=torch.float4_e2m1fn_x2)
    torch.save({**state, "conv1.0.weight": weight}, folder / "own.pth")
    with pytest.raises(WeightsUnavailable, match=r"Float4_e2m1fn_x2"):
        load_model(get_model(SMALL), "file:own.pth", folder)
