"""What a comparison says of a backend."""

from __future__ import annotations

import math

from fxcore.analysis.verify import OutputErrors, Verification
from service.engine.candidate import Candidate


def test_what_is_not_a_number_differs() -> None:
    nan = OutputErrors(max_abs=math.nan, relative=math.nan, cosine=1.0, allclose=False)
    fine = OutputErrors(max_abs=0.0, relative=0.0, cosine=1.0, allclose=True)
    for precision in ("float32", "int8"):
        candidate = Candidate("openvino")
        for errors in (fine, nan, fine):
            candidate.take(Verification({"a": errors}, errors.allclose, None), precision)
        assert not candidate.agrees
