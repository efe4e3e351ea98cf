"""``fxserve extract``: compute the features of whole folders of images."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.choices import Backend, Dtype, FileFormat, Fit, Normalize, Precision, Preprocess, pooling, reductions
from service.cli.environment import device_of, settings_of

if TYPE_CHECKING:
    from service.offline import Job, Summary
    from service.settings import Settings


def extract(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...",
            help="Folders (searched recursively), image files, tar archives such as WebDataset's shards, quoted glob "
            "patterns such as 'photos/**/*.jpg', or URLs of these, such as s3://bucket/photos/.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A name from [bold]fxserve models[/bold].")],
    nodes: Annotated[
        str,
        typer.Option(
            help="Nodes, levels or paths, separated by commas; NODE:KEY renames an output. Without keys, * stands for "
            "one component of a path."
        ),
    ],
    out: Annotated[str, typer.Option(help="Output folder or URL; an interrupted run in it is resumed.")],
    format: Annotated[
        FileFormat, typer.Option(help="Format of the shards; parquet and zarr need fxserve\\[offline].")
    ] = ("safetensors"),
    weights: Annotated[
        str, typer.Option(help="DEFAULT, the name of weights, random, or file:NAME in FXSERVE_WEIGHTS_DIR.")
    ] = "DEFAULT",
    pool: Annotated[
        str,
        typer.Option(
            parser=pooling,
            metavar="POOLING",
            help="none, or pool each map to one vector per image: avg, max, gem or cls, or several joined by +; roi "
            "pools the boxes in --boxes with roi_align, points samples the map at the points in --points, mask "
            "averages over the masks in --masks.",
        ),
    ] = "none",
    boxes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="With --pool roi: a Parquet or CSV file with the columns path and boxes. Boxes are a list of "
            "\\[x1, y1, x2, y2] in pixels of the image, as JSON in CSV; paths are absolute, URLs, or relative to the "
            "file's folder.",
        ),
    ] = None,
    points: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="With --pool points: a file like that of --boxes, with the column points: lists of \\[x, y].",
        ),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="With --pool mask: a file like that of --boxes, with the column masks: lists of PNG files, binary or "
            "in base64, or of COCO run-length encodings.",
        ),
    ] = None,
    roi_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            show_default=False,
            help="With --pool roi: side of each pooled box, 7 by default; 1 gives a vector.",
        ),
    ] = None,
    project: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65536,
            show_default=False,
            help="Project each row, flattened after pooling, to this many values with the matrix of scikit-learn's "
            "SparseRandomProjection.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**32 - 1, show_default=False, help="With --project: seed of its matrix, 0 by default."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Dtype of floating-point outputs; the model's by default. Images with values outside the range of "
            "float16 are listed in errors.jsonl.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[
        Normalize | None, typer.Option(help="l2 scales to unit length along the channels.", show_default=False)
    ] = None,
    preprocess: Annotated[
        Preprocess,
        typer.Option(
            help="default: the weights' transform of decoded tensors; pil: of PIL images; fast: decode large JPEG "
            "files at half or quarter size; none: only scale pixels to \\[0, 1]."
        ),
    ] = "default",
    precision: Annotated[Precision, typer.Option(help="The arithmetic the model runs in.")] = "float32",
    backend: Annotated[
        Backend, typer.Option(help="Backend that runs the model; auto looks for a faster backend if that saves time.")
    ] = "auto",
    image_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIDE|HEIGHTxWIDTH",
            show_default=False,
            help="Size of the input in pixels; the weights' own by default. With --fit native, the shorter side.",
        ),
    ] = None,
    fit: Annotated[
        Fit,
        typer.Option(
            help="How images are fitted to that size: crop (the weights' resize and centre crop), stretch, pad (adds "
            "an output valid_box with the image's position), or native (keeps the aspect ratio)."
        ),
    ] = "crop",
    reduce: Annotated[
        str | None,
        typer.Option(
            parser=reductions,
            metavar="STATISTICS",
            show_default=False,
            help="Write statistics of the images instead of features: mean, std and cov of each channel over all "
            "images and positions, and top:N, the N images with the largest values of each channel; several are "
            "separated by commas. Pooling comes first.",
        ),
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows per shard; by default, about 64 MiB of them.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="URL of a server to compute on instead of this process; may be repeated.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FXSERVE_API_KEY", show_default=False, help="API key for the servers."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Compute on a Ray cluster and write Parquet: its address, auto for the cluster of this machine, or "
            "local to start one. --out is then a bucket or, except with --reduce, a folder that all nodes share. "
            "Needs fxserve\\[ray].",
        ),
    ] = None,
) -> None:
    """Compute features of any number of images and write them to shards in a folder. No server is needed.

    The same command resumes an interrupted run; no image is lost or computed twice. index.sqlite maps each image to its
    shard and row (table images: path, shard, row), errors.jsonl lists the images that could not be read, and spec.json
    describes what was computed. Files that are not images are skipped and counted. Finished images are not computed
    again, even if their files have changed since; to compute those of a shard again, delete it.

    With --pool roi each row is a box: path is its image, box its coordinates. Images without boxes are skipped. With
    --pool points or mask it is a point or a mask: point has its coordinates, and mask its place in the image's list.

    With --reduce the output is stats.safetensors (NODE.count, NODE.mean, NODE.std, NODE.cov) and top.parquet. Folders
    of several machines are merged by [bold]fxserve merge[/bold].

    With --ray, but not --reduce, the output is Parquet files; images that could not be read have an error there.

    \b
    fxserve extract photos/ --model resnet50 --nodes C4,C5 --pool avg --out features/
    fxserve extract 'shards/*.tar' --model vit_b_16 --nodes encoder:tokens --pool cls --format npz --out features/
    fxserve extract photos/ --model resnet50 --nodes 'layer1,layer2,layer3,layer4' --project 4096 --out features/
    fxserve extract photos/ --model resnet50 --nodes C4 --pool roi --boxes photos/boxes.csv --out regions/
    fxserve extract photos/ --model resnet50 --nodes layer3,layer4 --reduce mean,std,top:9 --out statistics/
    fxserve extract photos/ --model resnet50 --nodes C5 --pool avg --out features/ --server http://127.0.0.1:8000
    fxserve extract s3://bucket/photos --model resnet50 --nodes C5 --pool avg --out s3://bucket/features --ray auto
    """
    from service.schemas.regions import KINDS
    from service.schemas.specs import ExtractorSpec

    spec = ExtractorSpec(
        model=model,
        weights=weights,
        return_nodes=_named_nodes(nodes),
        precision=precision,
        backend=backend,
        image_size=_size(image_size),
        fit=fit,
    )
    if out in ("", "-"):
        raise typer.BadParameter(f"--out must be a folder or a URL, not {out!r}")
    files = {"roi": boxes, "points": points, "mask": masks}
    for region, file in files.items():
        if (pool == region) != (file is not None):
            raise typer.BadParameter(f"--pool {region} and --{KINDS[region].field} must be given together")
    if roi_size is not None and boxes is None:
        raise typer.BadParameter("--roi-size needs --pool roi")
    if seed is not None and project is None:
        raise typer.BadParameter("--seed needs --project")
    if preprocess == "none" and fit in ("stretch", "pad"):
        raise typer.BadParameter(f"--preprocess none does not resize images; leave out --fit {fit}, or --preprocess")
    if reduce is not None and (format != "safetensors" or shard_rows is not None):
        given = "--shard-rows" if shard_rows is not None else f"--format {format}"
        raise typer.BadParameter(f"--reduce writes stats.safetensors and top.parquet, not shards; leave out {given}")
    if ray is not None and server:
        raise typer.BadParameter("--ray and --server cannot be combined")
    if ray is not None and format not in ("safetensors", "parquet"):
        raise typer.BadParameter(f"--ray writes Parquet, not {format}")

    # Importing torch takes seconds, and usage errors need not wait for it.
    from fxcore.errors import FxError
    from service.cli import tables
    from service.engine import FeatureOptions
    from service.offline import Job, extract
    from service.offline.progress import progress

    settings = settings_of({"device": device, "workers": 1})  # a single process, so it gets all cores
    if ray is None:  # the nodes of a cluster have devices of their own
        device_of(settings)
    options = FeatureOptions(
        pool,
        dtype,
        normalize,
        preprocess,
        roi_size=roi_size or FeatureOptions.roi_size,
        project=project,
        seed=seed or FeatureOptions.seed,
    )
    job = Job(
        tuple(inputs), out, format, spec, options, tuple(server or ()), api_key, shard_rows, files.get(pool), reduce
    )
    on_ray = None if ray is None else _on_ray(ray)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio replaces no other: it cancels the run
    if on_ray is not None:
        summary = on_ray(job, settings)
    else:
        with progress() as report:
            summary = extract(job, settings, report)
    if not summary.images:
        raise FxError(f"no images found in {', '.join(inputs)}{f'; {summary.skipped}' if summary.skipped else ''}")
    tables.show(tables.outputs(summary.outputs))
    out = out.rstrip("/")
    errors = "the column error" if ray is not None and reduce is None else f"{out}/errors.jsonl"
    unreadable = f", {summary.unreadable} could not be read: see {errors}" if summary.unreadable else ""
    shards = f"{summary.shards} shard{'s' * (summary.shards != 1)}" if reduce is None else f"statistics ({reduce})"
    print(f"{out}: {summary.done} of {summary.images} images in {shards}{unreadable}")
    if summary.skipped:
        print(summary.skipped)
    if not summary.done:
        raise typer.Exit(1)


def _on_ray(address: str) -> Callable[[Job, Settings], Summary]:
    """Import Ray, which takes seconds, and return what runs a job on it."""
    from fxcore.errors import FxError

    try:
        from service.cluster import bulk
    except ImportError as error:
        raise FxError(f"--ray needs Ray Data: pip install 'fxserve[ray]' ({error})") from error
    return partial(bulk.extract, address=address)


def _size(text: str | None) -> int | tuple[int, int] | None:
    from service.schemas.image_size import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as fault:
        raise typer.BadParameter(f"--image-size: {fault}") from fault


def _named_nodes(text: str) -> list[str] | dict[str, str]:
    """Parse ``"layer3:C4,layer4"`` into the ``return_nodes`` of a spec."""
    from service.schemas.specs import node_pairs, return_nodes_of

    try:
        pairs = node_pairs(text)
        nodes = [node for node, _ in pairs]
        if twice := [node for node in nodes if nodes.count(node) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice")
    except ValueError as fault:
        raise typer.BadParameter(f"--nodes: {fault}") from fault
    return return_nodes_of(pairs)
