"""An extractor's transforms: validating and applying them, and measuring their effect on its outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.analysis.verify import Incomparable, Verification, verify
from fxcore.errors import BadTensor, UnknownNode, finite, summarize
from fxcore.extractor import Extractor
from fxcore.images.preprocessing import Preprocessing
from fxcore.passes.base import BadParameter, CannotKeep, CannotTransform, Transform, applied
from fxcore.passes.fold_normalization import normalized
from fxcore.passes.registry import apply_transforms, described, get_transform, parse
from fxcore.tensors import dtype_name
from fxcore.tracing.names import names
from service.engine.backends.checks import check_photographs
from service.engine.description import Description
from service.engine.errors import is_shortage
from service.engine.runtime.candidate import TOLERANCE
from service.engine.runtime.transformation import Transformed
from service.schemas.specs import ExtractorSpec

Step = dict[str, Any]

OPTIONAL = "optional"
"""Key of a step that is allowed to find nothing to change."""


FOLD = "fold_normalization"

_WORTH_TIMING = 0.5
"""Maximum seconds of a pass for both modules to be timed, so that builds are not delayed."""

_RUNS = 3


def parameters(transform: Transform) -> dict[str, Any]:
    """Return the parameters of a transform that a spec may set.

    The mean and std that ``fold_normalization`` folds always come from the extractor's preprocessing.
    """
    return {} if transform.name == FOLD else described(transform)["parameters"]


def steps(spec: ExtractorSpec) -> list[Step]:
    """Return the transforms of ``spec``, each with its name and all its parameters, so that equal ones compare equal.

    Raises:
        UnknownTransform, BadParameter: a transform or one of its parameters is invalid.
        Unsupported: extractors do not support a transform.
    """
    found: list[Step] = []
    for asked in spec.transforms:
        wanted: dict[str, Any] = {"name": asked} if isinstance(asked, str) else {**asked.params, "name": asked.name}
        # Omitted if false, as in specs older than this key, whose ids must not change.
        accepted = {OPTIONAL: True} if not isinstance(asked, str) and asked.optional else {}
        if wanted["name"] == FOLD:
            if len(wanted) > 1:
                raise BadParameter(
                    f"an extractor's {FOLD} takes no parameters: it uses the extractor's own preprocessing",
                    transform=FOLD,
                    parameter=next(key for key in wanted if key != "name")[:64],
                )
            if any(step["name"] == FOLD for step in found):
                raise CannotTransform(f"{FOLD} can be used only once", transform=FOLD)
            found.append({**wanted, **accepted})
        else:
            transform, given = parse(wanted)
            found.append({"name": transform.name, **given, **accepted})
    return found


def prepared(preprocessing: Preprocessing, wanted: Sequence[Step]) -> Preprocessing:
    """Return the preprocessing of an extractor with the steps ``wanted``.

    Raises:
        CannotTransform: the normalisation cannot be folded into the model.
    """
    if not any(step["name"] == FOLD for step in wanted):
        return preprocessing
    try:
        return preprocessing.without_normalization()
    except BadTensor as error:
        raise CannotTransform(f"{FOLD}: {error.detail}", transform=FOLD) from error


def transformed(
    description: Description, extractor: Extractor, wanted: Sequence[Step]
) -> tuple[Extractor, Transformed, Callable[..., Any]]:
    """Apply ``wanted`` in order, and compare the result with ``extractor``, which is not changed.

    Slow, so do not call it on the event loop.

    Returns:
        The transformed extractor, a report of the applied transforms, and a reference function that takes the new
        inputs and returns the original outputs.

    Raises:
        CannotTransform: a transform does not apply, finds nothing to change although it is not optional, or cannot keep
            a requested node.
    """
    mean, std = description.entry.preprocessing(description.weights).normalization() or ([], [])
    after = [step for step in wanted if not get_transform(step["name"]).adds_nodes]
    given = [{**step, "mean": mean, "std": std} if step["name"] == FOLD else _named(extractor, step) for step in after]
    module = apply_transforms(
        extractor.module, [{key: value for key, value in step.items() if key != OPTIONAL} for step in given]
    )
    # Steps that add nodes were applied to the whole graph.
    added = {done.name: done.changes for done in extractor.graph.passes}
    own = iter(applied(module)[-len(after) :] if after else ())
    for step in wanted:
        name = step["name"]
        whole = get_transform(name).adds_nodes
        changes = added[name] if whole else next(own).changes
        if not changes and OPTIONAL not in step:
            place = "the model" if whole else "what the requested nodes need"
            raise CannotTransform(
                f"{name} finds nothing to change in {place}; leave it out, or accept that with "
                '"optional": true next to its name',
                transform=name,
                changes=0,
            )
    original: Callable[..., Any] = extractor.module
    if any(step["name"] == FOLD for step in after):
        shift, scale = (torch.tensor(v, dtype=description.dtype, device=description.device) for v in (mean, std))

        def original(*given: Tensor) -> Any:
            images, factors = given[: len(extractor.inputs)], given[len(extractor.inputs) :]
            return extractor.module(*(normalized(x, shift, scale) for x in images), *factors)

    found = _verified(description, extractor, original, module, wanted)
    return (
        replace(extractor, module=module),
        Transformed(applied(module), found, dtype_name(description.dtype)),
        original,
    )


def _verified(
    description: Description,
    extractor: Extractor,
    original: Callable[..., Any],
    module: fx.GraphModule,
    wanted: Sequence[Step],
) -> Verification:
    """Compare ``module``, the result of ``wanted``, with ``original`` on a photograph.

    Raises:
        CannotTransform: ``module`` cannot run, or an output changed although every transform is exact.
    """
    [inputs] = check_photographs(description, extractor, 1)
    names = ", ".join(step["name"] for step in wanted)
    try:
        started = time.monotonic()
        found = verify(original, module, inputs)
        if time.monotonic() - started < _WORTH_TIMING:
            found = verify(original, module, inputs, runs=_RUNS)
    except Incomparable as other:
        node = next((o.node for o in extractor.outputs if o.key == other.extra["output"]), None)
        raise CannotKeep(
            f"{names} cannot keep the node {node!r}, which is requested: {other.detail}", transform=names, node=node
        ) from other
    except Exception as failure:  # a replacement does not fit in place of the original
        if is_shortage(failure):
            raise  # not caused by the transforms
        raise CannotTransform(
            f"{names} leaves a model that cannot run: {summarize(failure)}", transform=names
        ) from failure
    limit = 10 * TOLERANCE.get(description.spec.precision, TOLERANCE["float32"])
    exact = all(get_transform(step["name"]).exact for step in wanted)
    for output in extractor.outputs:
        error = found.outputs[output.key].relative
        if exact and not error <= limit:
            raise CannotKeep(
                f"{names} cannot keep the node {output.node!r}, which is requested: its value would differ by "
                f"{error:.1e}; ask for another node or leave a transform out",
                transform=names,
                node=output.node,
                max_rel_error=finite(error),
            )
    return found


def _named(extractor: Extractor, step: Step) -> Step:
    """Return ``step`` with exact node names. Unknown names are kept; the transform rejects them.

    ``nodes`` may contain paths, which stand for every node below them, not only the last one.

    Raises:
        CannotTransform: a node lies before the nodes that the extractor begins at.
    """
    graph, named = extractor.graph, dict(step)
    if "node" in step:
        with suppress(UnknownNode):
            named |= graph.resolve({step["node"]: "node"})  # a map, in which a name cannot stand for several nodes
        before = names(extractor.front.graph) if extractor.front is not None else []
        if named["node"] in before and named["node"] not in names(extractor.module.graph):
            raise CannotTransform(
                f"{step['name']}: {named['node']!r} lies before the inputs; name an input or a node after them",
                transform=step["name"],
                node=named["node"],
            )
    if "nodes" in step:
        levels = {level: info.node for level, info in graph.levels.items() if level not in graph.by_name}
        named["nodes"] = [levels.get(name, name) for name in step["nodes"]]
    return named
