"""Build extractors from any module in memory, between any of its nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.agreement import check_traced
from fxcore.copies import narrowed, own_modules
from fxcore.errors import BadTensor, FxError, UnknownNode, summarize
from fxcore.graph.annotate import GROWS, MANY, metadata, observe, observe_many
from fxcore.graph.cut import cut, is_named_tensor, pruned, require_sizes
from fxcore.graph.naming import Names
from fxcore.nesting import tensors_in
from fxcore.passes.base import fork, require_eval
from fxcore.passes.out_of_place import out_of_place
from fxcore.tracing.dispatch_modes import Unchanged
from fxcore.tracing.graph_module import GraphModule, set_mode
from fxcore.tracing.interpreter import Inputs, bound, positional
from fxcore.tracing.names import NO_GRAD, PATH, shown_name, untraceable_modules
from fxcore.tracing.parts import UntraceablePart
from fxcore.tracing.trace_arguments import LeafModule
from fxcore.tracing.tracer import enclosed_if_whole, private, trace
from fxcore.wrappers import check_python, unwrapped, without_prefix


def create_extractor(
    module: nn.Module,
    return_nodes: Sequence[str] | Mapping[str, str],
    example_inputs: Inputs,
    *,
    leaf_modules: Sequence[LeafModule] | str | None = None,
    leaf_functions: Sequence[Callable[..., Any]] = (),
    inputs: Sequence[str] = (),
) -> fx.GraphModule:
    """Create an extractor for any module: a graph module in eval mode that returns the values of chosen nodes.

    ``module`` is neither changed nor moved, and keeps its mode. The result shares its parameters and buffers, but no
    modules, so it stays in eval mode when training goes on. What ``module`` computes from buffers alone, views apart,
    is a constant: make the extractor again after these have changed. In-place operations are replaced by out-of-place
    ones, so that no value depends on which others are extracted.

    Gradients are the module's, also where it computes without them, as under ``torch.no_grad()``. But a graph records
    neither the backward of an ``autograd.Function`` nor backward hooks of modules that are traced into, and no context
    that turns autocast off; keep modules with these whole with ``leaf_modules``.

    Move or cast the module before: ``.to()`` or ``.half()`` of either of the two moves the parameters of both, but only
    its own buffers. To move the result alone, move a ``copy.deepcopy`` of it.

    Args:
        module: any module, or a graph module from :func:`~fxcore.tracing.tracer.trace`. Wrappers (compiled modules,
            DataParallel and the like) are removed; nodes may be named with or without the wrapper's prefix.
        return_nodes: names, which are also the keys, or a mapping from names to keys. A name is torchvision's name of a
            node (``get_graph_node_names``), or a truncated path, which means the last node under it.
        example_inputs: arguments of one call, by position, by name, or a single tensor, on the module's device.
            Arguments without tensors are fixed to their values here, or their defaults, and are not inputs of the
            result. The module runs on copies of them, and on random tensors of the same shapes, to check the graph.
            Tensors may be in lists, tuples, dicts and dataclasses.
        leaf_modules, leaf_functions: see :func:`~fxcore.tracing.tracer.trace`.
        inputs: names of nodes to start from instead of the module's arguments; ``example_inputs`` are still the
            module's. They become the result's arguments, with dots replaced by underscores. If the number of rows is
            used elsewhere, it is taken from them. If other sizes of the module's arguments are, they are fixed to their
            values here, and the result raises :class:`BadTensor` for values of other sizes.

    Returns:
        A graph module that accepts the tensors by position or by name, and returns ``{key: value}`` in the order of
        ``return_nodes``. Its nodes have ``meta["tensor_meta"]``, like those of torch's ``ShapeProp``.

    Raises:
        NotAModule: ``module`` is not a module.
        NotTraceable, UnknownArgument, NotAFunction: see :func:`~fxcore.tracing.tracer.trace`.
        UnknownNode: there is no node of that name, or its value contains no tensor.
        DuplicateKey: two names have the same key.
        BadTensor: the module does not accept ``example_inputs``, or they are on the device meta.
        CannotTransform: its in-place operations cannot be rewritten.
        OpenCut, UnneededInput: see :func:`~fxcore.graph.cut.cut`.
        GraphDiffers: the graph and the module compute different values; ``node`` is the first that differs.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.words, self.mix = nn.Embedding(10, 4), nn.Linear(4, 4)
    ...     def forward(self, ids, mask=None, scale=1):
    ...         x = self.mix(self.words(ids)) * scale
    ...         return x if mask is None else x * mask
    >>> extractor = create_extractor(Net(), {"words": "before", "mul": "after"}, {"ids": torch.tensor([[1, 2, 3]])})
    >>> {key: tuple(value.shape) for key, value in extractor(ids=torch.zeros(2, 5, dtype=torch.int64)).items()}
    {'before': (2, 5, 4), 'after': (2, 5, 4)}
    >>> late = create_extractor(Net(), ["mul"], {"ids": torch.tensor([[1, 2, 3]])}, inputs=["words"])
    >>> tuple(late(words=torch.zeros(2, 5, 4))["mul"].shape)
    (2, 5, 4)
    """
    check_python(module)
    if not isinstance(module, nn.Module):
        raise NotAModule(f"an extractor is made from a module, not from {module!r:.100}")
    wrapper, module = module, unwrapped(module)
    if isinstance(module, fx.GraphModule):
        require_eval(module, "create_extractor")  # check first, since running it would change running statistics
        given = positional(module, example_inputs)
        traced = fork(module)
        own_modules(traced)
    else:
        module = enclosed_if_whole(module)
        model, given = _with_tensors_only(module, example_inputs)
        if any(tensor.is_meta for tensor in tensors_in(given)):
            raise BadTensor(
                "example inputs on the device meta have no values to check the graph on; move them and the module to "
                "another device, or trace the module and extract from its graph"
            )
        traced = trace(model, leaf_modules=leaf_modules, leaf_functions=leaf_functions)
    with Unchanged(module):
        try:
            observe(traced, given)
        except Exception as error:
            raise BadTensor(f"{shown_name(module)} cannot take these example inputs: {summarize(error)}") from error
        _keep_gradients_of_written(traced.graph)
        named = {n.meta[PATH]: n for n in traced.graph.nodes if PATH in n.meta}
        by_name = named or {n.name: n for n in traced.graph.nodes if n.op != "output"}
        names = Names(
            shown_name(module),
            by_name,
            untraceable=[UntraceablePart(path, why) for path, why in untraceable_modules(traced.graph).items()],
            extractable=lambda node: bool(node.meta["carries"]),
            plain=lambda name: name if module is wrapper or name in by_name else without_prefix(name),
        )
        exact = names.resolve(return_nodes)
        begin = names.resolve(inputs) if inputs else {}
        for key, name in begin.items():
            if not isinstance(names.by_name[name].meta["value"], Tensor):
                raise UnknownNode(f"the value of {key!r} is not a tensor; start from tensors", name=key, suggestions=[])
        if begin:
            observe_many(traced, given)
        pure = out_of_place(traced)
        if not isinstance(module, fx.GraphModule):
            check_traced(private(model, training=False), traced, pure, given)
    by_fx_name = {n.name: n for n in pure.graph.nodes}
    wanted = {key: by_fx_name[names.by_name[name].name] for key, name in exact.items()}
    if begin:
        entered = {key: by_fx_name[names.by_name[name].name] for key, name in begin.items()}
        part = cut(pure.graph, entered, wanted.values(), is_named_tensor)
        if part.fixed:
            require_sizes(part, entered)
    else:
        part = pruned(pure.graph, wanted.values())
    part.graph.output({key: part.kept[node] for key, node in wanted.items()})
    _detach(part.graph)
    for node in part.graph.nodes:
        value = node.meta.pop("value", None)
        for key in (NO_GRAD, "memory", "carries", "mutates", MANY, GROWS):
            node.meta.pop(key, None)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            node.meta["tensor_meta"] = metadata(value)
    result = GraphModule(pure, part.graph, class_name=f"{type(module).__name__}Extractor")
    result.meta.update(traced.meta)
    set_mode(result, training=False)
    return result


def _keep_gradients_of_written(graph: fx.Graph) -> None:
    """Unmark nodes that write without gradients to values that have some, and so leave these as they are."""
    for node in graph.nodes:
        written = (node.all_input_nodes[i] for i in node.meta["mutates"])
        if any(NO_GRAD not in other.meta for other in written):
            node.meta.pop(NO_GRAD, None)


def _detach(graph: fx.Graph) -> None:
    """Detach values that the module computes without gradients where they are used with gradients, or returned."""
    for node in list(graph.nodes):
        value, source = node.meta.get("value"), node.args[0] if node.target in (operator.getitem, getattr) else None
        if isinstance(source, fx.Node) and NO_GRAD in source.meta and not isinstance(source.meta.get("value"), Tensor):
            node.meta[NO_GRAD] = True  # one of several results
        if NO_GRAD not in node.meta or node.op == "placeholder" or not isinstance(value, Tensor):
            continue
        if not value.is_floating_point() and not value.is_complex():
            continue
        if not all(NO_GRAD in user.meta for user in node.users):
            with graph.inserting_after(node):
                made = graph.call_method("detach", (node,))
            made.meta = {"value": value, NO_GRAD: True}
            node.replace_all_uses_with(made, lambda user: NO_GRAD not in user.meta)


class NotAModule(FxError):
    """An argument that must be a module is not one."""


def _with_tensors_only(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, tuple[Any, ...]]:
    """Narrow the forward of ``module`` to the arguments that contain tensors; return it and their values."""
    call = bound(module, inputs)
    tensors = {name: v for name, v in call.arguments.items() if tensors_in(v)}
    kinds = {name: parameter.kind for name, parameter in call.signature.parameters.items()}
    if any(kinds[name] in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for name in call.arguments):
        raise BadTensor(f"{shown_name(module)} takes any number of arguments, but a graph takes a fixed number")
    if len(tensors) == len(kinds) and Parameter.KEYWORD_ONLY not in kinds.values():
        return module, tuple(tensors.values())
    fixed = {name: v for name, v in call.arguments.items() if name not in tensors}
    return narrowed(module, list(tensors), fixed), tuple(tensors.values())
