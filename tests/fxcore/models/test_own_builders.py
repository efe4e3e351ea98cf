"""What users' builders return: new modules or the same one each time, whose hooks and attributes refer to it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fxcore import build_extractor, load_model, model_graph
from fxcore.models.descriptions import read_models
from fxcore.models.references import holds_tensors, uncopied_reference
from fxcore.models.user_models import BadUserModel, UserModel, user_entry
from tests.fxcore.hooks import hooked


class Net(nn.Module):
    """A mask that nobody has to give, so that the root is narrowed to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 2, 1)
        self.register_buffer("mean", torch.zeros(1, 4, 1, 1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made: Tensor = self.head(self.conv(x).relu())
        return made if mask is None else made * mask


def with_hook_on_buffer(net: Net) -> Net:
    net.head.register_forward_pre_hook(lambda _, inputs: (inputs[0] - net.mean,))
    return net


def with_hook_on_parameter(net: Net) -> Net:
    net.head.register_forward_hook(lambda _, inputs, output: output * net.scale)
    return net


def with_hook_on_tensor(net: Net) -> Net:
    scale = net.scale
    net.head.register_forward_hook(lambda _, inputs, output: output * scale)
    return net


def with_hook_on_view(net: Net) -> Net:
    mean = net.mean.flatten()[0]
    net.head.register_forward_hook(lambda _, inputs, output: output - mean)
    return net


def with_function(net: Net) -> Net:
    net.forward = lambda x: net.head(net.conv(x) - net.mean) * net.scale  # type: ignore[assignment]
    return net


def with_view(net: Net) -> Net:
    shift = net.mean[:, :2]
    net.shift = shift
    net.forward = MethodType(lambda self, x: self.head(self.conv(x)) - self.shift, net)  # type: ignore[assignment]
    return net


CHANGES: list[Callable[[Net], Net]] = [
    with_hook_on_buffer,
    with_hook_on_parameter,
    with_hook_on_tensor,
    with_hook_on_view,
    with_function,
    with_view,
]

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained() -> dict[str, Tensor]:
    torch.manual_seed(1)
    net = Net()
    return {key: value + 0.5 * torch.rand_like(value) for key, value in net.state_dict().items()}


def served(build: Callable[[], nn.Module], node: str | None, weights: Path | None = None, **described: Any) -> Tensor:
    """Return the value of a node, by default the last, for :data:`X`."""
    model = UserModel(build, weights=weights, preprocessing={"resize_size": 32, "crop_size": 32}, **described)
    entry = user_entry("net", model)
    graph = model_graph(entry, str(entry.default_weights))
    loaded = load_model(entry, str(entry.default_weights))
    result: Tensor = build_extractor(graph, loaded, graph.resolve({node or graph.eval_nodes[-1]: "out"})).module(X)[
        "out"
    ]
    return result


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_hooks_and_views_see_the_weights_of_the_file(change: Callable[[Net], Net], tmp_path: Path) -> None:
    """The reference is a module of the user's own, with its weights loaded as torch does it."""
    state = trained()
    save_file(state, tmp_path / "net.safetensors")
    net = change(Net()).eval()
    net.load_state_dict(state)
    with torch.no_grad():
        expected = net(X)
    made = served(lambda: change(Net()), None, tmp_path / "net.safetensors")
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("change", CHANGES[:-1], ids=lambda f: f.__name__)
@pytest.mark.parametrize("part", [False, True], ids=["the same", "a part of it"])
def test_functions_that_refer_to_a_module_that_must_be_copied_are_refused(
    change: Callable[[Net], Net], part: bool
) -> None:
    net = change(Net())
    with pytest.raises(BadUserModel, match=r"(a hook of '.*head'|forward of .*) refers to the original.*a new one"):
        user_entry("net", UserModel(lambda: nn.Sequential(net) if part else net))


def test_what_a_copy_follows_is_copied(tmp_path: Path) -> None:
    """Bound methods are copied with their module, and so are views."""
    state = trained()
    save_file(state, tmp_path / "net.safetensors")
    loaded, net = with_view(Net()).eval(), with_view(Net()).eval()
    loaded.load_state_dict(state)
    made = served(lambda: net, "sub", tmp_path / "net.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(made, loaded(X))
    assert not net.mean.any()


def test_what_a_copy_of_values_cannot_follow_is_refused(tmp_path: Path) -> None:
    save_file(trained(), tmp_path / "net.safetensors")
    net = Net()
    net.cached = net.scale * 2
    with pytest.raises(BadUserModel, match=r"cannot be copied \(RuntimeError: Only Tensors created explicitly"):
        served(lambda: net, None, tmp_path / "net.safetensors")


def test_references() -> None:
    net = Net()
    net.head.register_forward_hook(lambda _, inputs, output: output * 2)
    net.register_load_state_dict_pre_hook(lambda module, *_: None)
    net.act = functools.partial(torch.clamp, min=0)  # type: ignore[assignment]
    assert uncopied_reference(net) is None
    assert not holds_tensors(net)
    net.act = functools.partial(lambda x, by: x * by, by=net.scale)  # type: ignore[assignment]
    assert uncopied_reference(net) is None
    assert holds_tensors(net)
    net.act = lambda x, by=net.scale: x * by  # type: ignore[assignment]
    assert uncopied_reference(net) == "act of the model"


class Script(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.body = torch.jit.script(body) if how == "script" else torch.jit.trace(body.eval(), torch.rand(1, 8, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(self.conv(x))
        return made


def require_traced_convolutions() -> None:
    """Skip the test on torch 2.11, which has no meta kernel for the convolutions of traced modules."""
    traced = torch.jit.trace(nn.Conv2d(1, 1, 1).eval(), torch.rand(1, 1, 2, 2)).to("meta")
    try:
        traced(torch.empty(1, 1, 2, 2, device="meta"))
    except NotImplementedError:
        pytest.skip("this torch cannot run traced convolutions without weights")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("file", [False, True], ids=["builders", "file"])
def test_torchscript_may_be_kept_whole(how: str, file: bool, tmp_path: Path) -> None:
    if how == "trace":
        require_traced_convolutions()
    model = Script(how).eval()
    weights = tmp_path / "net.safetensors" if file else None
    if weights is not None:
        state = {key: value + 1 for key, value in model.state_dict().items()}
        save_file(state, weights)
        model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(served(lambda: Script(how), "body", weights, leaf_modules=["body"]), model(X))
    with pytest.raises(BadUserModel, match="body is TorchScript, whose copies cannot be moved"):
        served(lambda: model, "body", leaf_modules=["body"])


class Overwriting(nn.Module):
    """Overwrites the output of its convolution in TorchScript, and uses what TorchScript returns or not."""

    def __init__(self, how: str, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)
        made = {
            "layer": lambda: torch.jit.script(nn.ReLU(inplace=True)),
            "block": lambda: torch.jit.script(nn.Sequential(nn.ReLU(inplace=True)).eval()),
            "traced": lambda: torch.jit.trace(nn.ReLU(inplace=True), torch.rand(1, 8, 2, 2)),
        }
        self.act, self.used = made[how](), used

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.act(y)
        result: Tensor = self.head(z + y if self.used else y)
        return result


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("how", "used"), [("layer", True), ("layer", False), ("block", True), ("traced", True)])
def test_torchscript_that_overwrites_its_input(how: str, used: bool) -> None:
    model = Overwriting(how, used).eval()
    with torch.no_grad():
        expected = model(X)
        torch.testing.assert_close(served(lambda: Overwriting(how, used), "head"), expected)
        torch.testing.assert_close(served(lambda: Overwriting(how, used), "conv"), hooked(model, "conv", X))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_a_whole_model_in_torchscript_is_refused() -> None:
    for make in (torch.jit.script, lambda model: torch.jit.trace(model, torch.rand(1, 3, 8, 8))):
        with pytest.raises(BadUserModel, match="is TorchScript, which has no Python code to trace"):
            user_entry("net", UserModel(lambda make=make: make(nn.Sequential(nn.Conv2d(3, 8, 3)).eval())))


class Orthogonal(nn.Module):
    """Has a parametrisation that torch leaves without its base on the meta device, and then cannot read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = parametrizations.orthogonal(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).mean((2, 3)))
        return out


def test_parametrisations_that_need_weights_to_be_built() -> None:
    with torch.no_grad():
        torch.testing.assert_close(served(Orthogonal, "head"), Orthogonal().eval()(X))


def parsing() -> nn.Module:
    argparse.ArgumentParser().parse_args(["--unknown"])
    return nn.ReLU()


def test_scripts_that_end_the_process_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadUserModel, match=r"ends the process \(SystemExit: 2\).*takes its settings as arguments"):
        user_entry("net", UserModel(parsing))
    (tmp_path / "script_for_tests.py").write_text("raise SystemExit(2)")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models.toml").write_text("[models.net]\nbuilder = 'script_for_tests:build'")
    error = dict(read_models(tmp_path))["net"]
    assert isinstance(error, BadUserModel)
    assert "builder script_for_tests:build cannot be imported: SystemExit: 2" in error.detail
    assert "script_for_tests" not in sys.modules
