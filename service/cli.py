"""The ``fxserve`` command. Nothing heavy is imported before a command needs it, so that help comes at once."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from fxcore.graphs import ModelGraph
    from service.settings import Settings

Task = Literal["classification", "quantization", "segmentation", "detection", "video", "optical_flow"]
Format = Literal["json", "table", "code", "dot", "svg", "mermaid"]
Pool = Literal["none", "avg", "max", "gem", "cls"]
Dtype = Literal["float32", "float16", "bfloat16"]
Normalize = Literal["l2"]
Preprocess = Literal["default", "fast", "none"]
Precision = Literal["float32", "bfloat16", "float16", "int8"]
Backend = Literal["auto", "eager", "openvino", "inductor"]
ShardFormat = Literal["safetensors", "npz", "parquet", "zarr"]
KeyScope = Literal["read", "admin"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]

_FORMAT_OF: dict[str, Format] = {
    ".txt": "table",
    ".py": "code",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".mmd": "mermaid",
    ".json": "json",
}


class Commands(TyperGroup):
    """Tells what the user got wrong in one line on stderr: exit code 2 for the command's form, 1 for the rest."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            sys.exit(130)
        except Exception as error:
            told = _told(error)
            if told is None:
                raise  # a defect of ours: its traceback is what is wanted
            message, code = told
            print(f"fxserve: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _told(error: Exception) -> tuple[str, int] | None:
    """What to say of an error and the exit code; None where it is not the user's."""
    # Where a module has not been imported, none of its errors can have been raised.
    fx_errors, pydantic = sys.modules.get("fxcore.errors"), sys.modules.get("pydantic")
    if fx_errors is not None and isinstance(error, fx_errors.FxError):
        return error.detail, 1
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']} (it is {first['input']!r})", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 1
    if hasattr(error, "format_message"):  # typer's errors of usage, whose base class it does not export
        context = getattr(error, "ctx", None)
        return error.format_message() + (f" (see {context.command_path} --help)" if context else ""), 2
    return None


app = typer.Typer(
    name="fxserve", cls=Commands, rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False
)


def main() -> None:
    """The console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        parts = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision"))
        print(f"fxserve {version('fxserve')} ({parts})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Every inner activation of a vision model: name the nodes of its torch.fx graph, give images, get tensors.

    \b
    fxserve nodes resnet50                         what can be asked for
    fxserve extract photos/ --model resnet50 --nodes C4,C5 --out features/
    fxserve serve                                  the same over HTTP

    Each command has its own --help with examples.
    """
    if context.invoked_subcommand is None:
        context.get_help()  # prints by itself where it has rich


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    models: Annotated[str | None, typer.Option(help="The only models to serve, separated by commas.")] = None,
    preload: Annotated[
        str | None, typer.Option(help="Extractors to build before the service is ready, separated by semicolons.")
    ] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder that weights=file:NAME is read from.")] = None,
    workers: Annotated[int | None, typer.Option(help="Server processes on this port.")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Log lines for people, or one JSON object each.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="info and debug show each request.")] = "warning",
) -> None:
    """Serve the HTTP API until Ctrl-C or SIGTERM; what was accepted is finished first.

    Each option stands for the environment variable FXSERVE_<OPTION> and wins over it. The README lists the
    variables that have no option here: limits, timeouts, threads.

    \b
    fxserve serve
    fxserve serve --host 0.0.0.0 --port 80 --preload 'resnet50:C4,C5;vit_b_16@random:encoder'
    """
    from service.run import end_on_signals, run, run_workers

    end_on_signals()
    given = {
        "host": host,
        "port": port,
        "device": device,
        "models": models,
        "preload": preload,
        "weights_dir": weights_dir,
        "workers": workers,
        "log_format": log_format,
    }
    settings = _settings(given)
    chosen = _device(settings)
    if settings.workers > 1:
        if settings.port == 0:
            raise typer.BadParameter("--workers: several processes need one --port to share, not 0")
        # They are started anew and read what was given here from the environment.
        os.environ |= {f"FXSERVE_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        run_workers(settings, chosen, log_level)
        return
    from service.app import create_app

    run(create_app(settings), settings, chosen, log_level)


@app.command()
def check() -> None:
    """Show what the machine has, what the service will use of it with its settings, and why.

    \b
    fxserve check
    FXSERVE_WORKERS=2 fxserve check
    """
    from service.check import main

    main(_settings({}))


@app.command()
def models(
    task: Annotated[Task | None, typer.Option(help="Only models made for this.")] = None,
    query: Annotated[str | None, typer.Option("--query", "-q", help="Only models whose name contains this.")] = None,
) -> None:
    """List the models, their default weights and whether those are on this machine.

    \b
    fxserve models --query resnet
    fxserve models --task detection
    """
    from fxcore.catalog import list_models
    from service import tables
    from service.engine.own_models import register_models

    register_models(_settings({}).models_dir, try_each=False)

    found = [
        entry
        for entry in list_models()
        if (task is None or entry.task == task) and (query is None or query.lower() in entry.name.lower())
    ]
    tables.show(tables.models(found))


@app.command()
def nodes(
    model: Annotated[str, typer.Argument(help="A name from [bold]fxserve models[/bold].")],
    train: Annotated[bool, typer.Option("--train", help="Only the names of the graph in train mode.")] = False,
    weights: Annotated[str, typer.Option(help="Weights whose structure to show; they are not loaded.")] = "random",
) -> None:
    """List a model's nodes: levels first, then each node with its shape, layout and target.

    \b
    fxserve nodes resnet50
    fxserve nodes googlenet --train
    """
    from service import tables

    graph = _graph(model, weights)
    if train:
        print("\n".join(graph.train_nodes))
        return
    if graph.levels:
        tables.show(tables.levels(graph))
        print()
    tables.show(tables.nodes(graph))
    for part in graph.closed:
        print(f"closed: {part.path}: {part.reason}")


@app.command()
def graph(
    model: Annotated[str, typer.Argument(help="A name from [bold]fxserve models[/bold].")],
    format: Annotated[
        Format | None, typer.Option(help="By default what the suffix of --out says, else table.", show_default=False)
    ] = None,
    height: Annotated[int | None, typer.Option(help="Height of the input that shapes are for.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the input that shapes are for.")] = None,
    weights: Annotated[str, typer.Option(help="Weights whose structure to show; they are not loaded.")] = "random",
    out: Annotated[Path | None, typer.Option(help="File to write instead of printing.")] = None,
) -> None:
    """Print or draw a model's eval graph.

    \b
    fxserve graph resnet50
    fxserve graph resnet50 --out resnet50.svg
    fxserve graph resnet50 --format json --height 480 --width 640
    """
    if (height is None) != (width is None):
        raise typer.BadParameter("--height and --width go together")
    chosen = format or _FORMAT_OF.get(out.suffix.lower() if out else "", "table")
    shown = _graph(model, weights)
    if height is not None and width is not None:
        shown = shown.at(height, width)
    if chosen == "json":
        from service.api.graphs import write

        text = write(shown, "json").decode() + "\n"
    else:
        from fxcore.render import render

        text = render(shown, chosen)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)
        print(f"wrote {out}")


@app.command()
def extract(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...",
            help="Folders (all images below them), image files, tar archives such as WebDataset's shards, or patterns "
            "in quotes: 'photos/**/*.jpg'.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A name from [bold]fxserve models[/bold].")],
    nodes: Annotated[str, typer.Option(help="Nodes, levels or paths, separated by commas; NODE:KEY names an output.")],
    out: Annotated[Path, typer.Option(help="Folder to write; one that an earlier run began is gone on with.")],
    format: Annotated[ShardFormat, typer.Option(help="Of the shards; parquet and zarr need fxserve[offline].")] = (
        "safetensors"
    ),
    weights: Annotated[str, typer.Option(help="DEFAULT, a name, random, or file:NAME.")] = "DEFAULT",
    pool: Annotated[Pool, typer.Option(help="Pool each map to one vector an image.")] = "none",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of floating outputs; without it, the model's.", show_default=False)
    ] = None,
    normalize: Annotated[
        Normalize | None, typer.Option(help="l2: unit length over the channels.", show_default=False)
    ] = None,
    preprocess: Annotated[
        Preprocess, typer.Option(help="fast: about twice as quick, within a grey level or two.")
    ] = "default",
    precision: Annotated[Precision, typer.Option(help="The arithmetic the model runs in.")] = "float32",
    backend: Annotated[Backend, typer.Option(help="What runs the model; auto tries for many images.")] = "auto",
    image_size: Annotated[int | None, typer.Option(help="Crop images to a square of this side in pixels.")] = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, help="Images of a shard; without it, as many as make 64 MiB.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="Address of a server to use instead of this process; may be repeated.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FXSERVE_API_KEY", show_default=False, help="What the servers want to see, if anything."),
    ] = None,
) -> None:
    """Compute nodes of any number of images into shards in a folder. No server is needed.

    A run that was ended, by whatever, is gone on with by the same command: no image is lost and none is done twice.
    index.sqlite says where the features of an image are (table images: path, shard, row), errors.jsonl which images
    could not be read, spec.json what was computed.

    \b
    fxserve extract photos/ --model resnet50 --nodes C4,C5 --pool avg --out features/
    fxserve extract 'shards/*.tar' --model vit_b_16 --nodes encoder:tokens --pool cls --format npz --out features/
    fxserve extract photos/ --model resnet50 --nodes C5 --pool avg --out features/ --server http://127.0.0.1:8000
    """
    from service import tables
    from service.engine import FeatureOptions
    from service.offline import Job, extract
    from service.offline.progress import progress
    from service.schemas import ExtractorSpec

    spec = ExtractorSpec(
        model=model,
        weights=weights,
        return_nodes=_named_nodes(nodes),
        precision=precision,
        backend=backend,
        image_size=image_size,
    )
    settings = _settings({"device": device})
    _device(settings)
    options = FeatureOptions(pool, dtype, normalize, preprocess)
    job = Job(tuple(inputs), out, format, spec, options, tuple(server or ()), api_key, shard_rows)
    with progress() as report:
        made = extract(job, settings, report)
    tables.show(tables.outputs(made.outputs))
    unreadable = f", {made.unreadable} could not be read: see {out / 'errors.jsonl'}" if made.unreadable else ""
    print(f"{out}: {made.done} of {made.images} images in {made.shards} shard{'s' * (made.shards != 1)}{unreadable}")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Whose key it is, for the log and for taking it back.")],
    scope: Annotated[KeyScope, typer.Option(help="read asks; admin also makes, loads and deletes.")] = "read",
) -> None:
    """Make an API key: its line for FXSERVE_API_KEYS_FILE goes to stdout, the key itself to stderr, once.

    \b
    fxserve key alice
    fxserve key deployment --scope admin

    Append the line with >> FILE, and have a server that runs read it with SIGHUP.
    """
    from service import keys

    try:
        made, secret = keys.make(name, scope)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(made.line)
    print(f"{secret}\nkeep it: it is not stored; send it as Authorization: Bearer {secret[:8]}…", file=sys.stderr)


def _graph(model: str, weights: str) -> ModelGraph:
    from fxcore.catalog import get_model
    from fxcore.graphs import model_graph
    from service.engine.own_models import register_models

    register_models(_settings({}).models_dir, try_each=False)
    entry = get_model(model)
    return model_graph(entry, entry.canonical_weights(weights))


def _settings(given: dict[str, Any]) -> Settings:
    """Settings from the environment, and from ``given`` where that is not None; raises pydantic's ValidationError."""
    from service.settings import Settings

    return Settings(**{name: value for name, value in given.items() if value is not None})


def _device(settings: Settings) -> str:
    """The device that will be used."""
    from service.engine.engine import pick_device

    try:
        return str(pick_device(settings.device))
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"device: {str(error).splitlines()[0]}") from error


def _named_nodes(text: str) -> dict[str, str]:
    """``"layer3:C4,layer4"`` → ``{"layer3": "C4", "layer4": "layer4"}``."""
    named: dict[str, str] = {}
    for part in text.split(","):
        node, colon, key = (piece.strip() for piece in part.partition(":"))
        if not node or (colon and not key):
            raise typer.BadParameter(f"--nodes: {part!r} is not NODE or NODE:KEY")
        if node in named:
            raise typer.BadParameter(f"--nodes: {node!r} is named twice")
        named[node] = key or node
    return named
