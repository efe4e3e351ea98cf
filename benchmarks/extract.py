"""``fxserve extract``: memory over many images, and throughput against the upper bound and against a plain script.

    python benchmarks/extract.py memory --images 20000
    python benchmarks/extract.py rate --model resnet50 --images 2000
    python benchmarks/extract.py script --model resnet50 --images 2000

``memory`` generates small images and shows the resident memory of a process that extracts them. ``rate`` repeats the
photographs of the other benchmarks and compares throughput with ``ceiling.py``. ``script`` compares the time of the
whole process with ``peers/dataloader_script.py`` at its best number of workers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import photos
import PIL.Image
import psutil
import servers

HERE = Path(__file__).parent
PER_FOLDER = 1000

NODES = {"mobilenet_v3_small": "features.12", "resnet50": "layer4"}
"""Node of C5, by its name in torchvision's own extractor."""
WORKERS = (1, 2)

# The rate is measured between these fractions of the images, without the start and the last batches.
STEADY = (0.1, 0.95)
# Memory counts as bounded if it grows by at most this fraction after the first tenth of the images.
GROWTH = 0.1


def small_images(folder: Path, count: int) -> None:
    """Write JPEG files of 96 x 72 pixels, each a different crop of a photograph."""
    photo = np.asarray(PIL.Image.open(io.BytesIO(photos.jpegs(1000, 750)[0])))
    for number in range(count):
        top, left = (number * 7) % (photo.shape[0] - 72), (number * 13) % (photo.shape[1] - 96)
        target = folder / f"{number // PER_FOLDER:04d}"
        target.mkdir(exist_ok=True)
        PIL.Image.fromarray(photo[top : top + 72, left : left + 96]).save(target / f"{number:06d}.jpg")


def same_photographs(folder: Path, count: int) -> None:
    """Write the photographs of the other benchmarks, repeated under different names."""
    first = []
    for index, data in enumerate(photos.jpegs()):
        first.append(folder / f"photo-{index}.jpg")
        first[-1].write_bytes(data)
    for number in range(len(first), count):
        os.link(first[number % len(first)], folder / f"photo-{number:06d}.jpg")


def child(options: argparse.Namespace) -> None:
    """Extract, and print [seconds, images done, resident bytes] for each half second."""
    from service.engine import FeatureOptions
    from service.offline import Job, extract
    from service.schemas.specs import ExtractorSpec
    from service.settings import Settings

    done = 0
    ended = threading.Event()
    samples: list[tuple[float, int, int]] = []
    process, started = psutil.Process(), time.perf_counter()

    def report(images: int, extracted: int, unreadable: int) -> None:
        nonlocal done
        done = extracted

    def sample() -> None:
        while not ended.wait(0.5):
            samples.append((time.perf_counter() - started, done, process.memory_info().rss))

    sampler = threading.Thread(target=sample)
    sampler.start()
    spec = ExtractorSpec(model=options.model, weights="random", return_nodes=["C5"], backend=options.backend)
    job = Job((options.folder,), Path(options.out), "safetensors", spec, FeatureOptions("avg"))
    try:
        summary = extract(job, Settings(), report)
    finally:
        ended.set()
        sampler.join()
    print(json.dumps({"samples": samples, "done": summary.done}))


def run(options: argparse.Namespace, folder: Path) -> list[tuple[float, int, int]]:
    """Extract ``folder`` in a child process and return the samples of :func:`child`."""
    command = [sys.executable, __file__, "child", "--model", options.model, "--backend", options.backend]
    command += ["--folder", str(folder / "images"), "--out", str(folder / "features")]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=HERE.parent, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if found["done"] != options.images:
        raise SystemExit(f"{found['done']} of {options.images} images were extracted")
    return [(seconds, images, rss) for seconds, images, rss in found["samples"] if images]


def rate(samples: list[tuple[float, int, int]], images: int) -> float:
    """Return images/s in the middle of a run."""
    steady = [sample for sample in samples if STEADY[0] * images <= sample[1] <= STEADY[1] * images]
    return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def memory(options: argparse.Namespace, folder: Path) -> None:
    small_images(folder / "images", options.images)
    samples = run(options, folder)
    print(f"{options.model}, {options.images} images of 96 x 72, {rate(samples, options.images):.0f} images/s")
    for tenth in range(1, 11):
        upto = [rss for _, images, rss in samples if images <= tenth / 10 * options.images]
        if upto:
            print(f"  {10 * tenth:3d} %  resident {upto[-1] / 1e6:7.0f} MB, peak {max(upto) / 1e6:7.0f} MB")
    first = max(rss for _, images, rss in samples if images <= options.images / 10)
    most = max(rss for _, _, rss in samples)
    verdict = "bounded" if most <= (1 + GROWTH) * first else "GROWS"
    print(f"  {verdict}: the peak after the first tenth is {most / first:.3f} times the peak within it")


def against_ceiling(options: argparse.Namespace, folder: Path) -> None:
    same_photographs(folder / "images", options.images)
    mine = rate(run(options, folder), options.images)
    spec = {"model": options.model, "weights": "random", "return_nodes": ["C5"], "backend": options.backend}
    with servers.ceiling(spec, 3.0, 60.0, pooled=True) as ceiling:
        most = ceiling.measure()
    print(f"{options.model}: extract {mine:.1f} images/s, in-process {most:.1f} ({ceiling.how}, ", end="")
    print(f"{ceiling.backend}): {mine / most:.2f}")


def against_script(options: argparse.Namespace, folder: Path) -> None:
    same_photographs(folder / "images", options.images)
    images, node = str(folder / "images"), f"{NODES[options.model]}:C5"
    mine = ["-c", "from service.cli import main; main()", "extract", images, "--model", options.model, "--nodes", node]
    mine += ["--weights", "random", "--pool", "avg", "--backend", options.backend, "--out", str(folder / "features")]
    taken = seconds(mine)
    script = [str(HERE / "peers" / "dataloader_script.py"), options.model, node, images, str(folder / "script.out")]
    others = {workers: seconds([*script, str(workers)]) for workers in WORKERS}
    best = min(others, key=others.__getitem__)
    print(f"{options.model}, {options.images} images: extract {taken:.1f} s, script {others[best]:.1f} s", end="")
    print(f" with {best} of {sorted(others)} workers: {others[best] / taken:.2f}")


def seconds(arguments: list[str]) -> float:
    """Return the seconds that a Python process takes, including its start."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, cwd=HERE.parent, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "rate", "script", "child"])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--model", default="mobilenet_v3_small")
    parser.add_argument("--backend", default="auto", choices=["auto", "eager", "openvino", "inductor"])
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "child":
        child(options)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-extract-") as name:
        (Path(name) / "images").mkdir()
        {"memory": memory, "rate": against_ceiling, "script": against_script}[options.what](options, Path(name))


if __name__ == "__main__":
    main()
