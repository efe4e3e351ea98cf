"""Make a table of how each of timm's architectures traces, and which levels it has.

    python benchmarks/timm_models.py                    architectures not in the table yet, one of each family first
    python benchmarks/timm_models.py --seconds 600      as many as can be done in that time
    python benchmarks/timm_models.py --match 'vit_*'    these again
    python benchmarks/timm_models.py --seconds 0        only write the table of the results so far

Nothing is computed: models are built without weights and run on meta tensors, at the input size of their default
weights. A child process checks one architecture after another, and is killed if one takes over ``--limit`` seconds.
Each result is appended to ``results/timm-models.jsonl`` immediately, so a run that is stopped loses nothing and the
next run continues from there. ``results/timm-models.md`` is generated from it when a run ends.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import itertools
import json
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import timm

RESULTS = Path(__file__).parent / "results"
ROWS, TABLE = RESULTS / "timm-models.jsonl", RESULTS / "timm-models.md"

LARGE = re.compile(r"large|huge|giant|gigantic|so\d+m|_\d+b_|\d{3}d(_|$)")
"""Pattern in the names of architectures that take the longest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one architecture")
    parser.add_argument("--match", help="only these, by a shell pattern, whether they are in the table or not")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer()
        return
    rows = read_rows()
    names = family_by_family()
    if options.match:
        asked = [name for name in names if fnmatch.fnmatchcase(name, options.match)]
    else:
        asked = [name for name in names if name not in rows]
        asked += [name for name in names if rows.get(name, {}).get("limit", options.limit) < options.limit]
    end = time.monotonic() + options.seconds
    child: Child | None = None
    try:
        for name in asked:
            if time.monotonic() + options.limit > end:
                break
            child = child or Child()
            row = child.ask(name, options.limit)
            if row is None:
                child.end()
                child = None
                row = {"name": name, "error": f"not done in {options.limit:.0f} s", "limit": options.limit}
            rows[name] = row
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, row.get("error") or row["closed"] or "whole", flush=True)
    finally:
        if child is not None:
            child.end()
        found = [rows[name] for name in sorted(names) if name in rows]
        replace(ROWS, "".join(json.dumps(row) + "\n" for row in found))
        replace(TABLE, table(found, len(names)))


def read_rows() -> dict[str, dict[str, Any]]:
    """Read the results by architecture; the latest counts if an architecture was checked twice."""
    rows = {}
    for line in ROWS.read_text().splitlines() if ROWS.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed run may be truncated
            row = json.loads(line)
            rows[row["name"]] = row
    return rows


def replace(file: Path, text: str) -> None:
    """Replace the contents of ``file`` by ``text`` atomically."""
    written = file.with_suffix(".partial")
    written.write_text(text)
    written.replace(file)


def family_by_family() -> list[str]:
    """List timm's architectures: the first of every family, then the second of every family, …, the large ones last."""
    families = (timm.list_models(module=module) for module in timm.list_modules())
    mixed = [name for names in itertools.zip_longest(*families) for name in names if name]
    return sorted(dict.fromkeys([*mixed, *timm.list_models()]), key=lambda name: bool(LARGE.search(name)))


class Child:
    """A process that checks architectures, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answers.get()  # wait until it has finished its imports

    def ask(self, name: str, limit: float) -> dict[str, Any] | None:
        """Return the result for ``name``; None if it takes too long or crashes the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def answer() -> None:
    """Check the architectures named on standard input."""
    from fxcore import FxError, model_graph
    from fxcore.graph.model_graph import forget_graph
    from fxcore.models.timm_models import timm_model

    print("ready", flush=True)
    for name in map(str.strip, sys.stdin):
        began = time.monotonic()
        row: dict[str, Any] = {"name": name}
        try:
            entry = timm_model(f"timm.{name}")
            graph = model_graph(entry, entry.structure())
            row["size"] = list(graph.input_size)
            row["nodes"] = len(graph.eval_nodes)
            row["closed"] = sorted({re.sub(r"\d+", "*", part.path) for part in graph.untraceable})
            row["levels"] = {level: [found.node, found.channels] for level, found in graph.levels.items()}
            forget_graph(graph)
        except Exception as error:
            row["error"] = (error.detail if isinstance(error, FxError) else f"{type(error).__name__}: {error}")[:300]
        row["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(row), flush=True)


def table(rows: list[dict[str, Any]], of: int) -> str:
    """Render the rows as Markdown."""
    kinds = collections.Counter("no" if "error" in row else "parts" if row["closed"] else "whole" for row in rows)
    lines = [
        "# How timm's architectures trace",
        "",
        f"timm {timm.__version__}, by `benchmarks/timm_models.py`: {len(rows)} of {of} architectures were checked; "
        f"{kinds['whole']} trace whole, {kinds['parts']} with closed parts, {kinds['no']} not. Where parts are "
        "closed, `*` stands for numbers. Levels are those of the graph at the input size of the default weights.",
        "",
        "| architecture | input | nodes | traces | levels (channels) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            reason = row["error"].replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {row['name']} | | | no: {reason} | |")
            continue
        closed = ", ".join(f"`{path}`" for path in row["closed"])
        levels = ", ".join(f"{level} ({channels})" for level, (_, channels) in row["levels"].items())
        size = " x ".join(map(str, row["size"]))
        lines.append(
            f"| {row['name']} | {size} | {row['nodes']} | {f'but {closed}' if closed else 'whole'} | {levels} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
