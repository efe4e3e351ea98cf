"""A model's graph: traced once without weights, annotated, and kept.

Listing nodes, resolving names and planning an extractor all read this one object; none of them touches weights.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxcore.errors import BadTensor
from fxcore.graph import nodes as naming
from fxcore.graph.annotate import annotate, count_flops, own_parameters, values_at
from fxcore.graph.layout import layout_name
from fxcore.graph.levels import Level, channels_of, find_levels, stride_of
from fxcore.graph.tokens import TokenGrid, token_grid
from fxcore.models.catalog import get_model
from fxcore.models.entry import RANDOM, ModelEntry
from fxcore.tensors import TensorSpec, dtype_name
from fxcore.tracing.frozen import made_constants
from fxcore.tracing.parts import trace_model
from fxcore.tracing.tracer import PATH, names
from fxcore.transforms.base import Applied, applied, fork
from fxcore.transforms.registry import apply_transforms

#: frames of a clip that video graphs are annotated for; MViT accepts no other number
VIDEO_FRAMES = 16

# Memory of a node as Python objects, with its share of the modules; 7.0 to 7.8 KiB were measured on resnet18, swin_t
# and others, of which a copy's own are 2.3 to 2.4.
_NODE_BYTES, _COPIED_NODE_BYTES = 8 * 1024, 5 * 512


@dataclass(frozen=True)
class NodeInfo:
    """One node of a graph, as people and programs read it.

    ``shape`` has None for the batch; where several rows of the first dimension belong to one image it says how many
    by ``rows_per_image``. ``params`` counts each parameter at the first node that uses it. ``flops`` and
    ``bytes``, the size of its value, are for one image; ``bytes`` is None where the value is no tensor. ``tokens`` is
    the grid of positions that tokens are.

    >>> node = next(n for n in model_graph("resnet18").nodes if n.name == "conv1")
    >>> node.op, node.args, node.users, node.shape, node.layout, node.stride
    ('call_module', ['x'], ['bn1'], [None, 64, 112, 112], 'NCHW', 2)
    >>> node.params == 64 * 3 * 7 * 7, node.flops == 2 * node.params * 112 * 112, node.bytes == 4 * 64 * 112 * 112
    (True, True, True)
    """

    name: str
    fx_name: str
    op: str
    target: str
    module_type: str | None
    args: list[str]
    users: list[str]
    shape: list[int | None] | None
    dtype: str | None
    layout: str | None
    channels: int | None
    stride: int | None
    level: str | None
    params: int
    flops: int
    bytes: int | None
    extractable: bool
    rows_per_image: int = 1
    tokens: TokenGrid | None = None


class ModelGraph:
    """A model's eval graph on meta tensors, with everything that can be known of it without weights.

    Attributes:
        entry: the model.
        weights: the canonical weights whose structure was traced (``random``: the model as torchvision builds it).
        graph: the eval graph as traced; copy it before changing it.
        train_nodes, eval_nodes: names in order of execution, as ``get_graph_node_names`` gives them.
        closed: parts of the model that could not be traced.
        input_size: height and width that shapes and FLOPs are for.
        levels: see :mod:`fxcore.graph.levels`.
        num_params: number of parameters of the model, closed parts included.
        constants: attributes for tensors that tracing computes from buffers; each model has its own values of them.
    """

    def __init__(self, entry: ModelEntry, weights: str = RANDOM, input_size: tuple[int, int] | None = None) -> None:
        self.entry = entry
        self.weights = weights
        self.preprocessing = entry.preprocessing(weights)
        self.input_size = input_size or self.preprocessing.nominal_size()
        model = entry.build_weightless(weights)
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.train_nodes = names(trace_model(entry, model, training=True)[0])
        self.graph, self._root, self.closed = trace_model(entry, model)
        self._maps = entry.feature_maps(model)
        self.eval_nodes = names(self.graph)
        self.constants = made_constants(self.graph)
        #: modules by path as they were traced, in-place ones included; copies of this graph share them
        self.traced_modules: dict[str, nn.Module] = dict(self._root.named_modules())
        self._device = torch.device("cpu" if entry.is_quantized(weights) else "meta")
        self._module = fx.GraphModule(self._root, self.graph)
        # A view of a parameter asks for a gradient even without autograd, which torch's FLOP counter does not take.
        self._module.requires_grad_(False)
        if self._device.type == "meta":
            self._module.to("meta")
        self.graph = self._module.graph
        self._derived: dict[tuple[str, ...], ModelGraph] = {}
        self._node_bytes = _NODE_BYTES
        # int8 models are traced with their weights.
        held = (*self._root.state_dict().values(), *(getattr(self._root, name) for name in self.constants))
        self._tensor_bytes = sum(t.nbytes for t in held if isinstance(t, Tensor) and not t.is_meta)
        self._annotate()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.entry.name

    @property
    def bytes(self) -> int:
        """Estimated bytes in memory, without the graphs that were derived from it."""
        return len(self.graph.nodes) * self._node_bytes + self._tensor_bytes

    @property
    def derived(self) -> list[ModelGraph]:
        """The graphs that :meth:`with_nodes_of` derived from it; they are dropped together with it."""
        return list(self._derived.values())

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, for the size that this graph is annotated for; what has a default is none."""
        layout = self.preprocessing.layout
        frames = (VIDEO_FRAMES,) if "T" in layout else ()
        shape = (None, 3, *frames, *self.input_size)
        inputs = [n for n in self.graph.find_nodes(op="placeholder") if not n.args]
        return tuple(TensorSpec(str(n.target), layout, shape) for n in inputs)

    @functools.cached_property
    def by_name(self) -> dict[str, fx.Node]:
        """Nodes by torchvision's name; parameters used as they are and the output have none."""
        return {n.meta[PATH]: n for n in self.graph.nodes if PATH in n.meta}

    @functools.cached_property
    def nodes(self) -> list[NodeInfo]:
        """Every node but the output, in order of execution; a parameter used as it is goes by its fx name."""
        flops = count_flops(self._module, [spec.shape[1:] for spec in self.inputs], self._device)  # type: ignore[misc]
        level_of = {level.node: name for name, level in self.levels.items()}
        seen: set[int] = set()
        return [
            self._info(n, level_of.get(n.meta.get(PATH, "")), flops.get(n, 0), own_parameters(self._module, n, seen))
            for n in self.graph.nodes
            if n.op != "output"
        ]

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Parameters of the model (closed parts included), FLOPs for one image, and number of nodes."""
        return {"params": self.num_params, "flops": sum(n.flops for n in self.nodes), "nodes": len(self.nodes)}

    @functools.cached_property
    def leaf_modules(self) -> list[str]:
        """Classes of the modules that were kept whole, by name."""
        called = {str(n.target) for n in self.graph.nodes if n.op == "call_module"}
        return sorted({type(self._root.get_submodule(target)).__name__ for target in called})

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the eval graph: names, operations, targets and shapes. It changes when a name changes its meaning."""
        lines = [[n.meta.get(PATH, n.name), n.op, target_name(n), self.shape_of(n)] for n in self.graph.nodes]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]

    @property
    def input_shape(self) -> list[int | None]:
        """Shape of the first input, None for the batch."""
        return list(self.inputs[0].shape)

    def at(self, height: int, width: int) -> ModelGraph:
        """The same graph, annotated for another input size.

        Raises:
            BadTensor: the model does not take that size.

        >>> larger = model_graph("resnet18").at(448, 320)
        >>> larger.shape_of(larger.by_name["layer4.1.relu_1"])
        [None, 512, 14, 10]
        """
        return self if (height, width) == self.input_size else self._copy(self._module, (height, width))

    def with_nodes_of(self, *transforms: str) -> ModelGraph:
        """The same graph with the nodes that passes bring, as ``attention_maps`` does; all others stay as they are.

        >>> graph = model_graph("vit_b_32").with_nodes_of("attention_maps")
        >>> graph.by_name["encoder.layers.encoder_layer_0.self_attention.attention"].meta["value"].shape
        torch.Size([1, 12, 50, 50])
        """
        key = tuple(transforms)
        with _guard:
            lock = _locks.setdefault((self.entry.name, self.weights, str(self.input_size), *key), threading.Lock())
        with lock:
            if key not in self._derived:
                self._derived[key] = self._copy(apply_transforms(self._module, key), self.input_size)
            return self._derived[key]

    def _copy(self, module: fx.GraphModule, input_size: tuple[int, int]) -> ModelGraph:
        """Copy this graph with the nodes of ``module``, annotated for ``input_size``.

        The model, its modules and constants are shared. Tracing saw no sizes, so nothing is traced again.
        """
        other = copy.copy(self)
        other._forget_computed()
        other.fingerprint = self.fingerprint  # it is of the model, whatever the size
        other.input_size = input_size
        other._derived = {}
        other._node_bytes, other._tensor_bytes = _COPIED_NODE_BYTES, 0
        other._module = fork(module)
        other.graph = other._module.graph
        other.eval_nodes = names(other.graph)
        other._annotate()
        return other

    def _forget_computed(self) -> None:
        """Drop the values of cached properties."""
        for name, member in vars(ModelGraph).items():
            if isinstance(member, functools.cached_property):
                self.__dict__.pop(name, None)

    def _annotate(self) -> None:
        try:
            annotate(self._module, [spec.shape[1:] for spec in self.inputs], self._device)  # type: ignore[misc]
        except Exception as error:
            raise BadTensor(self._refusal([self.input_size], error)) from error
        self.levels: dict[str, Level] = find_levels(
            self.entry.name, self.graph, self._root, self.input_size, self._maps
        )

    @property
    def passes(self) -> tuple[Applied, ...]:
        """The passes of :meth:`with_nodes_of`."""
        return applied(self._module)

    def values_at(
        self, shapes: Sequence[tuple[int, ...]], wanted: Collection[str]
    ) -> dict[str, tuple[list[int], torch.dtype]]:
        """Shape and dtype of the values of ``wanted`` nodes, and of all that they need, for one image.

        Cheaper than :meth:`at`: nothing is traced and nothing is kept.

        Args:
            shapes: the shape of each input without its batch dimension.
            wanted: exact node names.

        Raises:
            BadTensor: the model does not take inputs of that shape.
        """
        try:
            found = values_at(self._module, shapes, self._device, [self.by_name[name] for name in wanted])
        except Exception as error:
            raise BadTensor(self._refusal(shapes, error)) from error
        return {n.meta[PATH]: (list(shape), dtype) for n, (shape, dtype) in found.items() if PATH in n.meta}

    def resolve(self, return_nodes: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
        """Key → exact node name, in the order asked.

        Args:
            return_nodes: names, which are their own keys, or name → key. A name is an exact node name, a level, or a
                truncated path, which means the last node under that path.

        Raises:
            UnknownNode: a name matches nothing, or its value cannot be extracted.
            DuplicateKey: two names share a key.

        >>> model_graph("resnet18").resolve({"C3": "level", "layer2": "path", "layer2.1.relu_1": "exact"})
        {'level': 'layer2.1.relu_1', 'path': 'layer2.1.relu_1', 'exact': 'layer2.1.relu_1'}
        """
        return naming.resolve(self, return_nodes)

    def extractable(self, node: fx.Node) -> bool:
        """Whether the node's value is a tensor that belongs to the images."""
        return bool(node.meta.get("rows"))

    def shape_of(self, node: fx.Node) -> list[int | None] | None:
        """Shape of the node's value with None for a first dimension that grows with the batch."""
        value = node.meta.get("value")
        if not isinstance(value, Tensor):
            return None
        return [None if node.meta.get("rows") else d for d in value.shape[:1]] + list(value.shape[1:])

    def _refusal(self, shapes: Sequence[Sequence[int]], error: Exception) -> str:
        """Why inputs of ``shapes`` are not taken.

        The message of a model's own assertion was recorded with proxies in place of its numbers, and is left out.
        """
        shown = ", ".join(" x ".join(map(str, shape)) for shape in shapes)
        usual = " x ".join(map(str, self.preprocessing.nominal_size()))
        reason = (str(error) or type(error).__name__).splitlines()[0]
        why = "" if "Proxy(" in reason else f": {reason}"
        return f"{self.entry.name} cannot take an input of {shown}{why}; its usual size is {usual}"

    def _info(self, node: fx.Node, level: str | None, flops: int, params: int) -> NodeInfo:
        value = node.meta.get("value")
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return NodeInfo(
            name=node.meta.get(PATH, node.name),
            fx_name=node.name,
            op=node.op,
            target=target_name(node),
            module_type=type_name(module) if module is not None else None,
            args=[n.meta.get(PATH, n.name) for n in node.all_input_nodes],
            users=[n.meta.get(PATH, "output") for n in node.users],
            shape=self.shape_of(node),
            dtype=dtype_name(value.dtype) if isinstance(value, Tensor) else None,
            layout=layout_name(node.meta.get("axes")) if isinstance(value, Tensor) else None,
            channels=channels_of(node),
            stride=stride_of(node, self.input_size),
            level=level,
            params=params,
            flops=flops,
            bytes=value.nbytes if isinstance(value, Tensor) else None,
            extractable=self.extractable(node),
            rows_per_image=node.meta.get("rows") or 1,
            tokens=token_grid(node) if node.meta.get("rows") == 1 else None,
        )


def target_name(node: fx.Node) -> str:
    """A node's target as text: a path, a method's name, or a function's qualified name."""
    if isinstance(node.target, str):
        return node.target
    function = node.target
    return f"{getattr(function, '__module__', '') or ''}.{getattr(function, '__name__', function)}".lstrip(".")


def type_name(module: nn.Module) -> str:
    """A module's class with its package, as ``torch.nn.modules.conv.Conv2d``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


_cache: OrderedDict[tuple[str, str], ModelGraph] = OrderedDict()
_locks: dict[tuple[str, ...], threading.Lock] = {}
_guard = threading.Lock()


def model_graph(model: str | ModelEntry, weights: str = RANDOM) -> ModelGraph:
    """The graph of a model, traced at most once per structure and kept until :func:`forget_graph`.

    Args:
        model: a model's name or entry.
        weights: canonical weights; they decide details of the structure (number of classes, input size).

    Raises:
        UnknownModel, NotTraceable: see there.
        BadArgument: ``model`` is neither a name nor an entry.

    >>> graph = model_graph("resnet18")
    >>> graph.eval_nodes[:4], graph.totals["params"], graph.levels["C4"].node
    (['x', 'conv1', 'bn1', 'relu'], 11689512, 'layer3.1.relu_1')
    >>> model_graph("resnet18") is graph
    True
    """
    entry = model if isinstance(model, ModelEntry) else get_model(model)
    if weights not in entry.published:
        weights = RANDOM
    key = (entry.name, weights)
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        graph = _cache.get(key)
        if graph is None or graph.entry is not entry:  # a user's model may be described anew
            graph = ModelGraph(entry, weights)
        with _guard:
            _cache[key] = graph
            _cache.move_to_end(key)
        return graph


def kept_graphs() -> list[ModelGraph]:
    """The graphs that :func:`model_graph` keeps, the one least recently asked for first."""
    with _guard:
        return list(_cache.values())


def forget_graph(graph: ModelGraph) -> None:
    """Drop ``graph`` from the cache: holders may go on using it, and the next :func:`model_graph` traces it again."""
    with _guard:
        for key in [key for key, kept in _cache.items() if kept is graph]:
            del _cache[key]
