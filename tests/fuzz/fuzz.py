"""Coverage-guided fuzzing of one target, run by hand: ``python -m tests.fuzz.fuzz TARGET [-max_total_time=600 …]``.

Needs the extra ``fuzz``. Options after the target are libFuzzer's. Crashing inputs are written to ``crash-…`` in the
working directory; ``python -m tests.fuzz.fuzz TARGET crash-…`` replays one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["service.codecs", "fxcore.images.files", "fxcore.graph.naming", "PIL"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.fuzz {'|'.join(TARGETS)} [libFuzzer options]")
    target, make_seeds = TARGETS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as corpus:
        for index, seed in enumerate(make_seeds()):
            (Path(corpus) / str(index)).write_bytes(seed)
        replayed = any(Path(argument).is_file() for argument in sys.argv[1:])
        atheris.Setup([*sys.argv, *([] if replayed else [corpus])], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
