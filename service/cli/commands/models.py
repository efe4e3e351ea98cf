"""``fxserve models``, ``nodes`` and ``graph``: list models and show their graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.choices import GraphFormat, Source
from service.cli.environment import settings_of

if TYPE_CHECKING:
    from fxcore.graph.model_graph import ModelGraph

Task = Literal["classification", "quantization", "segmentation", "detection", "video", "optical_flow"]

_DRAWINGS: tuple[GraphFormat, ...] = ("dot", "svg", "mermaid", "layout")

_FORMAT_OF: dict[str, GraphFormat] = {
    ".txt": "table",
    ".py": "code",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".mmd": "mermaid",
    ".json": "json",
}


def models(
    task: Annotated[Task | None, typer.Option(help="Only models for this task.")] = None,
    query: Annotated[str | None, typer.Option("--query", "-q", help="Only models whose name contains this.")] = None,
    source: Annotated[
        Source | None, typer.Option(help="Only models from this source; timm's are listed only with --source timm.")
    ] = None,
) -> None:
    """List the models, their weights and whether the default ones are on this machine.

    \b
    fxserve models --query resnet
    fxserve models --task detection
    fxserve models --source timm --query dinov2
    """
    from fxcore.models.catalog import list_models
    from service.cli import tables
    from service.engine.models.own_models import register_models

    register_models(settings_of({}).models_dir, try_each=False)

    found = [
        entry
        for entry in list_models(source)
        if (task is None or entry.task == task) and (query is None or query.lower() in entry.name.lower())
    ]
    tables.show(tables.models(found))


def nodes(
    model: Annotated[str, typer.Argument(help="A name from [bold]fxserve models[/bold].")],
    train: Annotated[
        bool, typer.Option("--train", help="List only the node names of the graph in train mode.")
    ] = False,
    weights: Annotated[
        str, typer.Option(help="Weights, which determine the structure; they are not loaded.")
    ] = "DEFAULT",
) -> None:
    """List a model's nodes: levels first, then each node with its shape, layout and target.

    \b
    fxserve nodes resnet50
    fxserve nodes googlenet --train
    """
    from fxcore.errors import NotTraceable
    from service.cli import tables

    graph = _graph(model, weights)
    if train:
        if not graph.train_nodes:
            raise NotTraceable(f"{model} can be traced in eval mode only; leave out --train")
        print("\n".join(graph.train_nodes))
        return
    if graph.levels:
        tables.show(tables.levels(graph.levels))
        print()
    tables.show(tables.nodes(node for node in graph.nodes if node.name in graph.by_name))
    for part in graph.untraceable:
        print(f"closed: {part.path}: {part.reason}")


def graph(
    model: Annotated[str, typer.Argument(help="A name from [bold]fxserve models[/bold].")],
    format: Annotated[
        GraphFormat | None, typer.Option(help="By default from the suffix of --out, else table.", show_default=False)
    ] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Height of the input, for shapes.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the input, for shapes.")] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Depth of the modules to draw as one box each: 1 means layer1, 2 means layer1.0."),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Weights, which determine the structure; they are not loaded.")
    ] = "DEFAULT",
    out: Annotated[Path | None, typer.Option(help="File to write to instead of stdout.")] = None,
) -> None:
    """Print or draw a model's eval graph.

    \b
    fxserve graph resnet50
    fxserve graph resnet50 --out resnet50.svg --depth 2
    fxserve graph resnet50 --format json --height 480 --width 640
    """
    if (height is None) != (width is None):
        raise typer.BadParameter("--height and --width must be given together")
    suffix = out.suffix.lower() if out is not None else ""
    if format is None and suffix and suffix not in _FORMAT_OF:
        raise typer.BadParameter(
            f"--out: the suffix {suffix} is none of {', '.join(_FORMAT_OF)}; use one of these or give --format"
        )
    chosen = format or _FORMAT_OF.get(suffix, "table")
    if depth is not None and chosen not in _DRAWINGS:
        raise typer.BadParameter(f"--depth is for drawings ({', '.join(_DRAWINGS)}), not for {chosen}")
    shown = _graph(model, weights)
    if height is not None and width is not None:
        shown = shown.at(height, width)
    if chosen == "json":
        from service.http.graph_formats import write

        text = write(shown, "json").decode() + "\n"
    else:
        from fxcore.rendering.render import render

        text = render(shown, chosen, depth)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)
        print(f"wrote {out}")


def _graph(model: str, weights: str) -> ModelGraph:
    from fxcore.graph.model_graph import model_graph
    from fxcore.models.catalog import get_model
    from service.engine.models.own_models import register_models

    register_models(settings_of({}).models_dir, try_each=False)
    entry = get_model(model)
    return model_graph(entry, entry.structure(weights))
