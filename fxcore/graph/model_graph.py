"""A model's graph: traced once without weights, annotated, and cached.

Listing nodes, resolving names and planning an extractor all read this object, and none of them needs weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from fxcore.errors import BadTensor
from fxcore.graph.annotate import annotate, count_flops, own_parameters, values_at
from fxcore.graph.head_pooling import attention_pools
from fxcore.graph.levels import Level, find_levels
from fxcore.graph.naming import APART, Names
from fxcore.graph.node_info import NodeInfo, definition, describe
from fxcore.graph.strides import Strides
from fxcore.graph.tokens.prefix_tokens import DECLARED
from fxcore.graph.traced_model import TracedModel, trace_weightless
from fxcore.models.catalog import get_model
from fxcore.models.entry import RANDOM, ModelEntry
from fxcore.passes.base import Applied, applied, fork
from fxcore.passes.registry import apply_transforms
from fxcore.tensors import TensorSpec
from fxcore.tracing.names import PATH, names, public_name

VIDEO_FRAMES = 16
"""Number of frames that video graphs are annotated for; MViT accepts no other number."""

LARGEST_COMPUTED = 16
"""Maximum input size, in multiples of the usual size's pixels, for models that do not run on meta tensors, since they
are computed."""

# Estimated bytes of Python objects per node: in a graph with its own modules, and in one that shares them.
_NODE_BYTES, _DERIVED_NODE_BYTES = 8 * 1024, 5 * 512


class ModelGraph:
    """A model's eval graph, annotated for one input size.

    It holds no weights, except for models that do not run on meta tensors. :func:`model_graph` returns the graph of a
    model; graphs derived from it share its modules.

    Args:
        traced: the model.
        input_size: height and width to annotate for.
        derived: for a derived graph, the graph module to copy and annotate; by default that of ``traced``.
        origin: for a derived graph, the graph that it is derived from.

    Attributes:
        entry, weights, preprocessing, train_nodes, untraceable, num_params, constants, pooling: as in ``traced``.
        root: the traced module, with parameters on ``device``.
        device: ``meta``, or ``cpu`` for models that do not run on meta tensors.
        graph: the eval graph; copy it before changing it.
        eval_nodes: node names in execution order, as ``get_graph_node_names`` returns them.
        input_size: height and width that shapes and FLOPs refer to.
        levels: see :mod:`fxcore.graph.levels`.
        traced_modules: modules by path as traced, including in-place ones; the same in derived graphs.

    Raises:
        BadTensor: the model does not accept inputs of that size.
    """

    def __init__(
        self,
        traced: TracedModel,
        input_size: tuple[int, int],
        derived: fx.GraphModule | None = None,
        origin: ModelGraph | None = None,
    ) -> None:
        self._traced = traced
        self.entry = traced.entry
        self.weights = traced.weights
        self.preprocessing = traced.preprocessing
        self.train_nodes = traced.train_nodes
        self.untraceable = traced.untraceable
        self.num_params = traced.num_params
        self.constants = traced.constants
        self.pooling = traced.pooling
        self.traced_modules = traced.modules
        self.input_size = input_size
        self.root, self.device = traced.root, traced.device
        self._module = traced.module if derived is None else fork(derived)
        self.graph = self._module.graph
        self.eval_nodes = names(self.graph)
        self._derived: dict[tuple[str, ...], ModelGraph] = {}
        self._node_bytes, self._tensor_bytes = _NODE_BYTES, traced.tensor_bytes
        if derived is not None:
            self._node_bytes, self._tensor_bytes = _DERIVED_NODE_BYTES, 0
        if origin is not None:
            self.fingerprint = origin.fingerprint
        self._annotate()
        self._strides: Strides = Strides(input_size, self.by_name, None if origin is None else origin._strides)
        self.levels: dict[str, Level] = (
            find_levels(self.entry.name, self.graph, self.root, self._strides, traced.feature_maps)
            if origin is None
            else origin.levels  # a level is the same node at any input size
        )

    @property
    def model(self) -> str:
        """The model's name."""
        return self.entry.name

    @property
    def bytes(self) -> int:
        """Estimated bytes in memory, without derived graphs."""
        return len(self.graph.nodes) * self._node_bytes + self._tensor_bytes

    @property
    def derived(self) -> list[ModelGraph]:
        """The graphs derived by :meth:`with_nodes_of`, which live as long as this one."""
        return list(self._derived.values())

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs for :attr:`input_size`, without arguments that have a default."""
        layout = self.preprocessing.layout
        frames = (VIDEO_FRAMES,) if "T" in layout else ()
        shape = (None, self.entry.channels, *frames, *self.input_size)
        inputs = [n for n in self.graph.find_nodes(op="placeholder") if not n.args]
        return tuple(TensorSpec(str(n.target), layout, shape) for n in inputs)

    @functools.cached_property
    def by_name(self) -> dict[str, fx.Node]:
        """Nodes by torchvision's name. The output, and parameters read by the graph itself, have no name."""
        return {n.meta[PATH]: n for n in self.graph.nodes if PATH in n.meta}

    @functools.cached_property
    def _names(self) -> Names:
        return Names(self.model, self.by_name, self.levels, self.untraceable)

    @functools.cached_property
    def nodes(self) -> list[NodeInfo]:
        """All nodes but the output, in order of execution."""
        flops = count_flops(self._module, self._row_shapes(), self.device, self.entry.dtype)
        level_of = {level.node: name for name, level in self.levels.items()}
        seen: set[int] = set()
        return [
            describe(
                n,
                self.root,
                self.shape_of(n),
                stride=self.stride_of(n),
                level=level_of.get(n.meta.get(PATH, "")),
                params=own_parameters(self._module, n, seen),
                flops=flops.get(n, 0),
            )
            for n in self.graph.nodes
            if n.op != "output"
        ]

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Number of parameters (including untraceable parts), FLOPs for one image, and number of nodes."""
        return {"params": self.num_params, "flops": sum(n.flops for n in self.nodes), "nodes": len(self.nodes)}

    @functools.cached_property
    def leaf_modules(self) -> list[str]:
        """Class names of the modules that were not traced into, sorted."""
        called = {str(n.target) for n in self.graph.nodes if n.op == "call_module"}
        return sorted({type(self.root.get_submodule(target)).__name__ for target in called})

    @functools.cached_property
    def attention_pools(self) -> Mapping[str, str]:
        """See :func:`fxcore.graph.head_pooling.attention_pools`.

        >>> model_graph("timm.test_vit3").attention_pools
        {'norm.layer_norm': 'attn_pool.getitem_5'}
        """
        return attention_pools(self.graph, self.traced_modules)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the eval graph's names, operations, arguments, settings of modules, and shapes.

        It changes when a name changes its meaning. Derived graphs of any input size have that of the original graph.
        """
        lines = [[public_name(n), *definition(n, self.root), self.shape_of(n)] for n in self.graph.nodes]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]

    @property
    def input_shape(self) -> list[int | None]:
        """Shape of the first input, with None for the batch dimension."""
        return list(self.inputs[0].shape)

    def at(self, height: int, width: int) -> ModelGraph:
        """Return the same graph, annotated for another input size.

        For a model that is built for one size, return the graph of the model built for the new size, which is traced
        and cached like any other.

        Raises:
            BadTensor: the model does not accept that size, or must be run to be described and the size is too large.

        >>> larger = model_graph("resnet18").at(448, 320)
        >>> larger.shape_of(larger.by_name["layer4.1.relu_1"])
        [None, 512, 14, 10]
        """
        if (height, width) == self.input_size:
            return self
        if self.entry.one_size:
            return self._built_for(height, width)
        self._check_computed((height, width))
        # Tracing does not depend on sizes, so nothing is traced again.
        return ModelGraph(self._traced, (height, width), self._module, self)

    def _check_computed(self, size: Sequence[int]) -> None:
        usual = self.preprocessing.nominal_size()
        if self.device.type != "meta" and math.prod(size) > LARGEST_COMPUTED * math.prod(usual):
            raise BadTensor(
                f"{self.entry.name} is run to describe it, which takes memory: {' x '.join(map(str, size))} is more "
                f"than {LARGEST_COMPUTED} times the pixels of its usual size, {usual[0]} x {usual[1]}"
            )

    def _built_for(self, height: int, width: int) -> ModelGraph:
        try:
            graph = model_graph(self.entry.at(height, width), self.weights)
        except Exception as error:  # libraries reject sizes with all kinds of exceptions
            refusal = self._refusal([(height, width)], error.__cause__ or error)
            if height != width and self._builds(*(2 * [min(height, width)])) and not self._builds(height, width):
                refusal += ", and it is built for squares only"
            raise BadTensor(refusal) from error
        return graph.with_nodes_of(*(done.name for done in self.passes)) if self.passes else graph

    def _builds(self, height: int, width: int) -> bool:
        try:
            self.entry.at(height, width).build_weightless(self.weights)
        except Exception:  # libraries reject sizes with all kinds of exceptions
            return False
        return True

    def with_nodes_of(self, *transforms: str) -> ModelGraph:
        """Return the same graph with nodes added by passes such as ``attention_maps``; existing nodes are unchanged.

        >>> graph = model_graph("vit_b_32").with_nodes_of("attention_maps")
        >>> graph.by_name["encoder.layers.encoder_layer_0.self_attention.attention"].meta["value"].shape
        torch.Size([1, 12, 50, 50])
        """
        key = tuple(transforms)
        with _guard:
            lock = _locks.setdefault((self.entry.name, self.weights, str(self.input_size), *key), threading.Lock())
        with lock:
            if key not in self._derived:
                module = apply_transforms(self._module, key)
                self._derived[key] = ModelGraph(self._traced, self.input_size, module, self)
            return self._derived[key]

    def _row_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each input without its batch dimension."""
        return [tuple(size or 1 for size in spec.shape[1:]) for spec in self.inputs]

    def _annotate(self) -> None:
        try:
            annotate(self._module, self._row_shapes(), self.device, self.entry.dtype)
        except Exception as error:
            raise BadTensor(self._refusal([self.input_size], error)) from error
        for node in self.graph.nodes:
            if node.meta.get(PATH) in self.entry.apart:
                node.meta["rows"], node.meta[APART] = 0, True
            node.meta[DECLARED] = self._traced.prefix_tokens

    @property
    def passes(self) -> tuple[Applied, ...]:
        """The passes applied by :meth:`with_nodes_of`."""
        return applied(self._module)

    def values_at(
        self, shapes: Sequence[tuple[int, ...]], wanted: Collection[str]
    ) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape and dtype of the values of ``wanted`` nodes and of their ancestors, for one image.

        Cheaper than :meth:`at`: only these nodes are run, and annotations are left unchanged.

        Args:
            shapes: the shape of each input without its batch dimension.
            wanted: exact node names.

        Raises:
            BadTensor: the model does not accept inputs of that shape, or must be run to be described and they are too
                large.
        """
        for shape in shapes:
            self._check_computed(shape[-2:])
        try:
            return values_at(self._module, shapes, self.device, wanted, self.entry.dtype)
        except Exception as error:
            raise BadTensor(self._refusal(shapes, error)) from error

    def resolve(self, return_nodes: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
        """Map each key to an exact node name, in the order given.

        Args:
            return_nodes: names, which are also the keys, or a mapping from names to keys. A name is an exact node name,
                a level, or a truncated path, which means the last node under that path. In a list, ``*`` in a name
                stands for one component of a path, and the name means all matching paths, in order.

        Raises:
            UnknownNode: a name matches nothing, or its value cannot be extracted.
            DuplicateKey: two names have the same key.

        >>> model_graph("resnet18").resolve({"C3": "level", "layer2": "path", "layer2.1.relu_1": "exact"})
        {'level': 'layer2.1.relu_1', 'path': 'layer2.1.relu_1', 'exact': 'layer2.1.relu_1'}
        >>> model_graph("resnet18").resolve(["layer*", "layer1.*"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fxcore.errors.UnknownNode: no path of resnet18 matches 'layer*', in which each * stands for one component...
        >>> model_graph("resnet18").resolve(["layer1.*", "*.1.bn2"])  # doctest: +NORMALIZE_WHITESPACE
        {'layer1.0': 'layer1.0.relu_1', 'layer1.1': 'layer1.1.relu_1', 'layer1.1.bn2': 'layer1.1.bn2',
         'layer2.1.bn2': 'layer2.1.bn2', 'layer3.1.bn2': 'layer3.1.bn2', 'layer4.1.bn2': 'layer4.1.bn2'}
        """
        return self._names.resolve(return_nodes)

    def shape_of(self, node: fx.Node) -> list[int | None] | None:
        """Return the shape of the node's value, with None for a first dimension that grows with the batch."""
        value = node.meta.get("value")
        if not isinstance(value, Tensor):
            return None
        return [None if node.meta.get("rows") else d for d in value.shape[:1]] + list(value.shape[1:])

    def stride_of(self, node: fx.Node) -> int | None:
        """Return input pixels per position of the node's feature map; None if it has no map."""
        return self._strides.of(node.meta.get(PATH, ""))

    def _refusal(self, shapes: Sequence[Sequence[int]], error: BaseException) -> str:
        """Return the message for inputs of ``shapes`` that the model does not accept, with the reason.

        The message of a model's own assertion is left out, since it was traced with proxies in place of its numbers.
        """
        shown = ", ".join(" x ".join(map(str, shape)) for shape in shapes)
        usual = " x ".join(map(str, self.preprocessing.nominal_size()))
        reason = (str(error) or type(error).__name__).splitlines()[0]
        why = "" if "Proxy(" in reason else f": {reason}"
        return f"{self.entry.name} cannot take an input of {shown}{why}; its usual size is {usual}"


_cache: OrderedDict[tuple[str, str, tuple[int, int] | None], ModelGraph] = OrderedDict()
# Each is kept while a thread holds it or waits for it.
_locks: weakref.WeakValueDictionary[tuple[str, ...], threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def trace_graph(entry: ModelEntry, weights: str = RANDOM) -> ModelGraph:
    """Trace a model and annotate its graph for the size that its preprocessing returns.

    :func:`model_graph` does the same and caches the result.
    """
    traced = trace_weightless(entry, weights)
    size = traced.preprocessing.nominal_size()
    try:
        return ModelGraph(traced, size)
    except BadTensor as error:
        if traced.device.type != "meta" or not re.search(r"(\b|_)meta\b", str(error.__cause__).lower()):
            raise
    # A leaf branches on values, and meta tensors have no values.
    return ModelGraph(trace_weightless(entry, weights, on_cpu=True), size)


def model_graph(model: str | ModelEntry, weights: str = RANDOM) -> ModelGraph:
    """Return the graph of a model, traced at most once per structure and cached until :func:`forget_graph`.

    Args:
        model: a model's name or entry.
        weights: canonical weights; they determine details of the structure (number of classes, input size).

    Raises:
        UnknownModel: there is no model of that name.
        NotTraceable: no part of the model can be traced.
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
    key = (entry.name, weights, entry.input_size)
    with _guard:
        lock = _locks.setdefault((entry.name, weights, str(entry.input_size)), threading.Lock())
    with lock:
        graph = _cache.get(key)
        if graph is None or graph.entry != entry:  # the description of a user's model may have changed
            graph = trace_graph(entry, weights)
        with _guard:
            _cache[key] = graph
            _cache.move_to_end(key)
        return graph


def kept_graphs() -> list[ModelGraph]:
    """Return the graphs cached by :func:`model_graph`, the least recently used first."""
    with _guard:
        return list(_cache.values())


def forget_graph(graph: ModelGraph) -> None:
    """Drop ``graph`` from the cache. It stays usable; the next :func:`model_graph` for its model traces again."""
    with _guard:
        for key in [key for key, kept in _cache.items() if kept is graph]:
            del _cache[key]
