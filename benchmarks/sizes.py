"""Measure ``fxserve extract`` as a whole process: DINOv2 at custom sizes, and projected maps.

    python benchmarks/sizes.py --images 400
    python benchmarks/sizes.py --model timm.test_vit --sizes 64 64x96 --images 200
    python benchmarks/sizes.py projection --images 5000 --whole 200

``sizes``, the default, compares with timm in a DataLoader script. Each size is HEIGHTxWIDTH. Photographs have the same
aspect ratio and 1.3 times the sides. A square is requested with ``fit=stretch``, other sizes with ``fit=native`` by the
shorter side, which is equivalent. The script uses its best number of workers. In addition to images/s, which other load
on the machine reduces, the CPU seconds per image are printed, for the whole process including its start.

``projection`` extracts the sixteen blocks of resnet50 with ``--project 4096``, and whole maps of ``--whole`` images. It
prints the bytes on disk per image and the peak memory of each process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import photos

HERE = Path(__file__).parent
LARGER = 1.3
WORKERS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["sizes", "projection"], default="sizes")
    parser.add_argument("--model", default="timm.vit_small_patch14_dinov2")
    parser.add_argument("--sizes", nargs="+", default=["224x224", "518x518", "518x784"])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--whole", type=int, default=200, help="images of which whole maps are written, 22 MB each")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    if options.what == "projection":
        project(options)
        return
    for text in options.sizes:
        height, _, width = text.partition("x")
        compare(options, int(height), int(width or height))


def compare(options: argparse.Namespace, height: int, width: int) -> None:
    """Print images/s and CPU seconds per image of both at one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = folder / "images"
        write(images, photos.jpegs(round(LARGER * width), round(LARGER * height)), options.images)
        fit = ["stretch", str(height)] if height == width else ["native", str(min(height, width))]
        mine, my_cpu = seconds(
            [
                *("-c", "from service.cli import main; main()", "extract", str(images), "--model", options.model),
                *("--weights", "random", "--nodes", "norm", "--pool", "cls", "--backend", options.backend),
                *("--fit", fit[0], "--image-size", fit[1], "--out", str(folder / "features")),
            ]
        )
        script = [str(HERE / "peers/timm_script.py"), options.model.removeprefix("timm."), f"{height}x{width}"]
        theirs, their_cpu = min(
            seconds([*script, str(images), str(folder / "out.safetensors"), str(workers)]) for workers in WORKERS
        )
    print(
        f"{options.model} {height} x {width} ({fit[0]}): extract {options.images / mine:.2f} images/s, "
        f"script {options.images / theirs:.2f}: {theirs / mine:.2f}; CPU seconds an image "
        f"{my_cpu / options.images:.2f} and {their_cpu / options.images:.2f}: {their_cpu / my_cpu:.2f}",
        flush=True,
    )


def project(options: argparse.Namespace) -> None:
    """Print disk and memory use for projected and for whole maps."""
    nodes = [f"layer{stage}.{block}" for stage, blocks in enumerate((3, 4, 6, 3), 1) for block in range(blocks)]
    more = {"whole": [], "project": ["--project", "4096"]}
    with tempfile.TemporaryDirectory() as name:
        for label, count in (("whole", options.whole), ("project", options.images)):
            images, out = Path(name) / f"{count}-images", Path(name) / label
            if not images.exists():
                write(images, photos.jpegs(), count)
            command = ["-c", "from service.cli import main; main()", "extract", str(images), "--model", "resnet50"]
            command += ["--weights", "random", "--nodes", ",".join(nodes), "--backend", options.backend]
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, *command, "--out", str(out), *more[label]], stdout=subprocess.DEVNULL, cwd=HERE.parent
            )
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"extract of {label} failed")
            taken = time.perf_counter() - started
            disk = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            print(
                f"resnet50, {len(nodes)} blocks, {label}: {count} images, {disk / count / 1e6:.3f} MB an image, "
                f"peak {usage.ru_maxrss / 1e3:.0f} MB, {count / taken:.2f} images/s",
                flush=True,
            )


def write(folder: Path, files: list[bytes], count: int) -> None:
    """Write ``count`` JPEG files to a new folder, by repeating ``files``."""
    folder.mkdir()
    for number in range(count):
        file = folder / f"{number:06d}.jpg"
        if number < len(files):
            file.write_bytes(files[number])
        else:
            os.link(folder / f"{number % len(files):06d}.jpg", file)


def seconds(command: list[str]) -> tuple[float, float]:
    """Run Python with ``command``; return the time of the whole process, and the CPU time of it and its children."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=HERE.parent)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
