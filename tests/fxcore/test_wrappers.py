"""Models in wrappers, as users have them in hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm.utils
import torch
from torch import nn

from fxcore import UserModel, create_extractor, load_model, trace
from fxcore.errors import DuplicateKey, NotTraceable
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


@pytest.mark.parametrize("path", ["module.4", "_orig_mod.4", "4", "module._orig_mod.4"])
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
