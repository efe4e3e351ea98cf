"""Eager: folded and in place, yet the same values, and little memory."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxcore import build_extractor, get_model, load_model, model_graph, trace
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, LoweringFailed, Options
from fxcore.backends.eager import EagerModule, activations_in_place
from tests.fxcore.backends.conftest import Build
from tests.fxcore.model_list import SWEPT
from tests.fxcore.written import Of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "nodes"),
    [
        ("resnet18", ["layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu"]),
        ("mobilenet_v3_small", ["features.0", "features.4.block.1", "C4", "C5"]),
        pytest.param("googlenet", ["inception3a"], marks=SWEPT),
    ],
)
def test_values_stay(extractor: Build, batch: torch.Tensor, model: str, nodes: list[str]) -> None:
    plain = extractor(model, *nodes)
    before = {key: value.clone() for key, value in plain.module(batch).items()}
    lowered = BACKENDS["eager"].lower(plain.module, (batch[:2],), Options())
    found = verify(plain.module, lowered, batch)
    assert found.relative < 1e-5, found
    # The module that it was made from, whose submodules others share, does what it did.
    assert all(torch.equal(value, before[key]) for key, value in plain.module(batch).items())


def test_batch_norms_are_folded(extractor: Build) -> None:
    lowered = EagerModule(extractor("resnet18", "layer4").module)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in lowered.module.modules())
    # A tapped convolution keeps its own value, so its batch norm stays.
    tapped = EagerModule(extractor("resnet18", "layer4.0.conv1", "layer4").module)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in tapped.module.modules()) == 1


def test_what_is_folded_is_shared(extractor: Build) -> None:
    """Thirty extractors hold the folded weights once."""
    many = [EagerModule(extractor("resnet18", node).module) for node in ("layer4", "layer3", "C5", "layer4.0")]
    together: dict[int, int] = {}
    for one in many:
        together |= one.storages()
    largest = max(sum(one.storages().values()) for one in many)
    assert 40e6 < largest <= sum(together.values()) < 1.01 * largest


@pytest.mark.parametrize("hooked", [0, 1])
def test_what_a_hook_does_stays(hooked: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    model[hooked].register_forward_hook(lambda m, given, made: 3 * made - 1)
    module = fx.symbolic_trace(model)
    module.graph.find_nodes(op="output")[0].args = ({"out": list(module.graph.nodes)[-2]},)
    module.recompile()
    x = torch.randn(2, 3, 8, 8)
    assert verify(module, EagerModule(module), x).relative < 1e-5


def test_what_was_folded_with_a_batch_norm_that_is_gone_is_not_the_convolution_alone() -> None:
    conv = nn.Conv2d(3, 4, 1).eval()
    with_norm = fx.symbolic_trace(nn.Sequential(conv, nn.BatchNorm2d(4)).eval())
    norm = with_norm.get_submodule("1")
    norm.running_mean.fill_(3)
    gone = weakref.ref(norm)
    x = torch.randn(2, 3, 5, 5)
    lowered = EagerModule(with_norm)
    assert torch.allclose(lowered(x), conv(x) - 3, atol=1e-4)
    del with_norm, norm
    gc.collect()
    assert gone() is None
    assert torch.allclose(EagerModule(fx.symbolic_trace(nn.Sequential(conv)))(x), conv(x), atol=1e-5)


def test_activations_are_in_place_where_nothing_else_reads_the_value(extractor: Build) -> None:
    def in_place(*nodes: str) -> int:
        module = EagerModule(extractor("resnet18", *nodes).module).module
        return sum(getattr(m, "inplace", False) for m in module.modules())

    assert in_place("layer1.0.conv1", "layer1.1.relu_1") > 0  # of the batch norm that stays
    one = EagerModule(extractor("resnet18", "layer1.0.bn1", "layer1.0.relu").module).module
    tapped = next(n for n in one.graph.nodes if n.meta.get("path") == "layer1.0.relu")
    assert not getattr(one.get_submodule(str(tapped.target)), "inplace", False)


def test_a_convolution_that_is_called_more_than_once() -> None:
    """As a pyramid's head is, on each of its maps."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = m.conv(x)
        return {"first": first, "twice": m.relu(m.conv(first)), "sum": m.conv(2 * x) + (x + 1)}

    model = Of(forward, conv=nn.Conv2d(3, 3, 3, padding=1), relu=nn.ReLU()).eval()
    lowered = EagerModule(fx.symbolic_trace(model))
    assert len(lowered.storages()) <= 2  # one weight; the bias is the model's own
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(lowered(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_view_is_never_overwritten() -> None:
    """ReLU of a view would overwrite what the view is of."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        total = x + 1
        return {"a": m.relu(total.flatten(1)), "b": total}

    module = fx.symbolic_trace(Of(forward, relu=nn.ReLU()).eval())
    activations_in_place(module)
    x = torch.full((1, 2, 2), -3.0)
    assert torch.equal(module(x)["b"], x + 1)


@pytest.mark.exhaustive
def test_int8_is_for_cpus_and_smaller_than_float32(extractor: Build, batch: torch.Tensor) -> None:
    """A quarter of the weights' bytes, beside scales and biases; the values are those of fxcore.quantize."""
    made = extractor("resnet18", "C3")
    rows = [(row[None],) for row in batch]
    lowered = BACKENDS["eager"].lower(made.module, (batch,), Options(precision="int8", calibration=rows))
    weights = sum(p.nbytes for name, p in made.module.named_parameters() if "conv" in name or "downsample.0" in name)
    assert sum(lowered.storages().values()) == pytest.approx(weights / 4, rel=0.05)
    assert verify(made.module, lowered, batch).cosine > 0.99
    assert "int8" in (BACKENDS["eager"].unavailable(torch.device("cuda"), "int8") or "")
    with pytest.raises(LoweringFailed, match="calibrate"):
        BACKENDS["eager"].lower(made.module, (batch,), Options(precision="int8"))
    assert BACKENDS["eager"].unavailable(CPU, "bfloat16") is None


@pytest.mark.exhaustive
def test_sequences_of_3d_convolutions() -> None:
    """Only 2D weights have the format channels_last."""
    graph = model_graph("s3d")
    made = build_extractor(graph, load_model(get_model("s3d"), "random"), graph.resolve(["features.3"]))
    x = torch.rand(1, 3, 14, 64, 64)
    assert verify(made.module, BACKENDS["eager"].lower(made.module, (x,), Options()), x).relative < 1e-5


@fx.wrap
def matmul(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    return x if y is None else x @ y


class Aliasing(nn.Linear):
    """A linear layer that returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Quiet(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("how", ["function", "layer", "activation", "out"])
def test_what_users_name_like_torch_may_return_its_input(how: str) -> None:
    """What returns memory that others read is recognised neither by name nor by its base class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Aliasing(2, 2) if how == "layer" else Quiet()
            self.relu = nn.ReLU()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = x - 1
            if how == "function":
                same = matmul(h, None)
            elif how == "out":
                same = torch.add(x, 1, out=h)
            else:
                same = self.layer(h)
            return {"h": h, "relu": self.relu(same) if how == "layer" else F.relu(same)}

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model, x = Model().eval(), torch.rand(2, 2) - 2
    module = fx.GraphModule(model, Tracer().trace(model))
    with torch.no_grad():
        expected = {key: value.clone() for key, value in model(x).items()}
    activations_in_place(module)
    assert all(torch.equal(value, expected[key]) for key, value in module(x).items())


def applied_then_relu(function: Any, weight: torch.Tensor) -> Any:
    return lambda x: F.relu(function(x, weight))


def test_functions_of_torch_make_new_memory() -> None:
    weight = torch.rand(2, 2)
    for function in (torch.matmul, operator.add, operator.matmul, F.linear, torch.sub, torch.mul):
        module = fx.symbolic_trace(applied_then_relu(function, weight))
        activations_in_place(module)
        [relu] = module.graph.find_nodes(op="call_function", target=F.relu)
        assert relu.kwargs == {"inplace": True}, function


def test_what_was_folded_before_the_weights_changed_is_not_used_again() -> None:
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).eval() for _ in range(2))
    x = torch.randn(1, 3, 8, 8)
    module = trace(model)
    before = BACKENDS["eager"].lower(module, (x,), Options())
    model.load_state_dict(other.state_dict())
    after = BACKENDS["eager"].lower(module, (x,), Options())
    with torch.no_grad():
        torch.testing.assert_close(after(x), other(x), rtol=1e-4, atol=1e-5)
    assert before is not after
