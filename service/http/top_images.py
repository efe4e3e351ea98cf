"""The images with the largest values of each channel, from a folder made by ``fxserve extract --reduce top:N``."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import orjson

from fxcore.errors import FxError
from fxcore.graph.model_graph import model_graph
from fxcore.images.files import open_image
from fxcore.models.catalog import get_model
from service import problems

_SIDE = 256
"""Maximum side of a shown image, in pixels."""

_QUALITY = 85
_COLUMNS = ["output", "node", "channel", "rank", "path", "value", "place"]


@dataclass(frozen=True)
class _Channels:
    """The location of a node's rows in the table.

    Attributes:
        start: its first row.
        count: number of channels.
        images: number of images per channel.
    """

    start: int
    count: int
    images: int


def _key(path: str) -> str:
    """Return the key of an image, which does not reveal its path and stays the same when images are added."""
    return hashlib.sha256(path.encode(errors="surrogatepass")).hexdigest()[:16]


class TopImages:
    """The content of ``top.parquet`` and its images.

    Args:
        folder: folder with ``spec.json`` and ``top.parquet``.
        max_bytes: maximum bytes of an image's file.
        max_pixels: maximum pixels per image.

    Attributes:
        model, weights: the model and weights that computed the values.
        images: number of reduced images.
        nodes: exact name of each node → number of channels.

    Raises:
        FxError: the folder cannot be read.
    """

    def __init__(self, folder: Path, max_bytes: int, max_pixels: int) -> None:
        self._index = folder / "index.sqlite"
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels
        try:
            import pyarrow.parquet

            spec = orjson.loads((folder / "spec.json").read_bytes())["spec"]
            table = pyarrow.parquet.read_table(folder / "top.parquet", columns=_COLUMNS)
            about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            self.model, self.weights, self.images = spec["model"], spec["weights"], int(about["images"])
        except ImportError as error:
            raise FxError("FXSERVE_STATISTICS needs pyarrow: pip install 'fxserve[offline]'") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FxError(f"FXSERVE_STATISTICS: {folder} holds no readable statistics: {error}") from error
        self._table = table.combine_chunks()
        self._keys = {path: _key(path) for path in set(table["path"].to_pylist())}
        self._paths = {key: path for path, key in self._keys.items()}
        self._nodes: dict[str, _Channels] = {}
        self._outputs: dict[str, str] = {}
        self._find_nodes(table["output"].to_pylist(), table["node"].to_pylist(), table["channel"].to_pylist())
        self.nodes = {node: found.count for node, found in self._nodes.items()}

    def _find_nodes(self, outputs: list[str], nodes: list[str], channels: list[int]) -> None:
        start = 0
        while start < len(nodes):
            stop = start
            while stop < len(nodes) and outputs[stop] == outputs[start]:
                stop += 1
            count = channels[stop - 1] + 1
            self._nodes.setdefault(nodes[start], _Channels(start, count, (stop - start) // count))
            self._outputs[outputs[start]] = nodes[start]
            start = stop

    def summary(self, model: str) -> dict[str, Any] | None:
        """Describe the statistics of ``model``; None if there are none."""
        if model != self.model:
            return None
        return {"weights": self.weights, "images": self.images, "nodes": list(self.nodes)}

    def known(self, name: str) -> str | None:
        """Return the exact name of a node, given that name or the key of its output; None if it is neither."""
        return name if name in self._nodes else self._outputs.get(name)

    def resolve(self, name: str) -> str:
        """Return the exact name of a node, given another name for it in the model.

        May trace the model, so do not call it on the event loop.

        Raises:
            UnknownNode: it has no statistics.
        """
        entry = get_model(self.model)
        node = None
        with suppress(FxError):
            node = model_graph(entry, entry.structure(self.weights)).resolve({name: "node"})["node"]
        if node is None or node not in self._nodes:
            there = ", ".join(self._nodes)
            raise problems.UnknownNode(
                f"there are no top images of {name!r}, only of {there}",
                name=name,
                suggestions=list(self._nodes)[:5],
            )
        return node

    def top(self, node: str, channel: int) -> list[dict[str, Any]]:
        """Return rank, key, file name, value and place of each image of a channel, the largest first.

        Raises:
            InvalidRequest: the channel does not exist.
        """
        found = self._nodes[node]
        if channel >= found.count:
            raise problems.InvalidRequest(f"channel must be from 0 to {found.count - 1} for {node}, not {channel}")
        rows = self._table.slice(found.start + channel * found.images, found.images).to_pylist()
        return [
            {
                "rank": row["rank"],
                "key": self._keys[row["path"]],
                "name": posixpath.basename(row["path"]),
                "value": row["value"],
                "place": row["place"],
            }
            for row in rows
        ]

    def picture(self, key: str) -> bytes:
        """Return a thumbnail of an image as JPEG.

        Args:
            key: key of an image, from :meth:`top`; no other file is read.

        Raises:
            NotFound: the key is unknown, or its file can no longer be read or is in a compressed archive.
            BadImage, ImageTooLarge: it cannot be decoded.
        """
        path = self._paths.get(key)
        if path is None:
            raise problems.NotFound(f"there is no image {key}; they are listed by GET /v1/models/{{model}}/statistics")
        try:
            data = self._read(path)
        except problems.Problem:
            raise
        except Exception as error:  # drivers of buckets have exceptions of their own
            raise problems.NotFound(f"{posixpath.basename(path)} can no longer be read") from error
        image = open_image(data, self._max_pixels).convert("RGB")
        image.thumbnail((_SIDE, _SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=_QUALITY)
        return buffer.getvalue()

    def _read(self, path: str) -> bytes:
        """Read an encoded image from its location in the index: a file, or a member of an archive."""
        file, offset, size = path, -1, None
        if self._index.exists():
            place = f"file:{quote(str(self._index.absolute()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(place, uri=True)) as index:
                query = 'SELECT file, "offset", size FROM images WHERE path = ?'
                row = index.execute(query, (path,)).fetchone()
            if row is not None:
                file, offset, size = os.fsdecode(row[0]), row[1], row[2]
        if offset >= 0 and not file.lower().endswith(".tar"):  # a compressed archive can only be read sequentially
            name = posixpath.basename(path)
            raise problems.NotFound(
                f"{name} is in a compressed archive; only images in files and uncompressed .tar archives can be shown"
            )
        opened = fsspec.open(file, "rb") if "://" in file else open(file, "rb")  # noqa: SIM115  closed below
        with opened as stream:
            if offset >= 0:
                stream.seek(offset)
            limit = self._max_bytes if size is None else min(size, self._max_bytes)
            return bytes(stream.read(limit))
