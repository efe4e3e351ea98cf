"""A backend that may run an extractor, with its measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from fxcore.analysis.verify import Verification


class CandidateState(StrEnum):
    """State of a candidate; clients see the values."""

    WAITING = "waiting"
    LOWERING = "lowering"
    AGREES = "agrees"
    DIFFERS = "differs"
    FASTER = "faster"
    SLOWER = "slower"
    SERVING = "serving"
    REPLACED = "replaced"
    """It served until another backend replaced it."""
    FAILED = "failed"


TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 5e-3}
"""Maximum error norm, relative to the output's norm, for a backend to agree with eager of the same precision.

In bfloat16, eager itself differs from float32 by 5e-2 for EfficientNet-Lite0 with trained weights, and by 1e-2 for
ViTs.
"""

MIN_COSINE = 0.98
"""Minimum cosine similarity between int8 and float32, for each output."""

_FASTER = 0.95
_NOT_SLOWER = 1.1


@dataclass
class Candidate:
    """A backend that may run an extractor, with its measurements.

    Attributes:
        state: how far its evaluation has progressed.
        max_rel_error: the largest error norm of any output, relative to the output's norm.
        min_cosine: the smallest cosine similarity of any output.
        ms: milliseconds of a forward pass, by number of rows.
        reason: why it does not serve, if it does not.
        any_size: whether it also agrees for inputs of another size.
    """

    backend: str
    state: CandidateState = CandidateState.WAITING
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    min_cosine: float | None = None
    ms: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    any_size: bool = False

    def take(self, found: Verification, precision: str) -> None:
        """Record a comparison. A candidate that differed once never agrees again."""
        # NaN counts as infinitely far; min and max would ignore it.
        lost = math.isnan(found.relative) or math.isnan(found.cosine)
        relative, cosine = (math.inf, 0.0) if lost else (found.relative, found.cosine)
        self.max_abs_error = max(self.max_abs_error or 0.0, math.inf if lost else found.max_abs)
        self.max_rel_error = max(self.max_rel_error or 0.0, relative)
        self.min_cosine = min(1.0 if self.min_cosine is None else self.min_cosine, cosine)
        if precision == "int8":
            far = self.min_cosine < MIN_COSINE
            self.reason = f"has a cosine similarity to float32 of {self.min_cosine:.4f}, below {MIN_COSINE}"
        else:
            far = self.max_rel_error > TOLERANCE[precision]
            self.reason = f"differs from eager by {self.max_rel_error:.1e}, over {TOLERANCE[precision]:.0e}"
        if self.state is not CandidateState.DIFFERS:
            self.state = CandidateState.DIFFERS if far else CandidateState.AGREES
        if not far:
            self.reason = None

    def time(self, rows: int, seconds: float) -> None:
        """Record the time of a forward pass of ``rows`` rows, keeping the fastest."""
        known = self.ms.get(str(rows), float("inf"))
        self.ms = {**self.ms, str(rows): min(known, round(seconds * 1000, 3))}  # other threads may read it

    def recall(self, before: Candidate) -> None:
        """Restore a cached verdict."""
        for one in fields(self):
            setattr(self, one.name, getattr(before, one.name))

    @property
    def agrees(self) -> bool:
        """Whether it agreed in every comparison."""
        return self.state is CandidateState.AGREES

    def judge(self, other: Candidate) -> bool:
        """Return whether it is faster than ``other`` for at least one number of rows and slower for none."""
        ratios = [self.ms[rows] / other.ms[rows] for rows in self.ms]
        fast = min(ratios) < _FASTER and max(ratios) < _NOT_SLOWER
        self.state = CandidateState.FASTER if fast else CandidateState.SLOWER
        if not fast:
            self.reason = f"takes {max(ratios):.2f} of the time of {other.backend}"
        return fast

    def fail(self, reason: str) -> None:
        """Record that it cannot serve."""
        self.state, self.reason = CandidateState.FAILED, reason

    def figures(self) -> dict[str, Any]:
        """Return the errors, for a problem response."""
        return {
            "max_abs_error": self.max_abs_error,
            "max_rel_error": self.max_rel_error,
            "min_cosine": self.min_cosine,
        }


def report(precision: str, serving: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the ``checks`` of an extractor that runs on ``serving``."""
    same = precision in ("float32", "int8")
    return {
        "reference": "eager float32" if same else f"eager {precision}",
        "max_abs_error": serving.max_abs_error,
        "max_rel_error": serving.max_rel_error,
        "candidates": [{k: v for k, v in asdict(c).items() if k != "any_size"} for c in candidates],
    }
