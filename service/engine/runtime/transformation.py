"""The report of an extractor's transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxcore.analysis.verify import Verification
from fxcore.passes.base import Applied


@dataclass(frozen=True)
class Transformed:
    """The transforms applied to an extractor, and its error against the original on a photograph."""

    applied: Sequence[Applied]
    found: Verification
    precision: str

    def checks(self, backend: Mapping[str, Any]) -> dict[str, Any]:
        """Return the errors for ``checks``.

        A backend's errors are measured against the transformed module, eager's against the model itself. Until they are
        measured, the errors of the transforms are reported.
        """
        own = {
            "reference": "eager, not transformed",
            "applied": [{"name": a.name, "changes": a.changes} for a in self.applied],
            **self.found.as_dict(),
        }
        errors = {
            "reference": f"eager {self.precision}",
            "max_abs_error": self.found.max_abs,
            "max_rel_error": self.found.relative,
        }
        known = backend["max_abs_error"] is not None
        return {**backend, **({} if known else errors), "transforms": own}
