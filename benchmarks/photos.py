"""The JPEG files that all benchmarks send: scikit-image's photographs at about the size of ImageNet's."""

from __future__ import annotations

import functools
import io

import PIL.Image
import skimage.data


@functools.cache
def jpegs(width: int = 500, height: int = 375, quality: int = 90) -> list[bytes]:
    """Encode the photographs, scaled and cropped to ``width`` x ``height``."""
    files = []
    for pixels in (skimage.data.coffee(), skimage.data.chelsea(), skimage.data.astronaut(), skimage.data.rocket()):
        photo = PIL.Image.fromarray(pixels)
        scale = max(width / photo.width, height / photo.height)
        photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), PIL.Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        photo.crop((0, 0, width, height)).save(buffer, "JPEG", quality=quality)
        files.append(buffer.getvalue())
    return files


def multipart(files: list[bytes], field: str = "request") -> tuple[bytes, str]:
    """Build a multipart/form-data body of all files; return it and its Content-Type."""
    boundary = "fxserve-benchmark"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{i}.jpg"\r\n'
        f"Content-Type: image/jpeg\r\n\r\n".encode()
        + data
        + b"\r\n"
        for i, data in enumerate(files)
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
