"""Compare a transformed module with the original: the errors of each output, and the speedup."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.analysis.clock import now
from fxcore.analysis.samples import plain
from fxcore.errors import BadArgument, FxError, finite
from fxcore.nesting import clones, members
from fxcore.tracing.failures.input_mismatch import explain_mismatch
from fxcore.tracing.interpreter import Inputs, Watcher, positional
from fxcore.tracing.names import public_name


class Incomparable(FxError):
    """The two modules return different keys or shapes, only one returns a tensor, or values that cannot be compared.
    dtypes may differ.

    ``output`` is the first such output, ``node`` the first node whose value differs.
    """


@dataclass(frozen=True)
class OutputErrors:
    """Errors of one output. Real and imaginary parts of complex numbers count separately.

    If an element is NaN or infinite on one side only, or infinite with opposite signs, the errors are infinite and the
    cosine is zero.

    Attributes:
        max_abs: the largest absolute difference of two elements.
        relative: norm of the difference divided by the norm of the original.
        cosine: cosine similarity of the two as flat vectors; 1 if they are equal, even if both are zero.
        allclose: whether every difference is within ``atol * (largest magnitude) + rtol * |original|``.
    """

    max_abs: float
    relative: float
    cosine: float
    allclose: bool


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        outputs: errors of each output by key: ``"0"``, ``"1"`` for tuples, ``"a.b"`` for nested outputs.
        allclose: whether all outputs are allclose.
        speedup: median time of the original divided by that of the transformed module; None if not measured.
        first_divergence: public name of the first node, in the original's order, whose value is not allclose. None if
            all outputs are allclose, the two are not both graph modules, or no node with the same name differs.

    >>> found = verify(lambda x: {"a": x, "b": 2 * x}, lambda x: {"a": x, "b": 3 * x}, torch.ones(4))
    >>> found.allclose, found.outputs["a"].max_abs, found.outputs["b"].relative
    (False, 0.0, 0.5)
    """

    outputs: dict[str, OutputErrors]
    allclose: bool
    speedup: float | None
    first_divergence: str | None = None

    @property
    def max_abs(self) -> float:
        """The largest ``max_abs`` of all outputs."""
        return max((o.max_abs for o in self.outputs.values()), default=0.0)

    @property
    def relative(self) -> float:
        """The largest ``relative`` of all outputs."""
        return max((o.relative for o in self.outputs.values()), default=0.0)

    @property
    def cosine(self) -> float:
        """The smallest ``cosine`` of all outputs."""
        return min((o.cosine for o in self.outputs.values()), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON; NaN and infinity become None."""
        outputs = {key: finite(asdict(errors)) for key, errors in self.outputs.items()}
        return {
            "allclose": self.allclose,
            "speedup": self.speedup,
            "first_divergence": self.first_divergence,
            "outputs": outputs,
        }


def verify(
    original: Callable[..., Any],
    transformed: Callable[..., Any],
    inputs: Inputs,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-4,
    runs: int = 0,
) -> Verification:
    """Run both on the same input and compare the results.

    Args:
        original, transformed: modules or functions that return tensors, or dicts, lists, tuples or dataclasses of them.
        inputs: positional arguments, arguments by name, or a single tensor.
        rtol: tolerance relative to each element of the original.
        atol: tolerance relative to the largest magnitude of the output, since activations vary widely in scale.
        runs: number of times to time each, alternately; 0 to not measure the speedup.

    Raises:
        Incomparable: they return different keys or shapes, only one returns a tensor, or values of a class that defines
            no equality.
        BadTensor: one of the modules does not accept the inputs.
        BadArgument: ``runs`` is below 0.

    >>> from torch import nn
    >>> found = verify(nn.ReLU(), lambda x: (x > 0) * x, torch.tensor([-1.0, 2.0]))
    >>> found.allclose, found.max_abs, found.cosine
    (True, 0.0, 1.0)

    For two graph modules, the result names the first node that diverges:

    >>> from fxcore import trace
    >>> from fxcore.transforms import replace_op
    >>> model = trace(lambda x: torch.exp(torch.relu(torch.neg(x))))
    >>> verify(model, replace_op(model, torch.relu, torch.sigmoid), torch.ones(2)).first_divergence
    'relu'
    """
    if not isinstance(runs, Integral) or runs < 0:
        raise BadArgument(f"runs must be at least 0, not {runs!r:.100}")
    arguments = positional(original, inputs)
    positional(transformed, arguments)
    with torch.no_grad():
        # Pass copies of the inputs, since a module may write to them.
        with explain_mismatch(original, arguments):
            expected = flat(original(*clones(arguments)))
        with explain_mismatch(transformed, arguments):
            values = flat(transformed(*clones(arguments)))
        speedup = _speedup(original, transformed, arguments, runs) if runs else None
    if list(expected) != list(values):
        missing = next((k for k in [*expected, *values] if (k in expected) != (k in values)), None)
        raise Incomparable(
            f"the original returns {', '.join(expected) or 'nothing'} and the other {', '.join(values) or 'nothing'}; "
            "they must return the same outputs in the same order",
            output=missing,
        )
    for key in expected:
        if not _is_comparable(expected[key], values[key]):
            raise Incomparable(
                f"{key} is a {type(expected[key]).__name__}, whose values cannot be compared; return tensors, or "
                "dicts, lists, tuples or dataclasses of them",
                output=key,
            )
    try:
        outputs = {key: output_errors(expected[key], values[key], rtol, atol, key=key) for key in expected}
    except Incomparable as error:
        node = _first_divergence(original, transformed, arguments, rtol, atol)
        hint = f"; the first node that differs is {node}" if node else ""
        raise Incomparable(f"{error.detail}{hint}", **error.extra, node=node) from None
    allclose = all(o.allclose for o in outputs.values())
    first = None if allclose else _first_divergence(original, transformed, arguments, rtol, atol)
    return Verification(outputs, allclose, speedup, first)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested lists, tuples, dicts and dataclasses to a dict of values by dotted key."""
    inside = members(value)
    if inside is None:
        return {prefix or "0": value}
    found: dict[str, Any] = {}
    for key, item in inside.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else key)
    return found


def flat_nodes(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten what a graph returns to a dict of nodes, with the keys that its values have in :func:`flat`.

    A node for several values has the key in front of theirs. torch.fx calls dataclasses in nodes, which are flattened.
    """
    if isinstance(value, fx.Node) and value.op == "call_function" and is_dataclass(value.target):
        value = value.kwargs
    inside = members(value)
    if inside is None:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in inside.items():
        found |= flat_nodes(item, f"{prefix}.{key}" if prefix else key)
    return found


def _first_divergence(
    original: Callable[..., Any], transformed: Callable[..., Any], inputs: tuple[Any, ...], rtol: float, atol: float
) -> str | None:
    """Return the first node of ``original`` whose value differs from the node of the same name in ``transformed``."""
    if not isinstance(original, fx.GraphModule) or not isinstance(transformed, fx.GraphModule):
        return None
    both = {public_name(n) for n in original.graph.nodes} & {public_name(n) for n in transformed.graph.nodes}
    expected: dict[str, dict[str, Any]] = {}
    different: set[str] = set()

    def keep(node: fx.Node, value: Any) -> None:
        if node.op != "output" and (name := public_name(node)) in both:
            # Copy it, since later in-place operations may write to it.
            expected[name] = {key: v.clone() if isinstance(v, Tensor) else v for key, v in flat(value).items()}

    def compare(node: fx.Node, value: Any) -> None:
        name = public_name(node)
        if node.op == "output" or name not in both:
            return
        before, after = expected.get(name, {}), flat(value)
        try:
            agree = list(before) == list(after) and all(
                output_errors(before[key], after[key], rtol, atol).allclose
                for key in before
                if _is_comparable(before[key], after[key])
            )
        except Incomparable:
            agree = False
        if not agree:
            different.add(name)

    with torch.no_grad():
        Watcher(original, keep).run(*clones(inputs))
        Watcher(transformed, compare).run(*clones(inputs))
    return next((name for n in original.graph.nodes if (name := public_name(n)) in different), None)


def _is_comparable(expected: Any, value: Any) -> bool:
    """Return whether both values can be compared: not those of a class that compares by identity, or that refuses."""
    if isinstance(expected, Tensor) or isinstance(value, Tensor) or expected is value:
        return True
    try:
        bool(expected == value)
    except Exception:  # such as for arrays
        return False
    kinds = type(expected).__mro__[:-1]
    return type(expected) is not type(value) or any("__eq__" in vars(kind) for kind in kinds)


def output_errors(
    expected: Any, value: Any, rtol: float = 1e-4, atol: float = 1e-4, *, key: str = "the value"
) -> OutputErrors:
    """Return the errors of one output; see :func:`verify`.

    Args:
        key: name of the output, for errors.

    Raises:
        Incomparable: the shapes differ, or only one is a tensor.

    >>> output_errors(torch.ones(4), torch.full((4,), 3.0)).relative
    2.0
    """
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        if isinstance(expected, Tensor) or isinstance(value, Tensor):
            raise Incomparable(f"{key} is a tensor on one side only", output=key)
        same = bool(expected == value)
        return OutputErrors(0.0 if same else math.inf, 0.0 if same else math.inf, 1.0 if same else 0.0, same)
    if expected.shape != value.shape:
        raise Incomparable(
            f"{key} has shape {list(expected.shape)} in the original and {list(value.shape)} in the other", output=key
        )
    if expected.numel() == 0:
        return OutputErrors(0.0, 0.0, 1.0, True)
    complex_ = expected.is_complex() or value.is_complex()
    x, y = _numbers(expected, complex_), _numbers(value, complex_).to(expected.device)
    # Elements that are NaN or the same infinity on both sides agree, and are left out of the norms.
    agree = (x == y) | (x.isnan() & y.isnan())
    special = agree & ~x.isfinite()
    x, y = x.masked_fill(special, 0), y.masked_fill(special, 0)
    difference = (x - y).abs()
    if not bool(difference.isfinite().all()):
        return OutputErrors(math.inf, math.inf, 0.0, False)
    scale = x.abs().max()
    norms = float(x.norm()), float(y.norm())
    if bool(agree.all()):
        cosine = 1.0
    elif 0.0 in norms:  # the angle to a zero vector is undefined
        cosine = 0.0
    else:
        cosine = min(1.0, float((x / norms[0]) @ (y / norms[1])))
    return OutputErrors(
        max_abs=float(difference.max()),
        relative=float(difference.norm()) / norms[0] if norms[0] else (0.0 if norms[1] == 0 else math.inf),
        cosine=cosine,
        allclose=bool((difference <= atol * scale + rtol * x.abs()).all()),
    )


def _numbers(tensor: Tensor, complex_: bool) -> Tensor:
    """Return the elements of ``tensor`` in float64; for complex numbers, both parts."""
    dense = plain(tensor.detach())
    return torch.view_as_real(dense.to(torch.complex128)).flatten() if complex_ else dense.double().flatten()


def _speedup(
    original: Callable[..., Any], transformed: Callable[..., Any], inputs: tuple[Any, ...], runs: int
) -> float:
    times: tuple[list[float], list[float]] = ([], [])
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
    # Alternate, so that other load affects both.
    for _ in range(runs):
        for function, taken in zip((original, transformed), times, strict=True):
            arguments = clones(inputs)
            start = now(device)
            function(*arguments)
            taken.append(now(device) - start)
    return statistics.median(times[0]) / statistics.median(times[1])
