"""Models in wrappers, as users have them in hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import timm.utils
import torch
from safetensors.torch import save_file
from torch import nn

from fxcore import UserModel, build_extractor, create_extractor, load_model, model_graph, trace
from fxcore.errors import BadArgument, DuplicateKey, NotTraceable, UnknownNode
from fxcore.models.user_models import user_entry
from fxcore.transforms import remove

X = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()


def model() -> nn.Module:
    made = small()
    with torch.no_grad():
        made(X)
    return made


def compiled_in_place(made: nn.Module) -> nn.Module:
    made.compile()
    return made


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": torch.compile,
    "compile()": compiled_in_place,
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "an average with buffers": lambda m: torch.optim.swa_utils.AveragedModel(m, use_buffers=True),
    "timm's average": timm.utils.ModelEmaV3,
    "timm's older average": timm.utils.ModelEmaV2,
    "several": lambda m: torch.compile(nn.DataParallel(torch.optim.swa_utils.AveragedModel(m))),
}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_the_model_inside_is_traced(name: str) -> None:
    plain = model()
    wrapper = WRAPPERS[name](model()).eval()
    with torch.no_grad():
        expected = plain(X)
        assert torch.equal(create_extractor(wrapper, ["4"], X)(X)["4"], expected)
        assert torch.equal(trace(wrapper)(X), expected)
        inside = nn.Sequential(wrapper, nn.ReLU()).eval()
        traced = trace(inside)
        assert torch.equal(traced(X), expected.relu())
    assert next(n.target for n in traced.graph.nodes if n.op == "call_module") == "0.0"
    assert inside[0] is wrapper


@pytest.mark.parametrize("path", ["module.4", "module._orig_mod.4"])
def test_nodes_may_be_named_by_the_wrappers_paths(path: str) -> None:
    wrapper = nn.DataParallel(model())
    with torch.no_grad():
        assert torch.equal(create_extractor(wrapper, {path: "last"}, X)(X)["last"], model()(X))
        assert torch.equal(create_extractor(wrapper, [path], X)(X)[path], model()(X))
        both = create_extractor(wrapper, {"module.4": "a", "4": "b"}, X)(X)
    assert torch.equal(both["a"], both["b"])
    with pytest.raises(DuplicateKey):
        create_extractor(wrapper, ["4", "4"], X)


def test_a_wrapper_that_computes_something_else_is_kept() -> None:
    class Doubling(nn.DataParallel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) * 2

    with torch.no_grad():
        assert torch.equal(trace(Doubling(model()))(X), model()(X) * 2)


def test_builders_may_return_wrappers() -> None:
    entry = user_entry("wrapped", UserModel(lambda: torch.compile(nn.DataParallel(model()))))
    loaded = load_model(entry, "DEFAULT")
    assert type(loaded) is nn.Sequential
    assert loaded.state_dict().keys() == model().state_dict().keys()


class Parted(nn.Module):
    """Its parts are in wrappers, unless ``plain``."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        parts = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
        if not plain:
            parts = [torch.compile(parts[0]), nn.DataParallel(parts[1]), torch.optim.swa_utils.AveragedModel(parts[2])]  # type: ignore[list-item]
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize(("outer", "same"), [("", True), ("module.", False), ("_orig_mod.", False)])
def test_wrappers_inside_users_models_are_removed(outer: str, same: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain, wrapped = Parted(plain=True).eval(), Parted()
    for target, source in zip(wrapped.state_dict().values(), drawn_like(wrapped), strict=True):
        target.copy_(source)
    values = [value for key, value in wrapped.state_dict().items() if not key.endswith("n_averaged")]
    plain.load_state_dict(dict(zip(plain.state_dict(), values, strict=True)))
    state = {outer + key: value for key, value in wrapped.state_dict().items()}
    assert f"{outer}parts.0._orig_mod.0.weight" in state
    save_file(state, tmp_path / "wrapped.safetensors")
    torch.save(OrderedDict(state), tmp_path / "wrapped.pth")
    given = Parted()
    for name in ("wrapped.safetensors", "wrapped.pth"):
        described = UserModel(lambda: given if same else Parted(), weights=tmp_path / name)
        entry = user_entry("parted", described)
        graph, loaded = model_graph(entry, name), load_model(entry, name)
        assert graph.eval_nodes[-1] == "parts.2.2"
        with torch.no_grad():
            torch.testing.assert_close(
                build_extractor(graph, loaded, graph.resolve(["parts.2.2"])).module(X)["parts.2.2"], plain(X)
            )
    assert type(given.parts[1]) is nn.DataParallel


def drawn_like(model: nn.Module) -> list[torch.Tensor]:
    return [torch.rand_like(t) if t.is_floating_point() else t.clone() for t in model.state_dict().values()]


GONE: dict[str, tuple[Callable[[], object], str]] = {
    "scripted": (lambda: torch.jit.script(model()), "torch.jit.script"),
    "traced": (lambda: torch.jit.trace(model(), X), "torch.jit.trace"),
    "exported": (lambda: torch.export.export(model(), (X,)), "torch.export.export"),
    "the module of an exported one": (lambda: torch.export.export(model(), (X,)).module(), "torch.export.export"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(GONE))
def test_what_has_no_code_left_is_named(name: str) -> None:
    make, advice = GONE[name]
    made = make()
    for call in (lambda: create_extractor(made, ["4"], X), lambda: trace(made), lambda: remove(made)):  # type: ignore[arg-type]
        with pytest.raises(NotTraceable, match="pass the model that was given to") as refused:
            call()
        assert advice in refused.value.extra["advice"]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * 2
        return out


@pytest.mark.parametrize("name", ["layer", "module.layer.*", ["module.layer.*", "mul"]])
def test_groups_and_single_names_in_a_wrapper(name: str | list[str]) -> None:
    plain = Named()
    names = name.removeprefix("module.") if isinstance(name, str) else [one.removeprefix("module.") for one in name]
    with torch.no_grad():
        expected = create_extractor(plain, names, X)(X)
        found = create_extractor(nn.DataParallel(plain), name, X)(X)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_names_in_a_wrapper_that_are_wrong() -> None:
    for wrong, error in ((3, BadArgument), ([3], BadArgument), ({"4": 3}, BadArgument), (["module.9"], UnknownNode)):
        with pytest.raises(error):
            create_extractor(nn.DataParallel(model()), wrong, X)  # type: ignore[arg-type]
