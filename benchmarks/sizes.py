"""DINOv2 at sizes of one's own: ``fxserve extract`` beside timm in a DataLoader script, whole processes.

    python benchmarks/sizes.py --images 400
    python benchmarks/sizes.py --model timm.test_vit --sizes 64 64x96 --images 200

Each size is HEIGHTxWIDTH. Photographs have its aspect ratio and 1.3 times its sides. A square is asked for with
``fit=stretch``, another size with ``fit=native`` by its shorter side, which comes to the same. The script has its best
number of workers.
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
    parser.add_argument("--model", default="timm.vit_small_patch14_dinov2")
    parser.add_argument("--sizes", nargs="+", default=["224x224", "518x518", "518x784"])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    for text in options.sizes:
        height, _, width = text.partition("x")
        compare(options, int(height), int(width or height))


def compare(options: argparse.Namespace, height: int, width: int) -> None:
    """Print the images a second of both at one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = folder / "images"
        images.mkdir()
        files = photos.jpegs(round(LARGER * width), round(LARGER * height))
        for number in range(options.images):
            data = images / f"{number:06d}.jpg"
            if number < len(files):
                data.write_bytes(files[number])
            else:
                os.link(images / f"{number % len(files):06d}.jpg", data)
        fit = ["stretch", str(height)] if height == width else ["native", str(min(height, width))]
        mine = seconds(
            [
                *("-c", "from service.cli import main; main()", "extract", str(images), "--model", options.model),
                *("--weights", "random", "--nodes", "norm", "--pool", "cls", "--backend", options.backend),
                *("--fit", fit[0], "--image-size", fit[1], "--out", str(folder / "features")),
            ]
        )
        script = [str(HERE / "peers/timm_script.py"), options.model.removeprefix("timm."), f"{height}x{width}"]
        theirs = min(
            seconds([*script, str(images), str(folder / "out.safetensors"), str(workers)]) for workers in WORKERS
        )
    print(
        f"{options.model} {height} x {width} ({fit[0]}): extract {options.images / mine:.2f} images/s, "
        f"script {options.images / theirs:.2f}: {theirs / mine:.2f}",
        flush=True,
    )


def seconds(command: list[str]) -> float:
    """Run Python with ``command``; returns the time of the whole process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=HERE.parent, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
