"""Run a graph on meta tensors and record the shape, dtype and FLOPs of each node's value.

Nothing is computed, except for models that do not run on meta tensors: the results come from torch's meta kernels and
FLOP counter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fxcore.graph.axes import layout
from fxcore.graph.flops import FlopCounter
from fxcore.graph.tokens.patches import patches_of
from fxcore.graph.tokens.prefix_tokens import ADDS_PREFIX, adds_prefix
from fxcore.graph.tokens.token_order import ORDERS
from fxcore.nesting import clones, map_tensors, storage_ids, tensors_in
from fxcore.tracing.graph_module import attribute, called_module
from fxcore.tracing.interpreter import Watcher, on_device
from fxcore.tracing.names import PATH, operation_name
from fxcore.tracing.reachable import with_ancestors

_BATCH = 13
"""Batch size of the first of two runs; the second has one image. Dimensions that differ grow with the batch."""

MANY = "many"
"""Key in ``node.meta`` for values without tensors that depend on the number of images: a tuple of the factor by which
another run had more images, and the value in that run."""

GROWS = "grows"
"""Key in ``node.meta`` for the only dimension of a tensor that grows with the rows of the inputs; None if there is
none, or several. Set by :func:`observe_many`."""

_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.vstack, torch.tile, "repeat", "tile")
_MERGING = ("view", "reshape", "flatten")


class _Recorder(Watcher):
    """A watcher that also records the inputs that each node writes to.

    Args:
        on_value: called with a node and its value.
        only: the nodes to run, in addition to the inputs; None for all.
        device: replaces the devices in the graph; None to keep them as recorded.
        keep: keep all values until the end, so that no storage is reused.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        on_value: Callable[[fx.Node, Any], None],
        only: Collection[fx.Node] | None = None,
        device: torch.device | None = None,
        keep: bool = True,
    ) -> None:
        super().__init__(module, on_value, garbage_collect_values=not keep)
        self._only = only
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        if self._only is not None and n not in self._only and n.op != "placeholder":
            return None
        before = self._versions(n)
        value = super().run_node(n)
        if not torch.is_inference_mode_enabled():
            n.meta["mutates"] = [
                i for i, (old, new) in enumerate(zip(before, self._versions(n), strict=True)) if old != new
            ]
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Item assignment returns None; the value of its node is what it wrote to, as that of other writes.
        value = super().call_function(target, args, kwargs)
        return args[0] if target is operator.setitem and isinstance(args[0], Tensor) else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return (args, kwargs) if self._device is None else on_device(args, kwargs, self._device)

    def _versions(self, n: fx.Node) -> list[int | None]:
        """Return torch's version counter of each input, which counts writes; None for inference tensors, which have no
        counter."""
        values = (self.env.get(m) for m in n.all_input_nodes)
        return [v._version if isinstance(v, Tensor) and not v.is_inference() else None for v in values]


class _FastNorms(TorchFunctionMode):
    """Skip torch's meta kernels of batch and layer norms, which are Python and slow: the result is like the input."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and not kwargs["training"]:
            x, mean, *_ = args
            known = x.is_meta and x.is_contiguous() and mean is not None and x.shape[1:2] == mean.shape
        elif func is F.layer_norm:
            x, sizes = args
            known = x.is_meta and x.is_contiguous() and x.shape[-len(sizes) :] == tuple(sizes)
        else:
            known = False
        return torch.empty_like(x) if known else func(*args, **kwargs)


def annotate(
    module: fx.GraphModule,
    shapes: list[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fill the ``meta`` of each node of ``module``.

    Args:
        module: a traced model with its parameters on ``device``.
        shapes: the shape of each input without its batch dimension.
        device: ``meta``, or ``cpu`` for models that do not run on meta tensors; their values are computed.
        dtype: dtype of the inputs.

    Sets in ``meta``:

    - ``value``: the value for one image: a meta tensor, a quantized tensor on ``device``, or whatever the node returns;
    - ``rows``: number of rows of the first dimension that belong to one image; 0 if that dimension does not grow with
      the batch; absent for values that are not tensors;
    - ``patches``: see :mod:`fxcore.graph.tokens.patches`;
    - ``adds_prefix``: see :func:`fxcore.graph.tokens.prefix_tokens.adds_prefix`;
    - ``axes``: see :mod:`fxcore.graph.axes.layout`;
    - ``carries``: whether the value contains a tensor;
    - ``many``: see :data:`MANY`;
    - ``memory``: ids of the value's storages; nodes with an id in common share memory;
    - ``mutates``: indices of the ``all_input_nodes`` that the node overwrites; leaf functions may do so (MViT's do).

    Raises:
        Exception: whatever the model raises for inputs of this shape.

    >>> model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).eval()).to("meta")
    >>> annotate(model, [(3, 10, 10)], torch.device("meta"))
    >>> [(n.name, tuple(n.meta["value"].shape), n.meta["axes"]) for n in model.graph.nodes if n.op == "call_module"]
    [('_0', (1, 8, 8, 8), 'NCHW'), ('_1', (1, 512), 'NC')]
    """
    many: dict[fx.Node, torch.Size] = {}
    numbers: dict[fx.Node, Any] = {}

    def remember(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            many[node] = value.shape
        elif not tensors_in(value):
            numbers[node] = value

    def write(node: fx.Node, value: Any) -> None:
        _note_value(node, value)
        node.meta.pop(ORDERS, None)  # those of another size
        target = called_module(module, node)
        node.meta["patches"] = patches_of(node, value, target)
        node.meta[ADDS_PREFIX] = adds_prefix(node, target)
        node.meta["axes"] = layout.follow(node, value, target)
        node.meta.pop("rows", None)
        if isinstance(value, Tensor):
            dense = value.layout is torch.strided
            node.meta["rows"] = _rows(value.shape, many.get(node)) if dense else 0
        _note_many(node, value, numbers.get(node), _BATCH)

    # Tensors of inference mode, which the caller may be in, have no version counters.
    with torch.inference_mode(False), torch.no_grad(), _FastNorms():
        _Recorder(module, remember, device=device, keep=False).run(*_inputs(shapes, _BATCH, device, dtype))
        _Recorder(module, write, device=device).run(*_inputs(shapes, 1, device, dtype))
    _mark_mixed(module)
    for node in module.graph.nodes:  # computed values would take as much memory as all activations
        value = node.meta["value"]
        if isinstance(value, Tensor) and not value.is_meta and not value.is_quantized:
            node.meta["value"] = torch.empty_like(value, device="meta")


def _note_value(node: fx.Node, value: Any) -> None:
    node.meta["value"] = value
    node.meta["memory"] = storage_ids(value)
    node.meta["carries"] = bool(node.meta["memory"])


def observe(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Run ``module`` on copies of ``inputs`` and set ``value``, ``memory``, ``carries`` and ``mutates`` in each node's
    ``meta`` (see :func:`annotate`).

    Raises:
        Exception: whatever the module raises for these inputs.

    >>> model = fx.symbolic_trace(lambda x: x.view(-1).relu_())
    >>> observe(model, [torch.zeros(2, 2)])
    >>> [n.meta["mutates"] for n in model.graph.nodes]
    [[], [], [0], []]
    """
    with torch.inference_mode(False), torch.no_grad():
        _Recorder(module, _note_value).run(*clones(inputs))


def observe_many(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Set :data:`MANY` and :data:`GROWS` of each node of ``module`` by a run on twice the rows, after :func:`observe`.

    If the module does not accept that many rows, values are recorded as unknown for that run.
    """

    def note(node: fx.Node, value: Any) -> None:
        _note_many(node, node.meta["value"], value, 2)
        node.meta[GROWS] = _doubled(node.meta["value"], value)

    try:
        with torch.inference_mode(False), torch.no_grad():
            _Recorder(module, note).run(*map_tensors(lambda t: torch.cat([t, t]) if t.ndim else t, list(inputs)))
    except Exception:
        for node in module.graph.nodes:
            _note_many(node, node.meta["value"], None, 2)
            node.meta[GROWS] = None


def _doubled(one: Any, two: Any) -> int | None:
    """Return the only dimension that differs between two tensors, if it is twice as large in the second."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.ndim != two.ndim:
        return None
    differ = [axis for axis, size in enumerate(one.shape) if size != two.shape[axis]]
    return differ[0] if len(differ) == 1 and two.shape[differ[0]] == 2 * one.shape[differ[0]] else None


def _note_many(node: fx.Node, value: Any, many: Any, factor: int) -> None:
    node.meta.pop(MANY, None)
    if isinstance(value, (int, tuple, list)) and not tensors_in(value) and many != value:
        node.meta[MANY] = factor, many


def count_flops(
    module: fx.GraphModule,
    shapes: list[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[fx.Node, int]:
    """Return the FLOPs of each node for one image, as counted by ``torch.utils.flop_counter`` (a multiply-add is two).

    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 5), nn.ReLU())).to("meta")
    >>> {n.name: flops for n, flops in count_flops(model, [(4,)], torch.device("meta")).items() if flops}
    {'_0': 40}
    """
    flops: dict[fx.Node, int] = {}
    counted = 0
    with torch.inference_mode(False), torch.no_grad(), FlopCounter() as counter:

        def difference(node: fx.Node, value: Any) -> None:
            nonlocal counted
            flops[node], counted = counter.total - counted, counter.total

        _Recorder(module, difference, device=device).run(*_inputs(shapes, 1, device, dtype))
    return flops


def values_at(
    module: fx.GraphModule,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    wanted: Collection[str],
    dtype: torch.dtype = torch.float32,
) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of the tensors of ``wanted`` nodes and their ancestors, for one image of ``shapes``.

    Nodes are named as by torchvision; those without a name are left out. Other nodes are not run, no value is kept, and
    annotations are left unchanged. Thread-safe.

    Raises:
        Exception: whatever the model raises for inputs of this shape.
    """
    needed = set(with_ancestors(node for node in module.graph.nodes if node.meta.get(PATH) in wanted))
    found: dict[str, tuple[list[int], torch.dtype]] = {}

    def remember(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and PATH in node.meta:
            found[node.meta[PATH]] = list(value.shape), value.dtype

    with torch.inference_mode():
        _Recorder(module, remember, needed, device, keep=False).run(*_inputs(shapes, 1, device, dtype))
    return found


def own_parameters(module: nn.Module, node: fx.Node, seen: set[int]) -> int:
    """Return the number of parameters of ``node`` whose ids are not in ``seen``, and add those ids to ``seen``."""
    if (called := called_module(module, node)) is not None:
        candidates = list(called.parameters())
    elif node.op == "get_attr":
        value = attribute(module, str(node.target))
        candidates = [value] if isinstance(value, nn.Parameter) else []
    else:
        candidates = []
    fresh = [p for p in candidates if id(p) not in seen]
    seen.update(id(p) for p in fresh)
    return sum(p.numel() for p in fresh)


def _inputs(shapes: Sequence[tuple[int, ...]], batch: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in shapes]


def _mark_mixed(module: fx.GraphModule) -> None:
    """Set ``rows`` to 0 for values whose rows of one image are not contiguous, e.g. concatenated along the batch."""
    mixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.meta.get("rows", 0) > 1 and (_mixes_rows(module, node) or not mixed.isdisjoint(node.all_input_nodes)):
            mixed.add(node)
            node.meta["rows"] = 0


def _mixes_rows(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` joins or repeats whole batches, or merges a batch behind another dimension into rows."""
    before = max((n.meta.get("rows", 0) for n in node.all_input_nodes), default=0)
    if isinstance(called_module(module, node), nn.Flatten) or operation_name(node) in _MERGING:
        [merged, *_] = (n.meta["value"] for n in node.all_input_nodes)
        return before == 0 and len(merged) > 1
    return node.target in _JOINING and node.meta["rows"] > before


def _rows(one: torch.Size, many: torch.Size | None) -> int:
    if many is None or len(one) == 0 or len(one) != len(many) or one[1:] != many[1:]:
        return 0
    return one[0] if many[0] == one[0] * _BATCH and one[0] > 0 else 0


def metadata(value: Tensor) -> TensorMetadata:
    """Return the ``TensorMetadata`` that torch.fx's ShapeProp would record for a dense tensor."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    ranks = {torch.channels_last: 4, torch.channels_last_3d: 5}
    fitting = (f for f in formats if value.ndim == ranks.get(f, value.ndim) and value.is_contiguous(memory_format=f))
    return TensorMetadata(
        value.shape, value.dtype, value.requires_grad, value.stride(), next(fitting, None), value.is_quantized, {}
    )
