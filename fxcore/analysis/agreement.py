"""Check a traced graph by running it: compare it with its module, and with itself.

Tracing records one path through the code. Branches on types and attributes, ``try`` blocks and ``autocast`` are not
recorded, so the graph may silently compute different values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.draws import Draws, deterministic
from fxcore.analysis.samples import SAME, Sample, near, sampled
from fxcore.analysis.verify import flat, flat_nodes
from fxcore.errors import FxError, summarize
from fxcore.nesting import clones, map_tensors, tensors_in
from fxcore.passes.effects import UNINITIALIZED, is_uninitialized
from fxcore.passes.zero_memory import ZEROED
from fxcore.tracing.dispatch_modes import LenientMode
from fxcore.tracing.interpreter import Interpreter, Watcher
from fxcore.tracing.names import public_name


class GraphDiffers(FxError):
    """A graph and the module that it was traced from compute different values; ``node`` is the first that differs."""


def check_graph(
    module: nn.Module, traced: fx.GraphModule, inputs: Sequence[Any], targets: Mapping[str, str] | None = None
) -> None:
    """Run ``module`` and its graph on ``inputs``, and compare the outputs of submodules and the results.

    Values that depend on random numbers are not compared. Uninitialised memory is zero in both.

    Args:
        module: a private copy in eval mode. Hooks are added to it while it is called.
        traced: its graph.
        inputs: positional arguments of both.
        targets: paths in ``module`` of called modules, by node name; by default the nodes' targets.

    Raises:
        GraphDiffers: the two differ.
        Exception: whatever ``module`` raises for ``inputs``.

    >>> from fxcore import trace
    >>> class Typed(nn.Module):
    ...     def forward(self, x):
    ...         return x * 2 if isinstance(x, Tensor) else x
    >>> try:
    ...     check_graph(Typed().eval(), trace(Typed().eval()), (torch.ones(2),))
    ... except GraphDiffers as error:
    ...     print(error.detail)  # doctest: +ELLIPSIS
    the graph of Typed computes other values than the module, first in x: ...
    """
    if targets is None:
        targets = {node.name: str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    scripted = {path for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)}
    targets = {node: path for node, path in targets.items() if path not in scripted}  # these take no hooks
    name = type(module).__name__
    seen: dict[str, list[Sample]] = {path: [] for path in targets.values()}
    with deterministic(), memory_set(traced):
        with _watched(module, seen):
            expected = module(*clones(inputs))
        if any("forward" in vars(part) for part in module.modules()):
            # It may call parts of the module that this one is a copy of; then only the results are compared.
            targets = {node: path for node, path in targets.items() if seen[path]}
        first: str | None = None
        random = Draws(traced)

        def compare(node: fx.Node, value: Any) -> None:
            """Compare the outputs of modules with ``seen``, and remove the compared samples."""
            nonlocal first
            random.note(node)
            if node.op == "call_module" and node.name in targets:
                expected = seen[targets[node.name]]
                for tensor in tensors_in(value):
                    sample = expected.pop(0) if expected else None
                    agrees = sample is not None and (node in random.nodes or sample.agrees(Sample.of(tensor)))
                    if not agrees and first is None:
                        first = public_name(node)

        try:
            found = Watcher(traced, compare).run(*clones(inputs))
        except Exception as error:
            raise GraphDiffers(f"the graph of {name} cannot run where the module can: {summarize(error)}") from error
    first = first or next((path for path, left in seen.items() if left), None)
    if first is None:
        first = _differing_output(traced, expected, found, random.nodes)
    if first is not None:
        raise GraphDiffers(
            f"the graph of {name} computes other values than the module, first in {first}: a branch, a context such as "
            "autocast, or a hook that tracing does not see; branch on what is known before it runs, or keep that part "
            "whole with leaf_modules",
            node=first,
        )


def check_traced(model: nn.Module, traced: fx.GraphModule, pure: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Check the graph ``pure`` of ``model`` on ``inputs``, on random inputs, and on the first row of the random inputs.

    Args:
        traced: the graph before in-place operations were replaced, whose nodes have the paths of ``model``.

    Raises:
        GraphDiffers: the two differ.
    """
    targets = {n.name: str(n.target) for n in traced.graph.nodes if n.op == "call_module"}
    check_graph(model, pure, inputs, targets)
    others = other_inputs(inputs)
    for some in (others, map_tensors(lambda t: t[:1] if t.ndim and t.layout is torch.strided else t, others)):
        try:
            check_graph(model, pure, some, targets)
        except GraphDiffers:
            raise
        except Exception:  # the model itself does not accept these inputs
            continue


def other_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return random tensors with the shapes, dtypes and magnitudes of ``inputs``; integers and booleans are permuted,
    quantized and sparse tensors stay as they are.

    >>> other = other_inputs([torch.arange(4)])[0]
    >>> other.sort().values.tolist()
    [0, 1, 2, 3]
    """
    with deterministic():
        return list(map_tensors(_other, list(inputs)))


def _other(value: Tensor) -> Tensor:
    if value.is_quantized or value.layout is not torch.strided:
        return value.clone()
    if value.dtype.is_floating_point or value.is_complex():
        spread = value.std() if value.numel() > 1 else torch.ones_like(value.sum())
        return (torch.randn_like(value) * torch.where(spread > 0, spread, 1) + value.mean()).to(value.dtype)
    return value.flatten()[torch.randperm(value.numel(), device=value.device)].view(value.shape)


def changing_node(traced: fx.GraphModule, inputs: Sequence[Tensor]) -> str | None:
    """Return the first node that computes another value from the same inputs when called again; None if there is none.

    Modules that are kept whole may hold state between calls. Random values are not compared.

    >>> from fxcore import trace
    >>> changing_node(trace(lambda x: x + 1), [torch.ones(2)]) is None
    True
    """
    with deterministic(), memory_set(traced):
        for node, values in in_step(traced, (inputs, inputs)):
            if not same_tensors(*values):
                return public_name(node)
    return None


def same_tensors(one: Any, other: Any) -> bool:
    """Return whether the tensors in two values of a node are equal, up to rounding."""
    pairs = zip(*map(tensors_in, (one, other)), strict=True)
    return all(near(sampled(a), sampled(b), SAME) for a, b in pairs)


def keeps_state(module: nn.Module, inputs: Sequence[Any]) -> bool:
    """Return whether ``module`` computes another result from the same inputs after it was called with others."""
    results = []
    for some in (inputs, other_inputs(inputs), inputs):
        with deterministic():
            results.append(_tensors(module(*clones(some))))
    first, _, second = results
    return list(first) != list(second) or not same_tensors(list(first.values()), list(second.values()))


def in_step(traced: fx.GraphModule, batches: Sequence[Sequence[Any]]) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Run ``traced`` on all ``batches`` at once, node by node, and yield each node with its values, except for random
    ones."""
    runs = [Interpreter(traced) for _ in batches]
    for run, given in zip(runs, batches, strict=True):
        run.args_iter = iter(clones(given))
    random = Draws(traced)
    for node in traced.graph.nodes:
        if node.op == "output":
            return
        for run in runs:
            run.env[node] = run.run_node(node)
        random.note(node)
        if node not in random.nodes:
            yield node, [run.env[node] for run in runs]
        for run in runs:  # drop the values that no later node reads
            for done in run.user_to_last_uses.get(node, ()):
                run.env.pop(done, None)


@contextlib.contextmanager
def _watched(module: nn.Module, seen: dict[str, list[Sample]]) -> Iterator[None]:
    """Append a sample of each output of the submodules in ``seen``, call by call, within the block."""

    def keep(path: str) -> Any:
        return lambda _, __, output: seen[path].extend(map(Sample.of, tensors_in(output)))

    handles = [part.register_forward_hook(keep(path)) for path, part in module.named_modules() if path in seen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differing_output(traced: fx.GraphModule, expected: Any, found: Any, uncertain: set[fx.Node]) -> str | None:
    """Return the node of the first returned value that differs; None if all agree."""
    before, after = _tensors(expected), _tensors(found)
    output = traced.graph.output_node()
    returned = flat_nodes(output.args[0])
    fallback = next((public_name(n) for n in reversed(output.all_input_nodes)), "the output")
    if list(before) != list(after):
        return fallback
    for key in before:
        # A node may return several values.
        node = next((n for path, n in returned.items() if path in ("", key) or key.startswith(f"{path}.")), None)
        if isinstance(node, fx.Node) and node in uncertain:
            continue
        if before[key].dtype != after[key].dtype or not near(before[key], after[key], SAME):
            return public_name(node) if isinstance(node, fx.Node) else fallback
    return None


def _tensors(value: Any) -> dict[str, Tensor]:
    return {key: item for key, item in flat(value).items() if isinstance(item, Tensor)}


class _Zeroing(LenientMode):
    """Set memory that would be uninitialised to zero, so that values that depend on it can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.__name__.partition(".")[0] in UNINITIALIZED else result


def memory_set(traced: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Zero uninitialised memory within the block if ``traced`` has any; other graphs run as they are."""
    any_unset = any(is_uninitialized(node) or ZEROED in node.meta for node in traced.graph.nodes)
    return _Zeroing() if any_unset else contextlib.nullcontext()
