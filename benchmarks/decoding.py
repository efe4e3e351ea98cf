"""Decoding of image files to RGB in one thread: fxserve beside the decoders that others call.

    python benchmarks/decoding.py
    python benchmarks/decoding.py --files PNG --seconds 3

Decoders take turns with each file; the figure is the median of each, and the ratio is that of fxserve to the best.
fxserve checks the file first, and gives what torchvision documents, the EXIF orientation included.
OpenCV and imagecodecs are measured where they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import io
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import photos
import PIL.Image
import simplejpeg
import torch
import torchvision
from serve import machine, table

from fxcore.images.decoding import decode

Decode = Callable[[bytes], object]

SIZES = {"": (500, 375), " 3 Mpx": (2000, 1500), " 12 Mpx": (4000, 3000), " 24 Mpx": (6000, 4000)}
FORMATS = {
    "JPEG": {"quality": 90},
    "JPEG progressive": {"quality": 90, "progressive": True},
    "PNG": {},
    "PNG palette": {},
    "WebP": {"quality": 80},
    "WebP lossless": {"lossless": True},
}
BAR = 1.1


def files() -> dict[str, bytes]:
    """Encode one photograph in each format and size."""
    made = {}
    for size, (width, height) in SIZES.items():
        photo = PIL.Image.open(io.BytesIO(photos.jpegs(width, height, 95)[0]))
        for name, options in FORMATS.items():
            if width > 2000 and not name.startswith("JPEG"):
                continue
            buffer = io.BytesIO()
            image = photo.quantize() if "palette" in name else photo
            image.save(buffer, name.split()[0], **options)
            made[name + size] = buffer.getvalue()
    return made


def peers(name: str) -> dict[str, Decode]:
    """Return the decoders of others for a file of that name, each to RGB in memory."""
    found: dict[str, Decode] = {
        "PIL": lambda data: np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")),
        "torchvision": lambda data: torchvision.io.decode_image(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB"
        ),
    }
    if name.startswith("JPEG"):
        found["simplejpeg"] = simplejpeg.decode_jpeg
    with suppress(ImportError):
        cv2 = importlib.import_module("cv2")
        cv2.setNumThreads(1)
        found["OpenCV"] = lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    with suppress(ImportError):
        imagecodecs = importlib.import_module("imagecodecs")
        found["imagecodecs"] = getattr(imagecodecs, f"{name.split()[0].lower()}_decode")
    return found


def medians(decoders: dict[str, Decode], data: bytes, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each decoder over turns that take ``seconds`` in all."""
    times: dict[str, list[float]] = {name: [] for name in decoders}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or min(map(len, times.values())) < 5:
        for name, decoder in decoders.items():
            started = time.perf_counter()
            decoder(data)
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="", help="only those whose name has this in it")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, data in files().items():
        if options.files not in name:
            continue
        own = medians({"fxserve": decode, **peers(name)}, data, options.seconds)
        mine = own.pop("fxserve")
        best = min(own, key=lambda peer: own[peer])
        others = ", ".join(f"{peer} {own[peer]:.2f}" for peer in own if peer != best)
        rows.append((name, f"{mine:.2f}", f"{best} {own[best]:.2f}", f"{mine / own[best]:.2f}", f"≤ {BAR}", others))
        print(name, rows[-1][1:], flush=True)
    print(f"\n{machine()}, PIL {PIL.__version__}. One thread; milliseconds.\n")
    print(*table(("file", "fxserve", "best other", "ratio", "bar", "others"), rows), sep="\n")


if __name__ == "__main__":
    main()
