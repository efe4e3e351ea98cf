"""Check a traced graph by running it: compare it with its module, and each single image with a batch.

Tracing records one path through the code. Branches on types and attributes, ``try`` blocks and ``autocast`` are not
recorded, so the graph may silently compute different values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.analysis.samples import CLOSE, SAME, Sample, near, sampled
from fxcore.analysis.verify import flat, flat_nodes
from fxcore.errors import FxError, summarize
from fxcore.models.weightless import BUILD_LOCK
from fxcore.nesting import clones, map_tensors, tensors_in
from fxcore.passes.effects import UNINITIALIZED, is_random, is_uninitialized
from fxcore.passes.zero_memory import ZEROED
from fxcore.tracing.constants import FROZEN
from fxcore.tracing.dispatch_modes import LenientMode
from fxcore.tracing.interpreter import Interpreter, Watcher
from fxcore.tracing.names import public_name

_FIVE = [1, 0, 2, 3, 3]
"""Rows of a batch of five. From the third row on they are no palindrome, so that reversing them is seen."""


class GraphDiffers(FxError):
    """A graph and the module that it was traced from compute different values; ``node`` is the first that differs."""


@dataclass(frozen=True)
class Rows:
    """The dependence of a batch's values on its images.

    Attributes:
        apart: names of the nodes whose rows in a batch are not those of the single images, in order.
        dependent: the first node whose values for an image depend on the other images, if the model's result depends
            on them too; else None.
    """

    apart: list[str] = field(default_factory=list)
    dependent: str | None = None


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
    with _deterministic(), _memory_set(traced):
        with _watched(module, seen):
            expected = module(*clones(inputs))
        if any("forward" in vars(part) for part in module.modules()):
            # It may call parts of the module that this one is a copy of; then only the results are compared.
            targets = {node: path for node, path in targets.items() if seen[path]}
        first: str | None = None
        random = _Draws(traced)

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
    with _deterministic():
        return list(map_tensors(_other, list(inputs)))


def _other(value: Tensor) -> Tensor:
    if value.is_quantized or value.layout is not torch.strided:
        return value.clone()
    if value.dtype.is_floating_point or value.is_complex():
        spread = value.std() if value.numel() > 1 else torch.ones_like(value.sum())
        return (torch.randn_like(value) * torch.where(spread > 0, spread, 1) + value.mean()).to(value.dtype)
    return value.flatten()[torch.randperm(value.numel(), device=value.device)].view(value.shape)


def compare_rows(traced: fx.GraphModule, inputs: Sequence[Tensor]) -> Rows:
    """Compare a batch of two, and one of five, with each single image, node by node.

    In a single order, rows that are sorted by value could be in the right place by chance, so the second batch begins
    in the other order. Some models change only the third row and those after it. The second batch also has a bright
    and a dark image, which change the sign of a mean, or the number of values above a threshold.

    Args:
        traced: a graph without in-place operations.
        inputs: two rows each, all different.

    Raises:
        Exception: whatever the graph raises for five rows, for two, or for one.

    >>> from fxcore import trace
    >>> compare_rows(trace(lambda x: torch.stack([x, -x]).flatten(0, 1).abs()), (torch.randn(2, 3),))
    Rows(apart=['flatten', 'abs'], dependent=None)
    >>> compare_rows(trace(lambda x: x - x.mean(0)), (torch.randn(2, 3),))
    Rows(apart=['sub'], dependent='sub')
    """
    try:
        return _compare_rows(traced, [torch.cat([x, _unlike(x)]) for x in inputs])
    except Exception:  # such as from the maximum of no values: images of one tone may have none above a threshold
        return _compare_rows(traced, [torch.cat([x, x]) for x in inputs])


def _compare_rows(traced: fx.GraphModule, images: Sequence[Tensor]) -> Rows:
    single = ([x[row : row + 1] for x in images] for row in range(4))
    batches = ([x[:2] for x in images], [x[_FIVE] for x in images], *single)
    state: dict[fx.Node, str] = {}
    with _deterministic(), _memory_set(traced):
        for node, (batch, five, *alone) in _in_step(traced, batches):
            if isinstance(batch, Tensor):
                found = _relation(batch, *alone[:2]), _relation(five, *(alone[row] for row in _FIVE))
                state[node] = max(found, key=_RELATIONS.index)
    apart = [public_name(node) for node, found in state.items() if found in ("mixed", "differs")]
    results = {state[node] for node in traced.graph.output_node().all_input_nodes if node in state}
    differing = next((public_name(node) for node, found in state.items() if found == "differs"), None)
    depends = "differs" in results or not results & {"alone", "mixed"}
    return Rows(apart, differing if depends else None)


_RELATIONS = ("none", "alone", "mixed", "differs")
"""Results of :func:`_relation`, by increasing dependence of an image's values on the others in its batch."""


def _unlike(x: Tensor) -> Tensor:
    """Return a bright and a dark image with half the contrast of the two images ``x``."""
    bright, dark = x[:1], x[1:]
    offset = 2 * x.std() if x.is_floating_point() else 0
    return torch.cat([bright / 2 + offset, dark / 2 - offset]).to(x.dtype)


def changing_node(traced: fx.GraphModule, inputs: Sequence[Tensor]) -> str | None:
    """Return the first node that, after other inputs, computes another value from the same ones; None if there is none.

    Modules that are kept whole may hold state between calls. If there are any, larger inputs are tried too, where the
    graph accepts these. Random values are not compared.

    >>> from fxcore import trace
    >>> changing_node(trace(lambda x: x + 1), [torch.ones(2)]) is None
    True
    """
    others = other_inputs(inputs)
    found = _changed_by(traced, inputs, others)
    if found is None and not all(_is_torchs(traced, node) for node in traced.graph.nodes):
        with contextlib.suppress(Exception):  # the model does not accept larger inputs
            # A part may hold what grows with its largest input, such as encodings of positions.
            return _changed_by(traced, inputs, map_tensors(_enlarged, others))
    return found


def _changed_by(traced: fx.GraphModule, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> str | None:
    with _deterministic(), _memory_set(traced):
        for node, (first, _, again) in _in_step(traced, (inputs, others, inputs)):
            pairs = zip(tensors_in(first), tensors_in(again), strict=True)
            if not all(near(sampled(a), sampled(b), SAME) for a, b in pairs):
                return public_name(node)
    return None


def _enlarged(value: Tensor) -> Tensor:
    """Return an image, or another tensor of rows, with twice its size along the last two dimensions."""
    return value.repeat(*[1] * (value.ndim - 2), 2, 2) if value.ndim > 3 else value


def draws(traced: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether ``traced`` computes with random numbers when it runs on ``inputs``.

    >>> from fxcore import trace
    >>> draws(trace(lambda x: x + torch.rand_like(x)), [torch.ones(2)]), draws(trace(lambda x: x + 1), [torch.ones(2)])
    (True, False)
    """
    with _deterministic():
        found = _Draws(traced)
        Watcher(traced, lambda node, _: found.note(node)).run(*clones(inputs))
    return bool(found.nodes)


def _in_step(traced: fx.GraphModule, batches: Sequence[Sequence[Any]]) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Run ``traced`` on all ``batches`` at once, node by node, and yield each node with its values, except for random
    ones."""
    runs = [Interpreter(traced) for _ in batches]
    for run, given in zip(runs, batches, strict=True):
        run.args_iter = iter(clones(given))
    random = _Draws(traced)
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


def _relation(batch: Tensor, *alone: Any) -> str:
    """Classify the values of a batch relative to those of the single images.

    ``alone`` if the batch is the concatenation of the single values along any dimension; ``mixed`` if it has the same
    rows in a different order, or numbers of rows that differ between images; ``none`` if no dimension grows with the
    batch; else ``differs``.
    """
    if not all(isinstance(one, Tensor) and one.ndim == batch.ndim for one in alone):
        return "differs"
    axes = [i for i in range(batch.ndim) if batch.shape[i] == sum(one.shape[i] for one in alone)]
    if not axes:
        return "none" if all(one.shape == batch.shape for one in alone) else "differs"
    counts = [one.shape[axes[0]] for one in alone]
    parts = torch.split(batch, counts, axes[0])
    if any(part.shape != one.shape for part, one in zip(parts, alone, strict=True)):
        return "differs"
    if all(near(sampled(one), sampled(part), CLOSE) for part, one in zip(parts, alone, strict=True)):
        return "alone" if len(set(counts)) == 1 else "mixed"
    expected = torch.cat(alone, axes[0])
    if axes[0] == 0 and near(expected.flatten().sort().values, batch.flatten().sort().values, CLOSE):
        return "mixed"
    return "differs"


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


_KNOWN = ("torch", "torchvision", "_operator", "builtins", "math")


class _Draws:
    """The nodes that have run whose values depend on random numbers.

    Functions and modules of others that are kept whole are recognised by the generators that they draw from.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self.nodes: set[fx.Node] = set()
        self._traced = traced
        self._unknown = {node for node in traced.graph.nodes if not _is_torchs(traced, node)}
        self._generators = self._states()

    def note(self, node: fx.Node) -> None:
        """Add ``node``, which was the last to run, if its values depend on random numbers."""
        before, self._generators = self._generators, self._states()
        drawn = FROZEN in node.meta and node.meta[FROZEN].random
        drawn |= node in self._unknown and self._generators != before
        drawn |= is_random(self._traced, node) and not is_uninitialized(node)
        if drawn or not self.nodes.isdisjoint(node.all_input_nodes):
            self.nodes.add(node)

    def _states(self) -> list[bytes]:
        generators = (torch.default_generator, *torch.cuda.default_generators) if self._unknown else ()
        return [generator.get_state().numpy().tobytes() for generator in generators]


def _is_torchs(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` calls nothing but what torch or Python defines, of which it is known what draws."""
    if node.op == "call_module":
        parts = traced.get_submodule(str(node.target)).modules()
        return all(type(part).__module__.startswith("torch.nn.") for part in parts)
    origin = getattr(node.target, "__module__", None) or "torch"  # some of torch's functions have none
    return node.op != "call_function" or origin.partition(".")[0] in _KNOWN


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    with torch.no_grad(), BUILD_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


class _Zeroing(LenientMode):
    """Set memory that would be uninitialised to zero, so that values that depend on it can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.__name__.partition(".")[0] in UNINITIALIZED else result


def _memory_set(traced: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Zero uninitialised memory within the block if ``traced`` has any; other graphs run as they are."""
    any_unset = any(is_uninitialized(node) or ZEROED in node.meta for node in traced.graph.nodes)
    return _Zeroing() if any_unset else contextlib.nullcontext()
