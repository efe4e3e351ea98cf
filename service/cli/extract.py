"""``fxserve extract``: features of whole folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.environment import device_of, settings_of

if TYPE_CHECKING:
    from service.offline import Job, Summary
    from service.settings import Settings

Pool = Literal["none", "avg", "max", "gem", "cls", "roi"]
Dtype = Literal["float32", "float16", "bfloat16"]
Normalize = Literal["l2"]
Preprocess = Literal["default", "pil", "fast", "none"]
Precision = Literal["float32", "bfloat16", "float16", "int8"]
Backend = Literal["auto", "eager", "openvino", "inductor"]
ShardFormat = Literal["safetensors", "npz", "parquet", "zarr"]


def extract(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...",
            help="Folders (all images below them), image files, tar archives such as WebDataset's shards, patterns "
            "in quotes: 'photos/**/*.jpg', or URLs of these: s3://bucket/photos/.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A name from [bold]fxserve models[/bold].")],
    nodes: Annotated[str, typer.Option(help="Nodes, levels or paths, separated by commas; NODE:KEY names an output.")],
    out: Annotated[str, typer.Option(help="Folder or URL to write; one that an earlier run began is gone on with.")],
    format: Annotated[ShardFormat, typer.Option(help="Of the shards; parquet and zarr need fxserve\\[offline].")] = (
        "safetensors"
    ),
    weights: Annotated[
        str, typer.Option(help="DEFAULT, a name, random, or file:NAME in FXSERVE_WEIGHTS_DIR.")
    ] = "DEFAULT",
    pool: Annotated[
        Pool, typer.Option(help="Pool each map to one vector an image; roi: the boxes of --boxes, by roi_align.")
    ] = "none",
    boxes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="With --pool roi: a Parquet or CSV file with the columns path and boxes, a list of \\[x1, y1, x2, y2] "
            "in pixels of the image, in CSV as JSON. Paths are absolute, URLs, or relative to the file's folder.",
        ),
    ] = None,
    roi_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, show_default=False, help="With --pool roi: positions a side of each box, 7; 1 is a vector."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of floating outputs; without it, the model's.", show_default=False)
    ] = None,
    normalize: Annotated[
        Normalize | None, typer.Option(help="l2: unit length over the channels.", show_default=False)
    ] = None,
    preprocess: Annotated[
        Preprocess,
        typer.Option(help="default: the weights' transform of tensors; pil: of PIL images; fast: JPEG at a half."),
    ] = "default",
    precision: Annotated[Precision, typer.Option(help="The arithmetic the model runs in.")] = "float32",
    backend: Annotated[Backend, typer.Option(help="What runs the model; auto tries for many images.")] = "auto",
    image_size: Annotated[int | None, typer.Option(help="Crop images to a square of this side in pixels.")] = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, help="Images, or boxes, of a shard; without it, as many as make 64 MiB.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="Address of a server to use instead of this process; may be repeated.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FXSERVE_API_KEY", show_default=False, help="What the servers want to see, if anything."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Use a Ray cluster: its address, auto for the one of this machine, local to begin one; writes "
            "Parquet. Needs fxserve\\[ray].",
        ),
    ] = None,
) -> None:
    """Compute nodes of any number of images into shards in a folder. No server is needed.

    A run that was ended, by whatever, is gone on with by the same command: no image is lost and none is done twice.
    index.sqlite says where the features of an image are (table images: path, shard, row), errors.jsonl which images
    could not be read, spec.json what was computed.

    With --pool roi a row is a box and no image: path says whose it is, and box which. Images without boxes are left
    out.

    With --ray, rows are in Parquet files, images that could not be read have an error there, and stay so.

    \b
    fxserve extract photos/ --model resnet50 --nodes C4,C5 --pool avg --out features/
    fxserve extract 'shards/*.tar' --model vit_b_16 --nodes encoder:tokens --pool cls --format npz --out features/
    fxserve extract photos/ --model resnet50 --nodes C4 --pool roi --boxes photos/boxes.csv --out regions/
    fxserve extract photos/ --model resnet50 --nodes C5 --pool avg --out features/ --server http://127.0.0.1:8000
    fxserve extract s3://bucket/photos --model resnet50 --nodes C5 --pool avg --out s3://bucket/features --ray auto
    """
    from fxcore.errors import FxError
    from service.cli import tables
    from service.engine import FeatureOptions
    from service.offline import Job, extract
    from service.offline.progress import progress
    from service.schemas.v1 import ExtractorSpec

    spec = ExtractorSpec(
        model=model,
        weights=weights,
        return_nodes=_named_nodes(nodes),
        precision=precision,
        backend=backend,
        image_size=image_size,
    )
    settings = settings_of({"device": device})
    device_of(settings)
    if (pool == "roi") != (boxes is not None):
        raise typer.BadParameter("--pool roi and --boxes go together")
    if roi_size is not None and boxes is None:
        raise typer.BadParameter("--roi-size goes with --pool roi")
    options = FeatureOptions(pool, dtype, normalize, preprocess, roi_size=roi_size or FeatureOptions.roi_size)
    job = Job(tuple(inputs), out, format, spec, options, tuple(server or ()), api_key, shard_rows, boxes)
    if ray is not None:
        made = _on_ray(ray, job, settings)
    else:
        with progress() as report:
            made = extract(job, settings, report)
    if not made.images:
        raise FxError(f"no images found in {', '.join(inputs)}")
    tables.show(tables.outputs(made.outputs))
    out = out.rstrip("/")
    told = "the column error" if ray is not None else f"{out}/errors.jsonl"
    unreadable = f", {made.unreadable} could not be read: see {told}" if made.unreadable else ""
    print(f"{out}: {made.done} of {made.images} images in {made.shards} shard{'s' * (made.shards != 1)}{unreadable}")
    if not made.done:
        raise typer.Exit(1)


def _on_ray(address: str, job: Job, settings: Settings) -> Summary:
    from fxcore.errors import FxError

    if job.servers:
        raise typer.BadParameter("--ray and --server are two ways to compute: name one")
    if job.format not in ("safetensors", "parquet"):
        raise typer.BadParameter(f"--ray writes Parquet, not {job.format}")
    try:
        from service.cluster import bulk
    except ImportError as error:
        raise FxError(f"--ray needs Ray Data: pip install 'fxserve[ray]' ({error})") from error
    return bulk.extract(job, settings, address)


def _named_nodes(text: str) -> dict[str, str]:
    """``"layer3:C4,layer4"`` → ``{"layer3": "C4", "layer4": "layer4"}``."""
    from service.schemas.node_pairs import node_pairs

    named: dict[str, str] = {}
    try:
        for node, key in node_pairs(text):
            if node in named:
                raise ValueError(f"{node!r} is named twice")
            named[node] = key
    except ValueError as fault:
        raise typer.BadParameter(f"--nodes: {fault}") from fault
    return named
