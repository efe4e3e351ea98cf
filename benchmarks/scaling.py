"""Measure how fxserve scales on default settings: a table, and a plot for each sweep.

    python benchmarks/scaling.py                        # all sweeps, some seven minutes
    python benchmarks/scaling.py --sweeps connections --seconds 6

Sweeps:

- connections: 1 to 512; 256 are admitted, and the others get 429 and retry after ``Retry-After``;
- images: 1 to 256 per request, over 4 connections, pooled;
- sizes: photographs from 100 x 75 to 20 million pixels, over 8 connections;
- extractors: 1 to 200 over one model, used in turn by 32 connections;
- models: 1 to 40, used in the same way: one architecture with different weights, so that each image costs the same;
- shapes: 1 to 64 aspect ratios of images with ``fit=native``, with a mean of 1.5, over 32 connections.

``workers.py`` compares numbers of server processes.

Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import load
import photos
import servers
import torch
import torchvision
from load import Load
from serve import CASES, SAFETENSORS, extractor, machine, say, table
from servers import Server

MOBILENET = next(case for case in CASES if case.model == "mobilenet_v3_small")
CONNECTIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
IMAGES = (1, 4, 16, 64, 256)
WIDTHS = (100, 224, 500, 1000, 2000, 5164)
"""Widths of the 4:3 photographs; the largest have 20 million pixels."""
EXTRACTORS = (1, 4, 16, 64, 200)
MODELS = (1, 4, 10, 20, 40)
SHAPES = (1, 4, 16, 64)


@dataclass
class Point:
    """One measurement of a sweep.

    Attributes:
        sweep: name of the sweep.
        x: value of its parameter.
        load: the result.
        images: images per request.
        note: remarks for the table.
    """

    sweep: str
    x: int
    load: Load
    images: int = 1
    note: str = ""

    @property
    def rate(self) -> float:
        return self.load.rate * self.images


class Scaling:
    """The sweeps, each with its own server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.files = photos.jpegs()

    def connections(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            requests = self._requests(server, [self._extractor(server)], self.files)
            for count in CONNECTIONS:
                yield Point("connections", count, self._run(server, requests, count))

    def images(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            path = self._extractor(server) + "?pool=avg"
            for count in IMAGES:
                body, kind = photos.multipart(list(islice(cycle(self.files), count)))
                requests = [load.http(server.port, path, body, kind, SAFETENSORS)]
                # Measure long enough for several complete responses.
                seconds = self.options.seconds * (3 if count > 64 else 1)
                yield Point("images", count, self._run(server, requests, 4, seconds), count)

    def sizes(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            path = self._extractor(server)
            for width in WIDTHS:
                files = photos.jpegs(width, width * 3 // 4)
                note = f"{sum(map(len, files)) // len(files) // 1000} KB a file"
                yield Point("sizes", width, self._run(server, self._requests(server, [path], files), 8), note=note)

    def extractors(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            yield from self._growing(server, "extractors", EXTRACTORS, [MOBILENET.spec("auto")])

    def models(self) -> Iterator[Point]:
        with tempfile.TemporaryDirectory() as folder:
            specs = []
            for number in range(max(MODELS)):
                torch.manual_seed(number)
                made = torchvision.models.get_model(MOBILENET.model, weights=None)
                torch.save(made.state_dict(), Path(folder, f"{number}.pth"))
                specs.append(MOBILENET.spec("auto") | {"weights": f"file:{number}.pth"})
            with servers.fxserve(weights_dir=folder) as server:
                yield from self._growing(server, "models", MODELS, specs)

    def shapes(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            spec = MOBILENET.spec("auto") | {"fit": "native", "image_size": 224}
            path = extractor(server, spec, 0)[0]
            for count in SHAPES:
                ratios = [1 + (place + 0.5) / count for place in range(count)]
                files = [photos.jpegs(round(375 * ratio), 375)[0] for ratio in ratios]
                found = self._run(server, self._requests(server, [path], files), 32)
                yield Point("shapes", count, found, note=held(server))

    def _growing(
        self, server: Server, sweep: str, counts: tuple[int, ...], specs: list[dict[str, Any]]
    ) -> Iterator[Point]:
        """Measure with a growing number of extractors, which differ in their outputs' keys."""
        paths: list[str] = []
        for count in counts:
            while len(paths) < count:
                spec = specs[len(paths) % len(specs)]
                keys = {node: f"{key}-{len(paths)}" for node, key in spec["return_nodes"].items()}
                settle = 0.0 if paths else self.options.settle
                paths.append(extractor(server, spec | {"return_nodes": keys}, settle)[0])
            requests = self._requests(server, paths, self.files)
            found = self._run(server, requests, 32)
            backends = [server.http.get(path.removesuffix("/features")).json()["backend"] for path in paths]
            note = f"{backends.count('openvino')} of {count} lowered, {held(server)}"
            yield Point(sweep, count, found, note=note)

    def _extractor(self, server: Server) -> str:
        return extractor(server, MOBILENET.spec("auto"), self.options.settle)[0]

    def _requests(self, server: Server, paths: list[str], files: list[bytes]) -> list[bytes]:
        """Build requests that cycle through all paths and files."""
        pairs = islice(zip(cycle(paths), cycle(files), strict=False), max(len(paths), len(files)))
        return [load.http(server.port, path, data, "image/jpeg", SAFETENSORS) for path, data in pairs]

    def _run(self, server: Server, requests: list[bytes], connections: int, seconds: float | None = None) -> Load:
        # Without wrk, whose latencies include error responses.
        seconds = seconds or self.options.seconds
        return load.run(server.port, requests, connections, seconds, self.options.warm, wrk=False)


def held(server: Server) -> str:
    """Return the server's memory and number of threads as text."""
    return f"{server.memory() / 1e9:.1f} GB resident, {server.process.num_threads()} threads"


LABELS = {
    "connections": "connections",
    "images": "images per request",
    "sizes": "width of a 4:3 photograph, pixels",
    "extractors": "extractors over one model",
    "models": "models",
    "shapes": "aspect ratios of the images",
}


def plot(points: list[Point], path: Path) -> None:
    """Plot one sweep: images/s, with p50 and p99 on the right axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    x = [point.x for point in points]
    axis.plot(x, [point.rate for point in points], "o-", color="tab:blue")
    axis.set(xscale="log", ylim=(0, None), xlabel=LABELS[points[0].sweep], xticks=x, xticklabels=x)
    axis.set_ylabel("images/s", color="tab:blue")
    axis.minorticks_off()
    right = axis.twinx()
    right.plot(x, [point.load.p50 for point in points], "s-", color="tab:orange", markersize=3, label="p50")
    right.plot(x, [point.load.p99 for point in points], "s--", color="tab:red", markersize=3, label="p99")
    right.set(yscale="log", ylabel="ms")
    right.legend(loc="lower right", fontsize=8)
    axis.set_title(f"fxserve, default settings, {MOBILENET.model}; {machine()}", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    sweeps = tuple(LABELS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", default=",".join(sweeps), help=f"of {', '.join(sweeps)}")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--warm", type=float, default=1.0, help="seconds of warm-up")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds to wait for the first lowering")
    parser.add_argument("--plots", type=Path, default=Path("."), help="folder for scaling-SWEEP.png")
    options = parser.parse_args()
    asked = options.sweeps.split(",")
    if wrong := set(asked) - set(sweeps):
        parser.error(f"there is no sweep {', '.join(sorted(wrong))}")
    scaling = Scaling(options)
    rows = []
    try:
        for sweep in asked:
            points: list[Point] = []
            for point in getattr(scaling, sweep)():
                points.append(point)
                say(f"{point.sweep} {point.x}: {point.rate:.1f} images/s, {point.load.statuses} {point.note}")
                answers = ", ".join(f"{status}: {count}" for status, count in sorted(point.load.statuses.items()))
                figures = (f"{point.rate:.1f}", f"{point.load.p50:.1f}", f"{point.load.p99:.1f}")
                rows.append((point.sweep, str(point.x), *figures, answers, point.note))
            plot(points, options.plots / f"scaling-{sweep}.png")
    finally:  # also print results measured before a failure
        print(f"{machine()}; {MOBILENET.model}, default settings. Milliseconds of responses with status 200.\n")
        print("\n".join(table(("sweep", "at", "images/s", "p50", "p99", "answers", ""), rows)))


if __name__ == "__main__":
    main()
