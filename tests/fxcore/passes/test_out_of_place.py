"""Writes (HAZARDS 4), also through views: a node's value is what it was when the node ran, and whoever reads the memory
later, by whatever name, sees what was written.

The reference is the model run eagerly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchvision.ops import stochastic_depth

from fxcore import build_extractor, create_extractor, trace
from fxcore.graph.model_graph import trace_graph
from fxcore.transforms import CannotTransform, applied, fold_constants, out_of_place
from tests.fxcore.conftest import OwnEntry

same = nn.Identity()


def exported(function: Callable[[Tensor], object]) -> Callable[[Tensor], fx.GraphModule]:
    """Make a graph as ``make_fx`` does, by torch.export."""
    module = nn.Module()
    module.forward = function
    return lambda x: torch.export.export(module, (x,)).graph_module


@fx.wrap
def hidden_write(x: Tensor, by: float) -> Tensor:
    x[:, 0] += by
    return x


@fx.wrap
def hidden_write_into_both(x: Tensor, part: Tensor) -> None:
    x.mul_(2)
    part.add_(1)


@fx.wrap
def hidden_view(x: Tensor) -> Tensor:
    return x[:, 1:3]


@fx.wrap
def hidden_write_and_view(x: Tensor) -> Tensor:
    return x.add_(1)[:, 1:3]


@fx.wrap
def hidden_write_into_second(y: Tensor, x: Tensor) -> Tensor:
    x.mul_(2)
    return y + 1


@fx.wrap
def hidden_write_without_result(x: Tensor) -> None:
    x.neg_()


def without_a_user(y: Tensor) -> Tensor:
    y.mul_(3)  # pytorch#68301: it would be dropped as dead code
    return y


def chain(y: Tensor) -> Tensor:
    y.add_(1).mul_(2)
    y.sub_(0.5)
    return F.relu(y, True)


def out_argument(y: Tensor) -> Tensor:
    torch.add(y, 1, out=y)
    return y


def second_argument(y: Tensor) -> Tensor:
    return y + hidden_write_into_second(torch.relu(y), y)


def no_result(y: Tensor) -> Tensor:
    hidden_write_without_result(y)
    return y


def underscored(y: Tensor) -> Tensor:
    return torch.relu_(y) + F.hardtanh_(y)


def compared_in_place(y: Tensor) -> Tensor:
    """An in-place comparison keeps the dtype."""
    mask = (y * 1).gt_(0.5)
    return y + mask + mask + (y * 2).logical_not_() * 3 + mask.mean(1, keepdim=True)


def base_of_a_slice_by_a_computed_size(y: Tensor) -> Tensor:
    half = y.size(2) // 2
    y[:, :, :half].mul_(3)
    part = y[:, y.size(1) // 2]
    part += 1
    return y


def summed_in_place(y: Tensor) -> Tensor:
    """An in-place sum keeps the dtype."""
    counts = (y > 0).int()
    counts.cumsum_(1)
    return y * (counts // 2) + counts.to(torch.int8)


def base_of_a_slice_of_a_slice(y: Tensor) -> Tensor:
    y[:, 1:][:, :, 3:].add_(1)
    return y


def base_of_a_flattened_one(y: Tensor) -> Tensor:
    y.flatten(2)[..., ::3].neg_()
    return y


def flattened_before(y: Tensor) -> Tensor:
    flat = y.flatten(1)
    F.relu(y, inplace=True)
    return flat.view(y.shape) * 2


def the_same(y: Tensor) -> Tensor:
    other = same(y)
    y.relu_()
    return other


def the_same_written(y: Tensor) -> Tensor:
    same(y).relu_()
    return y


def overlapping(y: Tensor) -> Tensor:
    a, b = y[:, :3], y[:, 1:]
    a.mul_(2)
    b.add_(1)
    a.sub_(0.5)
    return torch.cat([b[:, :2], a[:, :2]], 1)


def result_kept(y: Tensor) -> Tensor:
    written = y[:, :2].add_(1)
    y.mul_(2)
    return torch.cat([written, y[:, 2:]], 1)


def without_a_pure_name(y: Tensor) -> Tensor:
    y[:, 0].zero_()
    y[:, 1].fill_(3.0)
    y[:, 2:3].copy_(y[:, 3:])
    return y


def through_a_copy(y: Tensor) -> Tensor:
    y.permute(0, 2, 3, 1).flatten(1).relu_()  # flatten has to copy here: nothing is written to y
    return y


def hidden_and_read_by_a_view(y: Tensor) -> Tensor:
    part = y[:, :2]
    z = hidden_write(y, 2.0)
    part.mul_(3)
    return y + z


def hidden_in_two_views(y: Tensor) -> Tensor:
    part = y[:, 1:3]
    hidden_write_into_both(y, part)
    return y


def views_that_are_hidden(y: Tensor) -> Tensor:
    part = hidden_view(y)
    y.neg_()
    return torch.cat([part, part], 1)


def augmented_beside_another_name(y: Tensor) -> Tensor:
    before = y
    y += y.mean(1, keepdim=True)
    before -= 0.5
    return y * 2 + before


def augmented_in_a_list(y: Tensor) -> Tensor:
    maps = [y]
    top = maps[-1]
    top *= 0.5
    return maps[0] - top.relu() * 2


def augmented_slices(y: Tensor) -> Tensor:
    part, (a, b) = y[:, 1:3], y.chunk(2, 1)
    part /= 3
    a -= b
    b **= 2
    return y * 1


def augmented_items(y: Tensor) -> Tensor:
    y[:, 0] += 2
    y[..., ::2] *= -1
    y.data += 1
    return y


def assigned_items(y: Tensor) -> Tensor:
    rows, before = y.size(2) // 2, y[:, 0]
    y[:, 0, :rows] = 0
    y[y > 0.5] = 0.5
    y[:, 1] = before
    return y


def augmented_sizes(y: Tensor) -> Tensor:
    channels = y.size(1)
    same = channels
    channels *= 2
    channels -= 1
    return y * channels + same


def augmented_keeps_its_type(y: Tensor) -> Tensor:
    y *= torch.tensor([1.5, -2.0, 0.5, 3.0], dtype=torch.float64).view(4, 1, 1)
    return y


def augmented_constant(y: Tensor) -> Tensor:
    total = torch.ones(1, 4, 1, 1)
    same = total
    total += y.mean((0, 2, 3), keepdim=True)
    return y * total + same


KNOWN: list[Callable[[Tensor], Tensor]] = [
    *(augmented_beside_another_name, augmented_constant, augmented_in_a_list, augmented_items),
    *(augmented_keeps_its_type, augmented_sizes, augmented_slices, assigned_items),
    *(base_of_a_slice_by_a_computed_size, summed_in_place, base_of_a_slice_of_a_slice),
    *(base_of_a_flattened_one, flattened_before, the_same, the_same_written, overlapping, result_kept),
    *(without_a_pure_name, compared_in_place, without_a_user, chain, out_argument, underscored),
]
ANNOTATED = [
    *KNOWN,
    *(through_a_copy, hidden_and_read_by_a_view, hidden_in_two_views, views_that_are_hidden, second_argument),
    *(no_result, nn.ReLU(inplace=True), nn.Hardtanh(-0.1, 0.1, inplace=True)),
]


class Model(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.same, self.last = nn.Conv2d(3, 4, 3), same, nn.Conv2d(4, 2, 1)
        self.write = copy.deepcopy(write)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self.first(x)))


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("write", ANNOTATED, ids=lambda f: getattr(f, "__name__", None))
def test_extractors_read_what_was_written(write: Callable[[Tensor], Tensor], own_entry: OwnEntry) -> None:
    model, graph = Model(write).eval(), trace_graph(own_entry(lambda: Model(write)))
    with torch.no_grad():
        first, expected = model.first(image()), model(image())
        for part in model.modules():  # as load_model leaves it
            if getattr(part, "inplace", False):
                part.inplace = False
        module = build_extractor(graph, model, graph.resolve(["first", "last"])).module
        for layout in (torch.contiguous_format, torch.channels_last):
            values = module.to(memory_format=layout)(image().to(memory_format=layout))
            torch.testing.assert_close(values["first"], first)
            torch.testing.assert_close(values["last"], expected)
        # Every node gives alone what it gives in company.
        names = [node.name for node in graph.nodes if node.extractable]
        together = build_extractor(graph, model, graph.resolve(names)).module(image())
        for name in names:
            assert torch.equal(
                build_extractor(graph, model, graph.resolve([name])).module(image())[name], together[name]
            )


class Assigning(nn.Module):
    """Its last operations assign items."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        y[:, :2] = 0
        y[:, 1:3] = 1
        return y


def test_assignments_have_the_value_after_them(own_entry: OwnEntry) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), Assigning())

    model, graph, x = build().eval(), trace_graph(own_entry(build)), image()
    nodes = graph.resolve({"1": "last", "1.setitem": "before", "1.mul": "doubled"})
    assert nodes["last"] == "1.setitem_1"
    assert graph.by_name["1.setitem"].meta["axes"] == "NCHW"
    with torch.no_grad():
        values = build_extractor(graph, model, nodes).module(x)
        doubled = 2 * model[0](x)
        torch.testing.assert_close(values["doubled"], doubled)
        doubled[:, :2] = 0
        torch.testing.assert_close(values["before"], doubled)
        torch.testing.assert_close(values["last"], model(x))
        assert torch.equal(create_extractor(model, {"1": "last"}, x)(x)["last"], values["last"])


@pytest.mark.parametrize("write", KNOWN, ids=lambda f: f.__name__)
def test_so_does_a_graph_that_is_not_annotated(write: Callable[[Tensor], Tensor]) -> None:
    model = Model(write).eval()
    pure = out_of_place(trace(model))
    with torch.no_grad():
        torch.testing.assert_close(trace(model)(image()), model(image()), rtol=0, atol=0)
        torch.testing.assert_close(pure(image()), model(image()), rtol=0, atol=0)
    again = out_of_place(pure)
    assert applied(again)[-1].changes == 0
    assert len(again.graph.nodes) == len(pure.graph.nodes)


def aten_writes(x: Tensor) -> tuple[Tensor, ...]:
    doubled = x * 2
    row = doubled[:, :2]
    row.add_(1)
    doubled.relu_()
    moved = doubled.t().unsqueeze(0)
    moved.mul_(row.t().sum())
    fresh = torch.relu(x)
    fresh.sub_(x).clamp_(-1, 1)
    return doubled, row, moved, fresh


@pytest.mark.parametrize("make", [make_fx, exported], ids=["make_fx", "export"])
def test_so_does_a_graph_of_aten_operators(make: Callable[..., Callable[[Tensor], fx.GraphModule]]) -> None:
    x = torch.randn(3, 4)
    graph = make(aten_writes)(x)
    assert any(node.target is torch.ops.aten.add_.Tensor for node in graph.graph.nodes)
    pure = out_of_place(graph)
    assert applied(pure)[-1].changes == 5
    for found, expected in zip(pure(x), aten_writes(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    first = next(node for node in pure.graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    output = pure.graph.output_node()
    output.args = ((first, *output.args[0]),)
    pure.recompile()
    assert torch.equal(pure(x)[0], x * 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "adjoint": lambda y: y.adjoint(),
    "alpha dropout": lambda y: F.alpha_dropout(y),
    "atleast_1d": lambda y: torch.atleast_1d(y),
    "broadcast_to": lambda y: torch.broadcast_to(y, y.shape),
    "dropout": lambda y: F.dropout(y, 0.1, False),
    "dropout2d": lambda y: F.dropout2d(y, training=False),
    "dropout of nothing": lambda y: F.dropout(y, p=0),
    "dsplit": lambda y: torch.dsplit(y, 2)[1],
    "hsplit": lambda y: y.hsplit(2)[0],
    "moveaxis": lambda y: y.moveaxis(1, 2),
    "positive": lambda y: +y,
    "ravel": lambda y: y.ravel(),
    "real": lambda y: torch.real(y),
    "unsafe_split": lambda y: torch.unsafe_split(y, 1)[0],
    "view_as_real": lambda y: torch.view_as_real(torch.view_as_complex(y.view(2, 4, 3, 2, 2))),
    "vsplit": lambda y: y.vsplit(2)[0],
    # Not views, but copies.
    "unfold": lambda y: F.unfold(y, 1),
    "items at numbers": lambda y: y[[1, 0]],
}


def writes_around(view: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A write to a value of which ``view`` is read later, and a write to ``view`` of a value that is read later."""

    def write_to_all(x: Tensor) -> Tensor:
        y = x * 2
        part = view(y)
        y.neg_()
        return part * 1

    def write_to_view(x: Tensor) -> Tensor:
        y = x * 2
        view(y).neg_()
        return y * 1

    return write_to_all, write_to_view


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_known_by_their_names(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 4, 6, 2)
    write_to_all, write_to_view = writes_around(view)
    for compute in (write_to_all, write_to_view):
        expected = compute(x)
        if view is not VIEWS["broadcast_to"] or compute is write_to_all:
            torch.testing.assert_close(out_of_place(trace(compute))(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.float(),
        lambda y: y.to(torch.float32),
        lambda y: y.type_as(y),
        lambda y: y.cpu(),
        lambda y: stochastic_depth(y, 0.1, "row", training=False),
        lambda y: torch.broadcast_tensors(y, y.mean())[0],
        lambda y: hidden_view(y),
    ],
)
def test_what_may_be_a_view_or_a_copy_is_reported(view: Callable[[Tensor], Tensor]) -> None:
    for compute in writes_around(view):
        with pytest.raises(CannotTransform, match=r"which is read later, may share; let the model clone\(\)"):
            out_of_place(trace(compute))

    def write_to_what_is_not_read_later(x: Tensor) -> Tensor:
        y = view(x * 2)
        y.neg_()
        return y * 1

    x = torch.randn(2, 4, 6, 2)
    compute = write_to_what_is_not_read_later
    torch.testing.assert_close(out_of_place(trace(compute))(x), compute(x), rtol=0, atol=0)


def test_untrackable_writes_are_reported(own_entry: OwnEntry) -> None:
    def write(y: Tensor) -> Tensor:
        part = hidden_write_and_view(y)
        y.mul_(2)
        return torch.cat([part, y[:, :2]], 1)

    graph = trace_graph(own_entry(lambda: Model(write)))
    with pytest.raises(CannotTransform, match=r"^mul_ overwrites memory that hidden_write_and_view reads too.*clone"):
        build_extractor(graph, Model(write).eval(), graph.resolve(["last"]))


@pytest.mark.parametrize("write", [lambda x: x.zero_(), lambda x: x.copy_(x + 1), lambda x: x.normal_()])
def test_what_has_no_pure_name_writes_to_a_copy(write: Callable[[Tensor], Tensor]) -> None:
    pure = out_of_place(fx.symbolic_trace(lambda x: (write(x), x.exp())).eval())
    assert applied(pure)[-1].changes == 1
    x = image()
    torch.manual_seed(2)
    written, later = pure(x)
    assert torch.equal(x, image())
    torch.manual_seed(2)
    assert torch.equal(written, write(x))
    assert torch.equal(later, x.exp())


def test_what_is_no_write_stays() -> None:
    module = fx.symbolic_trace(lambda x: x.mul(2).requires_grad_(False)).eval()
    assert applied(out_of_place(module))[-1].changes == 0
    assert torch.equal(out_of_place(module)(torch.ones(2)), torch.full((2,), 2.0))


def test_what_was_overwritten_once_can_be_folded(own_entry: OwnEntry) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.linspace(-1, 1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.bias * 2).relu_().view(3, 1, 1)

    model, graph = Biased().eval(), trace_graph(own_entry(Biased))
    folded = fold_constants(build_extractor(graph, model, graph.resolve(["add"])).module)
    assert [n.op for n in folded.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
    with torch.no_grad():
        assert torch.equal(folded(image())["add"], model(image()))


@pytest.mark.parametrize("view", [lambda y: y[0], lambda y: y.view(-1), lambda y: y.detach()])
@pytest.mark.parametrize(
    "reshape", [lambda y: y.transpose_(0, 1), lambda y: y.unsqueeze_(1), lambda y: torch.as_strided_(y, (6,), (1,))]
)
def test_reshapes_in_place_leave_other_views_as_they_are(
    view: Callable[[Tensor], Tensor], reshape: Callable[[Tensor], Tensor]
) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        other = view(y)
        reshape(y)
        return other, y * 3

    x = torch.randn(2, 3)
    for found, expected in zip(out_of_place(trace(model))(x), model(x), strict=True):
        assert torch.equal(found, expected)


def test_reshapes_in_place_of_what_may_be_another_value_are_reported() -> None:
    module = trace(lambda x: (F.dropout(y := x * 2, training=False), y.transpose_(0, 1)))
    with pytest.raises(CannotTransform, match=r"that dropout, .* may be; let the model call transpose\(\) instead$"):
        out_of_place(module)


@pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: F.relu_(y)])
def test_writes_to_what_was_reshaped_beside_a_view_are_reported(write: Callable[[Tensor], Tensor]) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        other = y[0]
        y.transpose_(0, 1)
        write(y)
        return other, y

    with pytest.raises(CannotTransform, match=r"that transpose_ reshaped .* call transpose\(\) instead$"):
        out_of_place(trace(model))


def test_writes_to_what_was_reshaped_alone_are_followed() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        y.transpose_(0, 1).add_(1)
        return y

    x = torch.randn(2, 3)
    assert torch.equal(out_of_place(trace(model))(x), model(x))
