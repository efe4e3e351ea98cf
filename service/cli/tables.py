"""Tables for the terminal; in a pipe they are not wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fxcore.graph.levels import Level
    from fxcore.graph.node_info import NodeInfo
    from fxcore.models.entry import ModelEntry
    from service.cli.check import Finding

NOTHING = "-"


def show(table: Table) -> None:
    """Print a table. If stdout is not a terminal, lines are not wrapped, for grep and awk."""
    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(markup=False, highlight=False, emoji=False, width=10_000)
    with wide.capture() as captured:
        wide.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def models(entries: Iterable[ModelEntry]) -> Table:
    """List models, one per row."""
    table = _table("model", "task", "default weights", "other weights", "params", "on disk")
    table.columns[4].justify = "right"
    for entry in entries:
        default = entry.default_weights
        info = entry.weights_info(default) if default else None
        others = [name for name in entry.weights if name != default]
        table.add_row(
            entry.name,
            entry.task,
            default or NOTHING,
            ", ".join(others) or NOTHING,
            f"{info.num_params / 1e6:.1f} M" if info and info.num_params else NOTHING,
            "yes" if info and info.cached else "no",
        )
    return table


def levels(found: Mapping[str, Level]) -> Table:
    """List the levels of a graph."""
    table = _table("level", "node", "channels", "stride")
    for name, level in found.items():
        table.add_row(name, level.node, str(level.channels), str(level.stride))
    return table


def nodes(named: Iterable[NodeInfo]) -> Table:
    """List nodes in order of execution. Those that cannot be extracted are dim and have no shape."""
    table = _table("node", "shape", "layout", "target")
    for node in named:
        if node.extractable:
            rows = "N" if node.rows_per_image == 1 else f"{node.rows_per_image}N"
            shape = _shape([rows, *(node.shape or [])[1:]])
            table.add_row(node.name, shape, node.layout or NOTHING, node.target, style="bold" if node.level else None)
        else:
            table.add_row(node.name, NOTHING, NOTHING, node.target, style="dim")
    return table


def outputs(extracted: Iterable[Mapping[str, Any]]) -> Table:
    """List extracted outputs: key, node, shape of one image and dtype."""
    table = _table("output", "node", "shape", "dtype")
    for output in extracted:
        shape = _shape(output["shape"]) if output["shape"] is not None else "varies"
        table.add_row(output["key"], output["node"], shape, output["dtype"])
    return table


def findings(found: Iterable[Finding]) -> Table:
    """List the findings of ``fxserve check``."""
    table = _table("", "used", "why", "")
    styles = {"ok": None, "note": "yellow", "problem": "bold red"}
    for finding in found:
        verdict = "" if finding.verdict == "ok" else finding.verdict
        table.add_row(finding.subject, finding.used, finding.why, verdict, style=styles[finding.verdict])
    return table


def _shape(sizes: Iterable[object]) -> str:
    return "x".join(map(str, sizes))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table
