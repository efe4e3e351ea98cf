"""In-place operations and aliasing: find the value that a node overwrites, and nodes that share memory."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchvision import ops

from fxcore.layer_types import DROPOUTS
from fxcore.tracing.graph_module import attribute
from fxcore.tracing.leaves import one_node
from fxcore.tracing.names import operation_name
from fxcore.tracing.reachable import reachable

IN_PLACE_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
}

LIBRARIES = frozenset(("torch", "torchvision", "timm", "fxcore", "builtins", "math", "_operator"))
"""Packages whose code supports any memory format and does not branch on sizes, where it is not traced."""

#: key in ``node.meta`` of a node that writes to a copy made only for it
ON_COPY = "on_copy"

#: The type of ATen's operators in graphs of torch.export and make_fx. Their schema says what they write to and return.
OVERLOAD = type(torch.ops.aten.relu.default)

# Methods whose names end with an underscore but that do not write to the tensor's values.
_NO_WRITES = ("requires_grad_", "share_memory_")

_VIEWS = {
    "adjoint", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "chunk", "contiguous", "detach",
    "diagonal", "dsplit", "expand", "expand_as", "flatten", "hsplit", "imag", "moveaxis", "movedim", "narrow",
    "permute", "pos", "positive", "ravel", "real", "reshape", "reshape_as", "select", "split", "split_with_sizes",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsafe_chunk",
    "unsafe_split", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit",
}  # fmt: skip
# Functions that return their argument itself in eval mode or with rate zero, and their default of ``training``.
_DROPPING = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), True),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), False),
}
_LISTS = {"chunk", "dsplit", "hsplit", "split", "split_with_sizes", "tensor_split", "unbind", "vsplit"}
_VIEW_ATTRIBUTES = ("data", "real", "imag", "T", "mT", "H", "mH")
_CASTS = {
    *("bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "short"),
    *("to", "type", "type_as"),
}
_SHAPE = {"dim", "ndim", "ndimension", "nelement", "numel", "shape", "size", "dtype", "device", "layout"}
_SAME = (nn.Identity, nn.Flatten, nn.Unflatten, *DROPOUTS)

# Operations of torch and operators whose results never share memory with their arguments, whatever these are.
_ALLOCATING = {
    *(pure.__name__ for pure in IN_PLACE_OPERATORS.values()),
    *("abs", "cos", "div", "exp", "invert", "log", "neg", "pow", "reciprocal", "rsqrt", "sin", "sqrt", "square"),
    *("eq", "ge", "gt", "le", "lt", "ne", "clamp", "masked_fill", "maximum", "minimum", "where"),
    *("addmm", "baddbmm", "bmm", "embedding", "linear", "mm", "scaled_dot_product_attention"),
    *(f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)),
    *("batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "normalize", "rms_norm"),
    *("celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "prelu", "relu"),
    *("relu6", "selu", "sigmoid", "silu", "softmax", "log_softmax", "softplus", "softsign", "tanh", "threshold"),
    *(f"{kind}_pool{n}d" for kind in ("adaptive_avg", "adaptive_max", "avg", "max") for n in (1, 2, 3)),
    *("cat", "clone", "concat", "concatenate", "flip", "interpolate", "pad", "repeat", "repeat_interleave", "roll"),
    *("amax", "amin", "cumsum", "mean", "stack", "sum"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
}  # fmt: skip
# The same for torch's layers, by the module that defines them.
_ALLOCATING_LAYERS = {
    f"torch.nn.modules.{kind}"
    for kind in (
        *("activation", "batchnorm", "conv", "instancenorm", "linear"),
        *("normalization", "padding", "pooling", "sparse", "upsampling"),
    )
}


@one_node
def written(base: Tensor, index: Any, value: Any) -> Tensor:
    """Copy ``base`` and set ``copy[index] = value``."""
    copy = base.clone()
    copy[index] = value
    return copy


def overwritten(module: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the node whose value ``node``, of a graph over ``module``, overwrites; None if there is none."""
    called = {str(node.target): module.get_submodule(str(node.target))} if node.op == "call_module" else {}
    return mutated_argument(node, called)


def mutated_argument(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """Return the node whose value ``node`` overwrites, judging by name and arguments (``add_``, ``inplace=True``), or
    None."""
    first = first_input(node)
    if first is None:
        return None
    if node.op == "call_module":
        in_place = getattr(modules.get(str(node.target)), "inplace", None) is True
    elif node.op == "call_method":
        in_place = _is_in_place_name(str(node.target))
    elif isinstance(node.target, OVERLOAD):
        in_place = any(one.alias_info and one.alias_info.is_write for one in node.target._schema.arguments[:1])
    elif node.op == "call_function":
        in_place = (
            node.kwargs.get("inplace") is True
            or (node.target in IN_PLACE_OPERATORS and not is_number(first))
            or node.target is operator.setitem
            or _is_in_place_name(operation_name(node))
        )
    else:
        in_place = False
    return first if in_place else None


def pure_target(node: fx.Node) -> Any:
    """Return the out-of-place target for an in-place node; None if torch has none.

    A ``call_module`` node keeps its target, because ``inplace`` is an attribute of the module.

    >>> graph = fx.symbolic_trace(lambda x: x.add_(1).zero_()).graph
    >>> [pure_target(node) for node in graph.nodes if node.op == "call_method"]
    ['add', None]
    """
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return name if callable(getattr(Tensor, name, None)) else None
    if isinstance(node.target, OVERLOAD):
        package, _, name = node.target._schema.name.partition("::")
        packet = getattr(getattr(torch.ops, package), name.removesuffix("_"), None)
        return getattr(packet, node.target._overloadname, None)
    if node.op == "call_function":
        if node.kwargs.get("inplace") is True:
            return node.target
        if node.target is operator.setitem:
            return written
        if node.target in IN_PLACE_OPERATORS:
            return IN_PLACE_OPERATORS[node.target]
        assert callable(node.target)
        # torch's builtins have no module name.
        home = sys.modules.get(node.target.__module__ or "torch", torch)
        return getattr(home, node.target.__name__.removesuffix("_"), None)
    return node.target


def settle_writes(graph: fx.Graph, root: nn.Module) -> None:
    """Reduce the writes of a traced graph to those that matter within one call.

    In-place operators (``h += y``) become out-of-place if nothing that may share the overwritten memory is read later,
    or if they compute sizes. Passes that search for additions then find those of torchvision's residual blocks, which
    write ``out += identity``. An operator whose write may be visible through an alias stays in-place, since only a call
    can tell whether ``y.float()`` is ``y`` itself. Constants that may be written to are cloned in each call.

    >>> def twice(x):
    ...     h = x * 2
    ...     h += 1
    ...     same = h
    ...     h += 1
    ...     return h + same
    >>> from fxcore import trace
    >>> [node.target.__name__ for node in trace(twice).graph.nodes if node.op == "call_function"]
    ['mul', 'add', 'iadd', 'add']
    """
    modules = dict(root.named_modules())
    writes = {node: base for node in graph.nodes if (base := mutated_argument(node, modules)) is not None}
    memory, rank = possible_memory(graph, modules), {n: i for i, n in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node, storages in memory.items():
        for storage in storages:
            sharing.setdefault(storage, []).append(node)
    for node in [node for node in graph.nodes if node.target in IN_PLACE_OPERATORS]:
        base = node.args[0]
        others = {m for storage in memory.get(base, ()) for m in sharing[storage] if rank[m] < rank[node]}
        seen = any(rank[user] > rank[node] for m in others for user in m.users)
        if node not in writes or not (seen or _may_cast(node, root)):
            node.target = IN_PLACE_OPERATORS[node.target]
            writes.pop(node, None)
    overwritten = frozenset().union(*(memory[base] for base in writes.values()))
    constants = [node for node in graph.find_nodes(op="get_attr") if not overwritten.isdisjoint(memory[node])]
    for target in dict.fromkeys(str(node.target) for node in constants):
        _clone_constant(graph, target)


def viewed(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` is a view of, judging by the names of operations; ``node`` if it is not a view."""
    while is_view(node, {}) and (first := first_input(node)) is not None:
        node = first
    return node


def _clone_constant(graph: fx.Graph, target: str) -> None:
    """Clone the attribute ``target`` once in each call, and make all its readers read the clone."""
    first, *others = (node for node in graph.nodes if node.op == "get_attr" and node.target == target)
    with graph.inserting_after(first):
        clone = graph.call_method("clone", (first,))
    first.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)
    for other in others:
        other.replace_all_uses_with(clone)
        graph.erase_node(other)


def _may_cast(node: fx.Node, root: nn.Module) -> bool:
    """Return whether an in-place operator's operands may differ in dtype; its result has the dtype of the first."""
    if len(node.all_input_nodes) < 2:
        return False  # a number does not change the dtype
    inputs = 0
    calls = ("call_function", "call_method")
    for one in reachable(node.all_input_nodes, lambda n: n.all_input_nodes if n.op in calls else []):
        if operation_name(one) in _CASTS or "dtype" in one.kwargs:
            return True
        if one.op == "get_attr":
            dtype = attribute(root, str(one.target)).dtype
            if dtype.is_floating_point and dtype != torch.float32:
                return True
        inputs += one.op == "placeholder"
    return inputs > 1


def memory_of(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[fx.Node, frozenset[int]]:
    """Map each node to ids of the storages of its value.

    Annotated nodes have them in ``meta``. For other nodes they follow from the operation; one that may return a view is
    assumed to do so.
    """
    found: dict[fx.Node, frozenset[int]] = {}
    attributes: dict[str, frozenset[int]] = {}
    for number, node in enumerate(graph.nodes, 1):
        first, known = first_input(node), node.meta.get("memory")
        if known is None and first is not None and (is_view(node, modules) or mutated_argument(node, modules)):
            known = found[first]
        elif known is None and node.op == "get_attr":
            known = attributes.setdefault(str(node.target), frozenset({-number}))
        found[node] = known or frozenset({-number})
    return found


def possible_memory(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[fx.Node, frozenset[int]]:
    """Map each node to ids of all storages that its value may have.

    Annotated nodes have them in ``meta``. Of others, an operation that is not known to allocate may return its
    arguments.
    """
    found: dict[fx.Node, frozenset[int]] = {}
    attributes: dict[str, frozenset[int]] = {}
    for number, node in enumerate(graph.nodes, 1):
        own: frozenset[int] = frozenset({-number})
        if (known := node.meta.get("memory")) is not None:
            found[node] = known or own
        elif node.op == "get_attr":
            found[node] = attributes.setdefault(str(node.target), own)
        elif (base := mutated_argument(node, modules)) is not None:
            found[node] = found[base]
        elif _allocates(node, modules):
            found[node] = own
        else:
            indexed = first_input(node) if node.target is operator.getitem else None  # an index is never returned
            sources = node.all_input_nodes if indexed is None else [indexed]
            found[node] = frozenset().union(*(found[m] for m in sources)) or own
    return found


def _is_allocating(module: nn.Module | None) -> bool:
    """Return whether the result of ``module`` surely has no memory in common with its input."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return any(map(_is_allocating, module))
    layer = type(module).__module__ in _ALLOCATING_LAYERS and not isinstance(module, _SAME)
    return layer or isinstance(module, (ops.SqueezeExcitation, ops.FrozenBatchNorm2d))


def _allocates(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the value of ``node`` surely has no memory in common with its arguments."""
    if node.op == "call_module":
        return _is_allocating(modules.get(str(node.target)))
    if is_number(node):
        return True
    if isinstance(node.target, OVERLOAD) and node.target.__name__.partition(".")[0] not in _DROPPING:
        return all(result.alias_info is None for result in node.target._schema.returns)
    name = operation_name(node)
    if name == "unfold":
        return node.op == "call_function"  # the method returns a view
    if node.target is operator.getitem:
        return any(isinstance(item, list) for item in indices(node))
    if name == "einsum" and len(node.all_input_nodes) > 1:  # of one operand it may be a view
        return True
    if name not in _ALLOCATING or "out" in node.kwargs:
        return False
    package = "torch" if node.op == "call_method" else home(node.target)
    return package == "torch" or (package == "_operator" and not any(map(_is_list, node.args)))


def home(code: Any) -> str:
    """Return the top-level package of a function or module; torch's builtins do not name theirs.

    >>> home(torch.add), home(nn.functional.relu), home(operator.add)
    ('torch', 'torch', '_operator')
    """
    return str(getattr(code, "__module__", None) or "torch").split(".")[0]


def _is_list(value: Any) -> bool:
    """Return whether ``value`` is a list or tuple, or a node known to return one: adding to it allocates no tensors."""
    # Without recursion, because sums may be nested deeply, and visiting each node once, because a sum may contain
    # another one along many paths.
    pending, seen = [value], set[fx.Node]()
    while pending:
        one = pending.pop()
        if not isinstance(one, fx.Node):
            if isinstance(one, (list, tuple)):
                return True
        elif one not in seen:
            seen.add(one)
            if one.target is operator.getitem:
                pending += [one.args[0]] if isinstance(one.args[1], slice) else []
            elif operation_name(one) in _LISTS:
                return True
            elif one.target in (operator.add, operator.mul):
                pending += one.args
    return False


def reads_shape(node: fx.Node) -> bool:
    """Return whether ``node`` reads the shape, dtype, device or layout of its input, and none of its values."""
    if node.target is getattr:
        return node.args[1] in _SHAPE
    return operation_name(node) in _SHAPE and (node.op == "call_method" or home(node.target) == "torch")


def is_number(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is what :func:`reads_shape` reads, or computed only from that, and so has no
    storage."""
    pending, seen = [node], set[fx.Node]()  # as in _is_list
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if "carries" in one.meta:
            if one.meta["carries"]:
                return False
            continue
        if reads_shape(one):
            continue
        arithmetic = getattr(one.target, "__module__", None) in ("_operator", "builtins", "math")
        if not arithmetic or not one.all_input_nodes:
            return False
        pending += one.all_input_nodes
    return True


def first_input(node: fx.Node) -> fx.Node | None:
    """Return the node that is the first argument of ``node``; None if that is no node."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def indices(node: fx.Node) -> tuple[Any, ...]:
    """Return the indices of a node that reads or sets items, as in ``x[:, 0]``."""
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def is_view(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether ``node`` returns, or may return, a view of its first argument, judging by its name."""
    if node.op == "call_module":
        return isinstance(modules.get(str(node.target)), _SAME)
    if isinstance(node.target, OVERLOAD):
        return any(one.alias_info for one in node.target._schema.arguments[:1])
    if node.target is getattr:
        return node.args[1] in _VIEW_ATTRIBUTES
    if node.target is operator.getitem:
        # Indexing with a tensor, a list or a bool makes a copy.
        numbers = all(is_number(item) for item in node.all_input_nodes if item is not node.args[0])
        return numbers and not any(isinstance(item, (list, bool)) for item in indices(node))
    name = operation_name(node)
    if name == "unfold":
        return node.op == "call_method"  # the function copies patches of images
    if node.op == "call_function" and name in _DROPPING:
        given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
        return given.get("training", _DROPPING[name]) is False or bool(given.get("p") == 0)
    return node.op.startswith("call_") and name in _VIEWS


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name) and name not in _NO_WRITES
