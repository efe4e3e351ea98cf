"""Features of image files without a server: the same engine, fed from the disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from torch import Tensor

from fxcore.errors import BadTensor, FxError
from service.codecs import npy, safetensors
from service.engine import Engine, ExtractorRecord, FeatureOptions
from service.schemas import ExtractorSpec
from service.settings import Settings

SUFFIXES = (".safetensors", ".npz", ".npy")

# Files read and sent to the engine together; it makes its own batches of them.
_CHUNK = 8
# The engine's limits protect a service from its clients; here they are one person.
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Extraction:
    """What :func:`extract_files` made.

    Attributes:
        outputs: key → tensor on the CPU, one row an image, in the order asked for.
        nodes: key → exact node name.
        weights: canonical name.
        device: where it was computed.
    """

    model: str
    weights: str
    device: str
    fingerprint: str
    nodes: dict[str, str]
    images: list[str]
    outputs: dict[str, Tensor]


def check_target(out: Path, nodes: int) -> None:
    """Refuse a file that could not be written, before anything is computed.

    Raises:
        FxError: a suffix that is not one of :data:`SUFFIXES`, several nodes for an npy file, or no such folder.
    """
    if out.suffix not in SUFFIXES:
        raise FxError(f"{out}: the suffix decides the format; use one of {', '.join(SUFFIXES)}")
    if out.suffix == ".npy" and nodes != 1:
        raise FxError(f"{out}: an npy file holds one array and {nodes} nodes are asked for; write .npz or .safetensors")
    if not out.parent.is_dir():
        raise FxError(f"{out}: there is no folder {out.parent}")


def extract_files(paths: Sequence[Path], spec: ExtractorSpec, pool: str, settings: Settings) -> Extraction:
    """Compute what ``spec`` returns for each file.

    Raises:
        FxError: as the service would answer; of a bad image it names the file.
        OSError: a file that cannot be read.
    """
    unlimited = settings.model_copy(
        update={
            "max_response_bytes": _NO_LIMIT,
            "max_inflight_bytes": _NO_LIMIT,
            "request_timeout": 7 * 86400.0,
            "preload": (),
            "lowering": False,  # a backend that takes over half-way would round the later rows differently
            "models": None,
        }
    )
    return asyncio.run(_extract(paths, spec, FeatureOptions(pool=pool), unlimited))


async def _extract(
    paths: Sequence[Path], spec: ExtractorSpec, options: FeatureOptions, settings: Settings
) -> Extraction:
    engine = Engine(settings)
    await engine.start()
    try:
        record, _ = await engine.extractor(spec)
        await engine.load(record)
        # What a detector pads an image to depends on the others beside it; a file's values must not.
        step = 1 if record.preprocessing.pads else _CHUNK
        parts: dict[str, list[Tensor]] = {key: [] for key in record.return_nodes}
        for start in range(0, len(paths), step):
            outputs = await _chunk(engine, record, paths[start : start + step], options)
            for key, rows in outputs.items():
                parts[key].append(rows)
        return Extraction(
            model=spec.model,
            weights=record.weights,
            device=record.device,
            fingerprint=record.graph.fingerprint,
            nodes=dict(record.return_nodes),
            images=[str(path) for path in paths],
            outputs={key: _joined(key, rows) for key, rows in parts.items()},
        )
    finally:
        await engine.close(0.0)


async def _chunk(
    engine: Engine, record: ExtractorRecord, paths: Sequence[Path], options: FeatureOptions
) -> dict[str, Tensor]:
    images = [path.read_bytes() for path in paths]
    try:
        return (await engine.features(record, images, options)).outputs
    except FxError as error:
        index = error.extra.get("index")
        if isinstance(index, int):
            error.detail = f"{paths[index]}: {error.detail.removeprefix(f'image {index}: ')}"
        raise


def _joined(key: str, rows: Sequence[Tensor]) -> Tensor:
    shapes = sorted({tuple(part.shape[1:]) for part in rows})
    if len(shapes) > 1:
        shown = " and ".join(" x ".join(map(str, shape)) for shape in shapes[:2])
        raise BadTensor(f"{key}: the images give maps of different sizes ({shown}); use --pool avg or --image-size")
    return torch.cat(list(rows))


def save(made: Extraction, out: Path) -> None:
    """Write the outputs in the format that the suffix of ``out`` means; the file appears when it is whole.

    Raises:
        FxError: a dtype that the format cannot hold.
        OSError: the file cannot be written.
    """
    if out.suffix == ".safetensors":
        metadata = {
            "model": made.model,
            "weights": made.weights,
            "nodes": orjson.dumps(made.nodes).decode(),
            "fingerprint": made.fingerprint,
            "images": orjson.dumps(made.images).decode(),
        }
        parts = safetensors.write(made.outputs, metadata)
    else:
        if not all(npy.has_numpy_dtype(tensor.dtype) for tensor in made.outputs.values()):
            raise FxError(f"{out}: NumPy has no bfloat16; write .safetensors, or use --precision float16")
        parts = npy.write_npz(made.outputs) if out.suffix == ".npz" else npy.write(next(iter(made.outputs.values())))
    unfinished = out.with_name(out.name + ".part")
    try:
        with unfinished.open("wb") as file:
            file.writelines(parts)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
