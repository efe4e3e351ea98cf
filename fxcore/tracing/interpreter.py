"""Run a graph node by node."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxcore.errors import BadTensor, FxError


class NotAGraph(FxError):
    """An object other than a graph module was given where one is required."""


def require_graph(module: Any) -> None:
    """Check that ``module`` is a GraphModule.

    Raises:
        NotAGraph: ``module`` is not a GraphModule.
    """
    if not isinstance(module, fx.GraphModule):
        raise NotAGraph(
            f"running node by node needs a torch.fx.GraphModule, not a {type(module).__name__}; trace the model first"
        )


Inputs = Sequence[Any] | Mapping[str, Any] | Tensor
"""Arguments of one call: a tuple by position, a mapping by name, or a single tensor."""


def bound(function: Callable[..., Any], inputs: Inputs) -> inspect.BoundArguments:
    """Bind ``inputs`` to the parameters of ``function``.

    Raises:
        BadTensor: ``inputs`` do not match the parameters.
    """
    if not isinstance(inputs, (Tensor, Mapping, Sequence)) or isinstance(inputs, str):
        raise BadTensor(f"inputs are a tensor, a tuple of arguments, or a dictionary by name, not {inputs!r:.100}")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError) as error:
        raise BadTensor(f"{name} has no signature that Python can read; write a lambda that calls it") from error
    try:
        if isinstance(inputs, Mapping):
            first = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
            given = list(itertools.takewhile(inputs.__contains__, first))
            return signature.bind(
                *(inputs[name] for name in given), **{n: value for n, value in inputs.items() if n not in given}
            )
        return signature.bind(*(inputs,) if isinstance(inputs, Tensor) else inputs)
    except TypeError as error:
        unknown = [key for key in inputs if key not in signature.parameters] if isinstance(inputs, Mapping) else []
        why = f"there is no {unknown[0]!r}" if unknown else error
        raise BadTensor(f"{name} takes {', '.join(signature.parameters) or 'nothing'}: {why}") from error


def positional(function: Callable[..., Any], inputs: Inputs) -> tuple[Any, ...]:
    """Return ``inputs`` as positional arguments for a call of ``function``.

    Raises:
        BadTensor: ``inputs`` do not match the parameters, or one can only be given by name.

    >>> positional(lambda x, y, z=3: None, {"y": 2, "x": 1})
    (1, 2)
    """
    call = bound(function, inputs)
    if call.kwargs:
        raise BadTensor(f"{', '.join(call.kwargs)} can only be given by name; write a lambda that does")
    return call.args


class Interpreter(fx.Interpreter):
    """torch.fx's interpreter, extended to graphs whose arguments are lists.

    torch.fx stores lists as immutable lists, which some operators do not accept (swin3d).

    Raises:
        NotAGraph: ``module`` is not a graph module.

    >>> import torch
    >>> from fxcore import trace
    >>> class Sums(Interpreter):
    ...     def run_node(self, n):
    ...         value = super().run_node(n)
    ...         print(n.name, float(value.sum()))
    ...         return value
    >>> _ = Sums(trace(lambda x: torch.exp(x) * 2)).run(torch.zeros(3))
    x 0.0
    exp 3.0
    mul 6.0
    output 6.0
    """

    def __init__(
        self, module: fx.GraphModule, garbage_collect_values: bool = True, graph: fx.Graph | None = None
    ) -> None:
        require_graph(module)
        super().__init__(module, garbage_collect_values, graph)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return mutable(args), mutable(kwargs)


class Watcher(Interpreter):
    """An interpreter that passes each node and its value to a callback as soon as the value is computed.

    >>> from fxcore import trace
    >>> Watcher(trace(lambda x: torch.exp(x) * 2), lambda node, value: print(node, float(value))).run(torch.zeros(()))
    x 0.0
    exp 1.0
    mul 2.0
    output 2.0
    tensor(2.)
    """

    def __init__(
        self, module: fx.GraphModule, on_value: Callable[[fx.Node, Any], None], garbage_collect_values: bool = True
    ) -> None:
        super().__init__(module, garbage_collect_values)
        self._on_value = on_value

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self._on_value(n, value)
        return value


def mutable(value: Any) -> Any:
    """Replace torch.fx's immutable lists and dicts in ``value`` by plain ones.

    Other classes of lists and dicts are kept, since they have more attributes, such as transformers' ModelOutput.

    >>> graph = fx.symbolic_trace(lambda x: x.sum(dim=[0, 1])).graph
    >>> dims = graph.find_nodes(op="call_method", target="sum")[0].kwargs["dim"]
    >>> type(dims).__name__, type(mutable(dims)).__name__
    ('immutable_list', 'list')
    """
    kind = type(value)
    if kind is tuple:
        return tuple(mutable(v) for v in value)
    if kind in (list, immutable_list):
        return [mutable(v) for v in value]
    if kind in (dict, immutable_dict):
        return {k: mutable(v) for k, v in value.items()}
    return value


def on_device(args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Replace devices among the arguments of a node by ``device``.

    A device that a model reads while it is traced, as in ``x.to(self.periods.device)``, is recorded as a constant,
    but the graph may run on another device.

    >>> on_device((1, torch.device("cpu")), {"device": torch.device("cpu")}, torch.device("meta"))
    ((1, device(type='meta')), {'device': device(type='meta')})
    """

    def placed(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    return tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()}
