"""Download weights files into torch.hub's cache."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import http.client
import re
import tempfile
import time
import urllib.request
from pathlib import Path

from fxcore.models.state_dicts import first_line, unavailable

_REACH_TIMEOUT = 5.0
"""Seconds to wait for a connection to the server. The download itself may take longer, as long as bytes arrive."""

STALL_TIMEOUT = 30.0
"""Seconds without data after which a download fails."""

_ABANDONED = 3600.0
"""Seconds without writing after which a partial file is that of a process that was killed."""

_CHUNK = 1024**2


def download(url: str, file: Path) -> None:
    """Download ``url`` to ``file`` and check its hash.

    Raises:
        WeightsUnavailable: the file cannot be downloaded.
    """
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_TIMEOUT):
            pass
        file.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, file)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        raise unavailable(
            file,
            f"{file.name} is not in {file.parent} and could not be downloaded ({first_line(error)}); put the file "
            "there, or use weights=random to try without",
        ) from error


def _fetch(url: str, file: Path) -> None:
    """Download ``url`` to ``file`` atomically, and check its hash.

    Unlike ``torch.hub.download_url_to_file``, this times out when the server stops sending.

    Raises:
        OSError, http.client.HTTPException: the download was cut off, stalled, or could not be written.
        ValueError: the hash does not match the one in the file's name.
    """
    prefix, suffix = f".{file.name}.", ".part"
    for partial in file.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        with contextlib.suppress(OSError):  # another process deleted it
            if time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink()
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        partial = Path(
            stack.enter_context(
                tempfile.NamedTemporaryFile(dir=file.parent, prefix=prefix, suffix=suffix, delete=False)
            ).name
        )
        stack.callback(partial.unlink, missing_ok=True)
        source = stack.enter_context(urllib.request.urlopen(url, timeout=STALL_TIMEOUT))
        with partial.open("wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
        length = source.headers["content-length"]
        if length is not None and partial.stat().st_size != int(length):
            raise OSError(f"it ended after {partial.stat().st_size:,} of {int(length):,} bytes")
        # torchvision's file names contain the first digits of the SHA-256: name-<digits>.pth.
        wanted = re.search(r"-([a-f0-9]+)\.", file.name)
        if wanted is not None and not digest.hexdigest().startswith(wanted.group(1)):
            raise ValueError(f"its SHA-256 hash is {digest.hexdigest()[:16]}…, not {wanted.group(1)}…")
        partial.chmod(0o644)
        partial.replace(file)
