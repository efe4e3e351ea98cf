"""An extractor's transforms: which may be asked for, and what they did to its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxcore.extractor import Extractor
from fxcore.photos import check_rows, photos
from fxcore.transforms import (
    Applied,
    CannotKeep,
    Transform,
    applied,
    apply_transforms,
    get_transform,
    list_transforms,
)
from fxcore.transforms.registry import parse
from fxcore.verify import Verification, verify
from service.engine.checks import TOLERANCE
from service.engine.errors import Unsupported

if TYPE_CHECKING:
    from service.engine.records import ExtractorRecord
    from service.schemas import ExtractorSpec

Step = dict[str, Any]


def served(transform: Transform) -> bool:
    """Whether extractors take it: not where images would have to be prepared in another way, nor where it makes nodes,
    which are chosen before it runs."""
    return not transform.changes_input and not transform.adds_nodes


def steps(spec: ExtractorSpec) -> list[Step]:
    """The transforms of ``spec``, each with its name and all its parameters, so that equal ones are equal.

    Raises:
        UnknownTransform, BadParameter: see there.
        Unsupported: an extractor does not take it.
    """
    found = []
    for asked in spec.transforms:
        wanted: str | Mapping[str, Any] = asked if isinstance(asked, str) else {**asked.params, "name": asked.name}
        transform, parameters = parse(wanted)
        if not served(transform):
            why = "it changes what the model takes as input" if transform.changes_input else "it makes nodes of its own"
            raise Unsupported("transforms", transform.name, [t.name for t in list_transforms() if served(t)], why)
        found.append({"name": transform.name, **parameters})
    return found


@dataclass(frozen=True)
class Transformed:
    """An extractor after its transforms, and how far it is from what it was on a photograph."""

    extractor: Extractor
    applied: Sequence[Applied]
    found: Verification

    def checks(self, backend: Mapping[str, Any] | None) -> dict[str, Any]:
        """For ``checks`` of an extractor whose backend was found to be this far from the transformed module."""
        own = {
            "reference": "eager, not transformed",
            "applied": [{"name": a.name, "changes": a.changes} for a in self.applied],
            **self.found.as_dict(),
        }
        errors = {
            "reference": "eager float32",
            "max_abs_error": self.found.max_abs,
            "max_rel_error": self.found.relative,
        }
        return {**(errors if backend is None else backend), "transforms": own}


def transformed(record: ExtractorRecord, extractor: Extractor, wanted: Sequence[Step]) -> Transformed:
    """Apply ``wanted`` in order and compare with ``extractor``, which stays as it is. Not for the event loop.

    Raises:
        CannotTransform: a transform does not apply, or cannot keep a node that is asked for.
    """
    module = apply_transforms(extractor.module, wanted)
    rows = check_rows(record.preprocessing, record.inputs, photos()[:1], record.preprocessing.nominal_size())
    inputs: tuple[Tensor, ...] = tuple(x.to(torch.device(record.device), record.dtype) for x in rows[0])
    found = verify(extractor.module, module, inputs)
    limit = 10 * TOLERANCE.get(record.spec.precision, TOLERANCE["float32"])
    for output in extractor.outputs:
        error = found.outputs[output.key].relative
        if all(get_transform(step["name"]).exact for step in wanted) and not error <= limit:
            names = ", ".join(step["name"] for step in wanted)
            raise CannotKeep(
                f"{names} cannot keep the node {output.node!r}, which is asked for: its value would be {error:.1e} "
                "away; ask for another node or leave a transform out",
                transform=names,
                node=output.node,
                max_rel_error=error if math.isfinite(error) else None,
            )
    return Transformed(replace(extractor, module=module), applied(module), found)
