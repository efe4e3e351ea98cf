"""Parts of modules in memory that begin at inner nodes, against the whole module run by torch.

What the parts begin at is what forward hooks see.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxcore
from fxcore.errors import BadTensor, FxError
from fxcore.graph.cut import OpenCut
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.model_part import ModelPart
from fxcore.models.user_models import UserModel, user_entry


class Layers(nn.Module):
    """Layers that every module here has; modules without parameters mark the values to begin at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.point = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.first, self.last, self.book = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(16, 8)
        self.mark, self.mark2, self.end = nn.Tanh(), nn.Sigmoid(), nn.Softsign()
        self.eval()


def seen(module: nn.Module, names: list[str], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the parts ``names`` return in a run of ``module`` itself, before anything overwrites it, and its result."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda m, i, o: found.update({name: copy.deepcopy(o)})

    handles = [module.get_submodule(name).register_forward_hook(note(name)) for name in names]
    with torch.no_grad():
        result = module(x.clone())
    for handle in handles:
        handle.remove()
    return found, result


def back(module: nn.Module, begin: list[str], x: Tensor, **leaves: Any) -> fx.GraphModule:
    return fxcore.create_extractor(module, {"end": "end"}, x, inputs=begin, **leaves)


def assert_same(module: nn.Module, half: fx.GraphModule, begin: list[str], x: Tensor) -> None:
    given, expected = seen(module, begin, x)
    with torch.no_grad():
        found = half(**given)["end"]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Masked(Layers):
    """The mask does not come from ``first``, and a part of it is assigned."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x)
        mask = self.mark(x) @ self.mark(x).mT > 0
        mask[:, :, 0] = True
        return self.end(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


class Bordered(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h[:, -1:] = 0
        return self.end(self.point(h) + h)


def fill(value: Tensor, other: Tensor) -> None:
    value[:, 0] = other[:, 0]


class Filled(Layers):
    """A function that returns nothing writes to a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mark(self.first(x))
        fill(h, self.mark2(x))
        return self.end(self.last(h))


def brightness(value: Tensor) -> float:
    return value.mean().item()


class Scaled(Layers):
    """A function reads a number from values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.first(x)) * brightness(self.mark2(x)))


LEAVES = {Filled: [fill], Scaled: [brightness]}


@pytest.mark.parametrize(
    ("module", "begin", "missing", "shape"),
    [
        (Masked(), ["first"], ["gt"], (2, 5, 8)),
        (Bordered(), ["point"], ["conv"], (2, 3, 6, 6)),
        (Filled(), ["mark"], ["mark2"], (2, 5, 8)),
        (Scaled(), ["mark"], ["mark2"], (2, 5, 8)),
    ],
)
def test_values_that_come_with_no_tensor_leave_a_cut_open(
    module: nn.Module, begin: list[str], missing: list[str], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    with pytest.raises(OpenCut) as caught:
        back(module, begin, x, leaf_functions=LEAVES.get(type(module), []))
    assert caught.value.extra["missing"] == missing


def test_a_write_behind_the_cut_is_done_in_the_part() -> None:
    module, x = Masked(), torch.randn(2, 5, 8)
    half = back(module, ["first", "gt"], x)
    given, expected = seen(module, ["first"], x)
    with torch.no_grad():
        mask = module.mark(x) @ module.mark(x).mT > 0
        torch.testing.assert_close(half(**given, gt=mask)["end"], expected, rtol=0, atol=1e-6)
    bordered, image = Bordered(), torch.randn(2, 3, 6, 6)
    for begin in (["conv"], ["point", "conv"]):
        assert_same(bordered, back(bordered, begin, image), begin, torch.randn(3, 3, 6, 6))
    filled = Filled()
    assert_same(filled, back(filled, ["mark", "mark2"], x, leaf_functions=[fill]), ["mark", "mark2"], x)


class Codes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


class Quantized(Layers):
    """Embeddings of codes get the dtype of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Codes()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.book(self.codes(self.first(x))).to(x.dtype))


class Doubled(Layers):
    """It accumulates in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end((self.mark(self.first(x).double()) * 7).to(x.dtype))


@pytest.mark.parametrize(
    ("module", "begin", "node"), [(Quantized(), "codes", "codes.argmax"), (Doubled(), "mark", "mark")]
)
def test_the_dtype_of_the_module_s_inputs_is_not_that_of_other_values(module: nn.Module, begin: str, node: str) -> None:
    half = back(module, [node], torch.randn(2, 5, 8))
    given, expected = seen(module, [begin], torch.randn(3, 5, 8))
    with torch.no_grad():
        found = half(given[begin])["end"]
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def described(module: nn.Module, name: str) -> ModelGraph:
    user = UserModel(lambda: copy.deepcopy(module), preprocessing={"crop_size": 32, "resize_size": 32})
    return fxcore.model_graph(user_entry(name, user))


class Accumulated(Layers):
    """``mark`` has values in float64, whatever dtype the parameters have, and so has ``mark2``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mark(self.conv(x).double())
        return self.end(self.point(self.mark2(h.cumsum(1)).to(x.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_converted_as_the_model_converts_their_values(dtype: torch.dtype) -> None:
    """Requests send inputs in the dtype of the parameters."""
    module = Accumulated().to(dtype)
    graph = described(Accumulated(), "accumulated")
    nodes = {"mark2": "mark2", "end": "end"}
    half = fxcore.build_extractor(graph, module, nodes, dtype, inputs={"mark": "mark"})
    assert [output.dtype for output in half.outputs] == ["float64", str(dtype).removeprefix("torch.")]
    given = torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        found = half.module(given)
        second = given.double().cumsum(1).sigmoid()
        expected = {"mark2": second, "end": module.end(module.point(second.to(dtype)))}
    torch.testing.assert_close(found, expected)


class SequenceFirst(Layers):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        h = self.mark(self.first(x).transpose(0, 1))  # [L, N, C]
        return self.end(self.last(h.sum(0)) * n)


def test_rows_are_counted_along_the_dimension_that_has_them() -> None:
    module = SequenceFirst()
    half = back(module, ["mark"], torch.randn(2, 5, 8))
    for shape in [(2, 5, 8), (6, 5, 8), (3, 9, 8), (1, 1, 8)]:
        assert_same(module, half, ["mark"], torch.randn(shape))


class Clips(Layers):
    """Its rows have five frames each."""

    def forward(self, x: Tensor) -> Tensor:
        rows, frames = x.shape[:2]
        h = self.mark(self.first(x.flatten(0, 1)))
        return self.end(h.view(rows, frames, -1).mean(1) * rows)


def test_several_rows_of_a_value_for_one_of_the_input() -> None:
    module = Clips()
    half = back(module, ["mark"], torch.randn(2, 5, 8))
    for rows in (1, 2, 6):
        assert_same(module, half, ["mark"], torch.randn(rows, 5, 8))
    with pytest.raises(BadTensor, match="multiple of 5, but is 14"):
        half(seen(module, ["mark"], torch.randn(2, 7, 8))[0]["mark"])


class Pooled(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.first(x).mean(0)) * x.shape[0])


def test_a_value_without_rows_cannot_count_them() -> None:
    module, x = Pooled(), torch.randn(2, 5, 8)
    with pytest.raises(OpenCut) as caught:
        back(module, ["mark"], x)
    assert caught.value.extra["missing"] == ["x"]
    half, y = back(module, ["mark", "x"], x), torch.randn(7, 5, 8)
    given, expected = seen(module, ["mark"], y)
    with torch.no_grad():
        torch.testing.assert_close(half(**given, x=y)["end"], expected, rtol=0, atol=1e-6)


class Mean(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.first(x)).sum(1) / x.shape[1])


class Share(Layers):
    """A float that is computed from a size."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.first(x)).sum(1) * (1.0 / x.shape[1]))


class Everything(Layers):
    """The number of rows times another size."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.first(x)).sum((0, 1)) / (x.numel() / 8))


@pytest.mark.parametrize("module", [Mean(), Share(), Everything()])
def test_a_part_with_constant_sizes_refuses_others(module: nn.Module) -> None:
    half = back(module, ["mark"], torch.randn(2, 5, 8))
    for rows in (1, 2, 6):
        assert_same(module, half, ["mark"], torch.randn(rows, 5, 8))
    given, _ = seen(module, ["mark"], torch.randn(2, 10, 8))
    with pytest.raises(FxError, match=r"mark must have the sizes \[any, 5, 8\].* \[2, 10, 8\]"):
        half(**given)
    with pytest.raises(BadTensor, match=r"\[5, 8\]"):
        half(torch.randn(5, 8))


class Tokens(Layers):
    """An image model whose mask is compared and assigned beside its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        q, mask = self.first(t), t @ t.transpose(1, 2) > 0
        mask[:, :, 0] = True
        return self.end(F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


def test_an_image_model_s_cut_is_closed_by_floating_point_values() -> None:
    graph, module = described(Tokens(), "tokens"), Tokens()
    with pytest.raises(OpenCut) as caught:
        ModelPart(graph, {"first": "first"}, {"end": "end"})
    assert caught.value.extra["missing"] == ["matmul"]
    inputs = {"first": "first", "matmul": "matmul"}
    half = fxcore.build_extractor(graph, module, {"end": "end"}, inputs=inputs)
    x = torch.randn(2, 3, 32, 32)
    given, expected = seen(module, ["patches", "first"], x)
    with torch.no_grad():
        tokens = given["patches"].flatten(2).transpose(1, 2)
        found = half.module(given["first"], tokens @ tokens.transpose(1, 2))["end"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Brightness(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mark(self.conv(x)).sum((2, 3)) * (1.0 / (x.shape[2] * x.shape[3])))


def test_a_float_of_the_image_s_size_makes_a_part_of_one_size() -> None:
    part = ModelPart(described(Brightness(), "brightness"), {"mark": "mark"}, {"end": "end"})
    assert part.inputs[0].shape == (None, 4, 32, 32)
