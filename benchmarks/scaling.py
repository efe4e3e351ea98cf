"""How fxserve scales: a table and a plot, with no cliff in it.

    python benchmarks/scaling.py                        # everything, some ten minutes
    python benchmarks/scaling.py --sweeps connections --seconds 3

Sweeps: connections 1 to 256, images a request 1 to 64, image sides 224 to 2,048 pixels, extractors 1 to 64, and
overload: four times as many connections as are admitted, which must be answered by 429 while the rate holds. A
client that is refused comes back when ``Retry-After`` says.
Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import load
import photos
import servers
from load import Load
from serve import CASES, SAFETENSORS, extractor, machine, say, table
from servers import Server

MOBILENET = next(case for case in CASES if case.model == "mobilenet_v3_small")
CONNECTIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
IMAGES = (1, 2, 4, 8, 16, 32, 64)
SIDES = (224, 320, 448, 640, 896, 1280, 2048)
EXTRACTORS = (1, 2, 4, 8, 16, 32, 64)
ADMITTED = 64


@dataclass
class Point:
    sweep: str
    x: int
    load: Load
    images: int = 1

    @property
    def rate(self) -> float:
        return self.load.rate * self.images


class Scaling:
    """The sweeps, each over one server with one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.files = photos.jpegs()
        self._backend = options.backend

    def connections(self) -> Iterator[Point]:
        with servers.fxserve(max_inflight=512) as server:
            requests = self._requests(server, self._extractor(server), self.files)
            for count in CONNECTIONS:
                yield Point("connections", count, self._run(server, requests, count))

    def images(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            path = self._extractor(server) + "?pool=avg"
            for count in IMAGES:
                body, kind = photos.multipart([self.files[i % len(self.files)] for i in range(count)])
                requests = [load.http(server.port, path, body, kind, SAFETENSORS)]
                yield Point("images", count, self._run(server, requests, 4), count)

    def sides(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            path = self._extractor(server)
            for side in SIDES:
                requests = self._requests(server, path, photos.jpegs(side, side))
                yield Point("sides", side, self._run(server, requests, 16))

    def extractors(self) -> Iterator[Point]:
        with servers.fxserve() as server:
            paths: list[str] = []
            for count in EXTRACTORS:
                while len(paths) < count:
                    paths.append(self._extractor(server, len(paths)))
                requests = [
                    load.http(server.port, path, self.files[i % len(self.files)], "image/jpeg", SAFETENSORS)
                    for i, path in enumerate(paths)
                ]
                yield Point("extractors", count, self._run(server, requests, 32))

    def overload(self) -> Iterator[Point]:
        with servers.fxserve(max_inflight=ADMITTED) as server:
            requests = self._requests(server, self._extractor(server), self.files)
            for count in (ADMITTED // 2, 4 * ADMITTED):
                yield Point("overload", count, self._run(server, requests, count))

    def _extractor(self, server: Server, number: int = 0) -> str:
        """The path of a new extractor's features; each ``number`` has other keys, and so is another extractor."""
        spec = MOBILENET.spec(self.options.backend)
        if number:
            # Lowered from the start, as it would be after its first requests: this is about batches, not compiling.
            spec["backend"] = self._backend
            spec["return_nodes"] = {node: f"{key}-{number}" for node, key in spec["return_nodes"].items()}
        path, backend = extractor(server, spec, self.options.settle)
        self._backend = backend
        return path

    def _requests(self, server: Server, path: str, files: list[bytes]) -> list[bytes]:
        return [load.http(server.port, path, data, "image/jpeg", SAFETENSORS) for data in files]

    def _run(self, server: Server, requests: list[bytes], connections: int) -> Load:
        # The own generator: wrk cannot tell how long answers took that are not errors.
        return load.run(server.port, requests, connections, self.options.seconds, self.options.warm, wrk=False)


def plot(points: list[Point], path: Path) -> None:
    """One panel a sweep: images a second, and p99 on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(point.sweep for point in points))
    figure, axes = pyplot.subplots(1, len(sweeps), figsize=(4 * len(sweeps), 3.4), squeeze=False, layout="constrained")
    for axis, sweep in zip(axes[0], sweeps, strict=True):
        of = [point for point in points if point.sweep == sweep]
        x = [point.x for point in of]
        axis.plot(x, [point.rate for point in of], "o-", color="tab:blue")
        axis.set(title=sweep, xscale="log", ylim=(0, None), ylabel="images/s", xticks=x, xticklabels=x)
        axis.minorticks_off()
        axis.tick_params(axis="x", labelrotation=60)
        right = axis.twinx()
        right.plot(x, [point.load.p99 for point in of], "s--", color="tab:red", markersize=3)
        right.set(ylim=(0, None))
        right.set_ylabel("p99, ms", color="tab:red")
    figure.suptitle(f"fxserve, {MOBILENET.model}, {machine()}", fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    sweeps = ("connections", "images", "sides", "extractors", "overload")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", default=",".join(sweeps), help=f"of {', '.join(sweeps)}")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seconds", type=float, default=6.0, help="that each load lasts")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds of load before that")
    parser.add_argument("--settle", type=float, default=90.0, help="seconds that backend=auto gets to lower")
    parser.add_argument("--plot", type=Path, default=Path("scaling.png"))
    options = parser.parse_args()
    asked = options.sweeps.split(",")
    if wrong := set(asked) - set(sweeps):
        parser.error(f"there is no sweep {', '.join(sorted(wrong))}")
    scaling = Scaling(options)
    points: list[Point] = []
    for sweep in asked:
        for point in getattr(scaling, sweep)():
            points.append(point)
            say(f"{point.sweep} {point.x}: {point.rate:.1f} images/s, {point.load.statuses}")
    rows = [
        (
            point.sweep,
            str(point.x),
            f"{point.rate:.1f}",
            f"{point.load.p50:.1f}",
            f"{point.load.p99:.1f}",
            ", ".join(f"{status}: {count}" for status, count in sorted(point.load.statuses.items())),
        )
        for point in points
    ]
    print(f"{machine()}; {MOBILENET.model}, {options.backend}. Milliseconds of the answers with 200.\n")
    print("\n".join(table(("sweep", "at", "images/s", "p50", "p99", "answers"), rows)))
    plot(points, options.plot)


if __name__ == "__main__":
    main()
