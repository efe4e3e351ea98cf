"""Edits: multiply an inner value by a scale and add a shift, both inputs of the graph with a row for each image.

So one graph serves any edits of a node: zeros, a constant, an amplified channel, a patch of another image. The result
is the same as with forward hooks that return the edited value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor, fx

from fxcore.errors import FxError
from fxcore.graph.axes.row_axes import UNKNOWN, row_axes
from fxcore.graph.cut import Part, unused_identifier
from fxcore.graph.tokens.token_grid import TokenGrid, token_grid
from fxcore.passes.attention import ATTENTION
from fxcore.tensors import dtype_name
from fxcore.tracing.names import PATH
from fxcore.tracing.reachable import with_ancestors


class BadEdit(FxError):
    """The edit with the index ``edit`` is of a value that cannot be edited, or selects parts that do not exist."""


@dataclass(frozen=True)
class Edit:
    """Multiply the selected parts of a node's value by ``scale`` and add ``shift``.

    A ``scale`` of 0 turns finite values into zeros, or the constant ``shift``; NaN and infinities become NaN.

    Attributes:
        node: name of the node.
        scale, shift: a number, or one for each of ``channels``.
        channels: indices of channels; None for all. For attention weights ``[N, heads, L, L]``, channels are heads.
        tokens: indices of tokens ``[N, L, C]``, prefix tokens such as the class token first; None for all.
        box: x1, y1, x2, y2 in positions of a map, or of the token grid, with x2 and y2 excluded; None for all.
        images: rows of the input; None for all.

    >>> import torch
    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph, model = model_graph("squeezenet1_1"), load_model(get_model("squeezenet1_1"), "random")
    >>> nodes = graph.resolve(["features.3"])
    >>> extractor = build_extractor(graph, model, nodes, edits=nodes)
    >>> x = torch.zeros(2, 3, 64, 64)
    >>> edits = [Edit("features.3", scale=0, shift=2.0, channels=[5], images=[1])]
    >>> extractor.module(x, *extractor.factors(edits, x))["features.3"][1, 5].unique()
    tensor([2.])
    """

    node: str
    scale: float | Sequence[float] = 1.0
    shift: float | Sequence[float] = 0.0
    channels: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    box: Sequence[int] | None = None
    images: Sequence[int] | None = None


@dataclass(frozen=True)
class EditedNode:
    """A node that a graph edits.

    Attributes:
        key: the caller's name for the node.
        name: exact name of the node.
        axes: axes of a row, as returned by :func:`fxcore.graph.axes.row_axes.row_axes`.
        grid: the grid of its tokens; None if they are not on a grid.
        rows: number of rows of the value that belong to one image.
        usual: height and width of the model's input that this description is for.
    """

    key: str
    name: str
    axes: str
    grid: TokenGrid | None
    rows: int
    usual: tuple[int, int]

    @property
    def channel_dim(self) -> int | None:
        """The dimension of the channels; None if there is none, or it is unknown."""
        return self.axes.index("C") if "C" in self.axes else None

    @property
    def token_dim(self) -> int | None:
        """The dimension of the tokens; None if there is none, or it is unknown."""
        return self.axes.index("L") if self.rows == 1 and len(self.axes) == 3 and "L" in self.axes else None

    @property
    def is_map(self) -> bool:
        return self.rows == 1 and "H" in self.axes and "W" in self.axes

    def has_no(self, what: str, full: Sequence[int]) -> str:
        """Return the message for a row of shape ``full`` that has no ``what`` to select, with alternatives."""
        shown = " x ".join(map(str, full[1:]))
        has = {"channels": self.channel_dim is not None, "tokens": self.token_dim is not None}
        has["a box"] = self.is_map or self.grid is not None
        others = " or ".join(one for one, there in has.items() if there and one != what)
        advice = f"{f'select {others}, or ' if others else ''}scale or shift the whole value"
        if UNKNOWN in self.axes:
            axis = "axes a box is on" if what == "a box" else f"axis has {what}"
            return f"it is unknown which {axis} in {self.key!r}, which is {shown}; {advice}"
        kind = "is neither a map nor tokens on a grid, but" if what == "a box" else f"has no {what} but"
        return f"{self.key!r} {kind} {shown}; {advice}"

    def shape(self, dims: Sequence[int]) -> list[int]:
        """Return the shape of a row, given the shape of the value for one image."""
        return [1, *dims] if self.rows > 1 else list(dims)


def edited_node(key: str, node: fx.Node, usual: tuple[int, int]) -> EditedNode:
    """Describe an annotated ``node`` for edits.

    Raises:
        BadEdit: its values are not floating-point numbers, or are attention weights that ``attention_maps`` added.
    """
    value, name, rows = node.meta["value"], node.meta[PATH], node.meta["rows"]
    if node.meta.get(ATTENTION):
        detail = (
            f"attention_maps added {name!r}, and the model does not read it, so an edit would change no other node; to "
            "edit a head, edit its channels in the value that the attention's projection reads, if that is a node"
        )
        raise BadEdit(detail, name=name)
    if not value.is_floating_point():
        kind = "quantized" if value.is_quantized else dtype_name(value.dtype)
        raise BadEdit(f"the values of {name!r} are {kind}; edit a node of floating-point numbers", name=name)
    grid = token_grid(node) if rows == 1 and value.ndim == 3 else None
    return EditedNode(key, name, row_axes(node), grid, rows, usual)


def insert_edits(part: Part, nodes: Sequence[EditedNode], whole: Mapping[str, fx.Node]) -> None:
    """Edit values in a part of a graph that has no output yet, and make all readers read the edited values.

    The part gets two more inputs for each node, a scale and a shift, with a row for each image and a shape that can be
    broadcast to the value.

    Args:
        part: the part of the graph; afterwards ``part.kept`` maps the nodes to the edited values.
        nodes: the nodes to edit.
        whole: the nodes of the whole graph by name.

    Raises:
        BadEdit: nothing in the part depends on a node, or it lies before the inputs.
    """
    graph = part.graph
    inputs = graph.find_nodes(op="placeholder")
    last = [node for node in inputs if not node.args][-1]  # inputs with a default follow
    taken = {str(node.target) for node in inputs}
    for edited in nodes:
        value = part.kept.get(whole[edited.name])
        if value is None:
            if whole[edited.name] in with_ancestors(part.kept):
                detail = f"{edited.name!r} lies before the inputs; edit an input or a node after them"
            else:
                detail = f"no requested node depends on {edited.name!r}; edit one that they depend on"
            raise BadEdit(detail, name=edited.name)
        readers = list(value.users)
        with graph.inserting_before(last.next):
            scale = graph.placeholder(unused_identifier(f"{edited.name}_scale", taken))
            shift = graph.placeholder(unused_identifier(f"{edited.name}_shift", taken))
        last = shift
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_before((inputs[-1] if value.op == "placeholder" else value).next):
            result = value
            if edited.rows > 1:
                images = graph.call_method("size", (scale, 0))
                result = graph.call_method("unflatten", (result, 0, (images, -1)))
            result = graph.call_function(torch.addcmul, (shift, result, scale))
            if edited.rows > 1:
                result = graph.call_method("flatten", (result, 0, 1))
        for reader in readers:
            reader.replace_input_with(value, result)
        part.kept[whole[edited.name]] = result


@dataclass(frozen=True)
class Factors:
    """The factors of a node for the rows of a request.

    Attributes:
        scales, shifts: the distinct factors, ``[k, …]``, with shapes that can be broadcast to the value.
        of_rows: index into the factors for each row, int64 ``[rows]``.
    """

    scales: Tensor
    shifts: Tensor
    of_rows: Tensor

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return scale and shift for some rows, ``[n, …]``."""
        chosen = self.of_rows[rows]
        if len(self.scales) > 1:
            return self.scales[chosen], self.shifts[chosen]
        shape = len(chosen), *self.scales.shape[1:]
        return self.scales.expand(shape), self.shifts.expand(shape)


class PlannedFactors:
    """The factors of a node, before they are computed.

    Args:
        node: the edited node.
        edits: all edits of a request, so that errors can give their indices; those of other nodes are ignored.
        rows: number of rows of the request.
        dims: shape of the node's value for one image.
        size: height and width of the model's input; None if unknown.
        dtype: dtype of the graph.

    Attributes:
        bytes: peak bytes of computing the factors.

    Raises:
        BadEdit: the edit with the index ``edit`` selects parts that the value does not have.
    """

    def __init__(
        self,
        node: EditedNode,
        edits: Sequence[Edit],
        rows: int,
        dims: Sequence[int],
        size: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._node, self._dtype = node, dtype
        self._full = node.shape(dims)
        self._edits: list[_Selected] = []
        for index, edit in enumerate(edits):
            if edit.node in (node.key, node.name):
                with numbered(index):
                    self._edits.append(_Selected(node, edit, rows, self._full, size, dtype))
        # Always include channels, so that nearly all factors of a node have the same shape, as a compiled graph needs.
        there = {node.channel_dim}.union(*(one.where for one in self._edits))
        self._shape = [size if dim in there else 1 for dim, size in enumerate(self._full)]
        patterns: dict[tuple[int, ...], int] = {}
        self._of_rows = []
        for row in range(rows):
            active = tuple(at for at, one in enumerate(self._edits) if one.images is None or row in one.images)
            self._of_rows.append(patterns.setdefault(active, len(patterns)))
        self._patterns = list(patterns)
        self._computed_in = torch.promote_types(dtype, torch.float32)
        itemsize = self._computed_in.itemsize + (dtype.itemsize if dtype != self._computed_in else 0)
        self.bytes = 2 * len(self._patterns) * math.prod(self._shape[1:]) * itemsize

    def make(self) -> Factors:
        """Compute the factors.

        Raises:
            BadEdit: several edits together exceed the range of the dtype.
        """
        shape = (len(self._patterns), *self._shape[1:])
        scales, shifts = (make(shape, dtype=self._computed_in) for make in (torch.ones, torch.zeros))
        for at, one in enumerate(self._edits):
            mask, scale, shift = one.factors(self._shape, self._node.channel_dim)
            for place, active in enumerate(self._patterns):
                if at in active:
                    scales[place] = torch.where(mask, scales[place] * scale, scales[place])
                    shifts[place] = torch.where(mask, shifts[place] * scale + shift, shifts[place])
        made = Factors(scales.to(self._dtype), shifts.to(self._dtype), torch.tensor(self._of_rows))
        if not made.scales.isfinite().all() or not made.shifts.isfinite().all():
            detail = f"the edits of {self._node.key!r} one after another make a factor beyond {self._dtype}"
            raise BadEdit(detail, name=self._node.name)
        return made


class _Selected:
    """A checked edit of a node.

    Attributes:
        where: selected indices by dimension of a row.
        images: the rows that it applies to; None for all.
    """

    def __init__(
        self,
        node: EditedNode,
        edit: Edit,
        rows: int,
        full: Sequence[int],
        size: tuple[int, int] | None,
        dtype: torch.dtype,
    ) -> None:
        self._full = full
        self.where: dict[int, list[int]] = {}
        if edit.channels is not None:
            if node.channel_dim is None:
                raise BadEdit(node.has_no("channels", full))
            self.where[node.channel_dim] = _indices("channel", edit.channels, full[node.channel_dim], node.key)
        if edit.tokens is not None:
            if node.token_dim is None:
                raise BadEdit(node.has_no("tokens", full))
            self.where[node.token_dim] = _indices("token", edit.tokens, full[node.token_dim], node.key)
        if edit.box is not None:
            if edit.tokens is not None:
                raise BadEdit("an edit has tokens or a box of their grid, not both")
            self.where |= _box(node, edit.box, full, size)
        self.images = None if edit.images is None else set(_indices("image", edit.images, rows, "the request"))
        count = len(edit.channels) if edit.channels is not None else full[node.channel_dim or 0]
        self._channels = list(edit.channels) if edit.channels is not None else None
        self._scale = _numbers("scale", edit.scale, count, node, dtype)
        self._shift = _numbers("shift", edit.shift, count, node, dtype)
        if isinstance(self._scale, list) or isinstance(self._shift, list):
            self.where.setdefault(node.channel_dim or 0, list(range(count)))

    def factors(self, shape: Sequence[int], channel_dim: int | None) -> tuple[Tensor, float | Tensor, float | Tensor]:
        """Return a mask of the changed elements, which can be broadcast to a factor of ``shape``, and scale and
        shift."""
        mask = torch.ones([1] * (len(shape) - 1), dtype=torch.bool)
        for dim, indices in self.where.items():
            along = torch.zeros(self._full[dim], dtype=torch.bool)
            along[indices] = True
            mask = mask & _along(along, dim, len(shape))
        scale, shift = (self._spread(one, channel_dim, len(shape)) for one in (self._scale, self._shift))
        return mask, scale, shift

    def _spread(self, numbers: float | list[float], channel_dim: int | None, ndim: int) -> float | Tensor:
        if not isinstance(numbers, list):
            return numbers
        assert channel_dim is not None
        along = torch.zeros(self._full[channel_dim], dtype=torch.float64)
        along[self._channels if self._channels is not None else slice(None)] = torch.tensor(
            numbers, dtype=torch.float64
        )
        return _along(along, channel_dim, ndim)


@contextmanager
def numbered(index: int) -> Iterator[None]:
    """Add the index of the edit to an error."""
    try:
        yield
    except FxError as error:
        raise BadEdit(f"edit {index}: {error.detail}", **{**error.extra, "edit": index}) from None


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate factors of several requests, broadcasting them to the largest shape."""
    if len(parts) == 1:
        return parts[0]
    row = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([part.expand(len(part), *row) for part in parts])


def _along(values: Tensor, dim: int, ndim: int) -> Tensor:
    """Reshape ``values`` to lie along dimension ``dim`` of a value with ``ndim`` dimensions, without the first."""
    shape = [1] * (ndim - 1)
    shape[dim - 1] = len(values)
    return values.reshape(shape)


def _indices(what: str, given: Sequence[int], count: int, of: str) -> list[int]:
    if not len(given) and what != "image":
        raise BadEdit(f"it names no {what}; leave {what}s out for all of them")
    for index in given:
        if isinstance(index, bool) or not isinstance(index, Integral) or not 0 <= index < count:
            raise BadEdit(f"there is no {what} {index!r} in {of}: it has {count}, the first is 0")
    if twice := [index for index, times in Counter(given).items() if times > 1]:
        raise BadEdit(f"it names {what} {twice[0]} of {of} twice; name each once")
    return list(given)


def _numbers(
    what: str, given: float | Sequence[float], count: int, node: EditedNode, dtype: torch.dtype
) -> float | list[float]:
    most = torch.finfo(dtype).max
    several = isinstance(given, Sequence)
    numbers = list(given) if isinstance(given, Sequence) else [given]
    for one in numbers:
        if isinstance(one, bool) or not isinstance(one, Real) or not abs(one) <= most:
            raise BadEdit(f"its {what} {one!r:.40} is not a finite {dtype_name(dtype)} number")
    if several and node.channel_dim is None:
        raise BadEdit(f"{node.key!r} has no known channels: its {what} is one number")
    if several and len(numbers) != count:
        raise BadEdit(f"its {what} has {len(numbers)} numbers for {count} channels; give one number, or one for each")
    return [float(one) for one in numbers] if several else float(numbers[0])


def _box(
    node: EditedNode, box: Sequence[int], full: Sequence[int], size: tuple[int, int] | None
) -> dict[int, list[int]]:
    """Return the indices that a box selects, by dimension."""
    if node.is_map:
        height, width = (full[node.axes.index(axis)] for axis in "HW")
    elif node.grid is not None and (found := node.grid.at(size or node.usual, node.usual, full[1])) is not None:
        height, width = found
    else:
        raise BadEdit(node.has_no("a box", full))
    whole = len(box) == 4 and all(isinstance(one, Integral) for one in box)
    if not whole or not (0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height):
        raise BadEdit(
            f"its box {list(box)!r:.80} is not [x1, y1, x2, y2] with 0 <= x1 < x2 <= {width} and 0 <= y1 < "
            f"y2 <= {height}, whole numbers: the positions of {node.key!r}"
        )
    rows, columns = list(range(box[1], box[3])), list(range(box[0], box[2]))
    if node.is_map:
        return {node.axes.index("H"): rows, node.axes.index("W"): columns}
    assert node.grid is not None
    return {1: [node.grid.prefix + y * width + x for y in rows for x in columns]}
