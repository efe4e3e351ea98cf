"""``fxserve check``: the machine's resources, the part that the service will use, and the reasons."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import PIL
import PIL.features
import torch

from fxcore.backends import BACKENDS, faster_than_eager, why_bfloat16_is_slow
from fxcore.images.files import FORMATS
from service.engine.description import PRECISIONS
from service.engine.placement import pick_device
from service.machine import available_cores, available_memory
from service.settings import GiB, Settings

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: subject of the finding.
        used: the resource or value that the service will use.
        why: the reason, or details.
        verdict: ``problem`` if the service cannot satisfy its settings, ``note`` if it will be slower or less capable
            than it could be.
    """

    subject: str
    used: str
    why: str = ""
    verdict: Verdict = "ok"


def findings(settings: Settings) -> list[Finding]:
    """Collect all findings, beginning with those that determine the service's speed."""
    try:
        device = pick_device(settings.device)
    except (ValueError, RuntimeError) as error:
        return [*_versions(), Finding("device", settings.device, str(error).splitlines()[0], "problem")]
    return [
        *_versions(),
        _device(settings, device),
        *_threads(settings),
        *_memory(settings),
        *_backends(settings, device),
        *_bfloat16(device),
        *_decoders(),
        *_folders(settings),
    ]


def _versions() -> Iterator[Finding]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("fxserve", "torch", "torchvision"))
    yield Finding("versions", packages, f"Python {platform.python_version()} on {platform.machine()}")


def _device(settings: Settings, device: torch.device) -> Finding:
    setting = f"FXSERVE_DEVICE={settings.device}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / GiB
        return Finding("device", str(device), f"{setting}; {properties.name}, {memory:.0f} GiB")
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    else:
        count = torch.cuda.device_count()
        reason = f"torch for CUDA {torch.version.cuda} sees {count} devices"
    return Finding("device", str(device), f"{setting}; {reason}; {torch.backends.cpu.get_cpu_capability()}")


def _threads(settings: Settings) -> Iterator[Finding]:
    cores, machine = available_cores(), os.cpu_count() or 1
    share = f"of the machine's {machine}, limited by CPU affinity or quota" if cores < machine else "all"
    yield Finding("cores", str(cores), share)
    if settings.workers > 1:
        yield Finding("processes", str(settings.workers), "they share extractors; each has the threads below")
    busy = settings.workers * (settings.compute_threads + settings.decode_threads)
    oversubscribed = busy > 2 * cores
    yield Finding(
        "threads",
        f"{settings.compute_threads} compute, {settings.decode_threads} decode, {settings.encode_threads} encode, "
        f"{settings.build_threads} build",
        f"{busy} threads compute or decode on {cores} cores" + (": too many" if oversubscribed else ""),
        "note" if oversubscribed else "ok",
    )


def _memory(settings: Settings) -> Iterator[Finding]:
    available = available_memory()
    short = settings.needed_memory() > available
    yield Finding(
        "memory",
        f"{settings.memory_budget / GiB:.1f} GiB for models, {settings.max_inflight_bytes / GiB:.1f} GiB in flight",
        f"{available / GiB:.1f} GiB available"
        + ("; lower FXSERVE_MEMORY_BUDGET or FXSERVE_MAX_INFLIGHT_BYTES" if short else ""),
        "note" if short else "ok",
    )


def _backends(settings: Settings, device: torch.device) -> Iterator[Finding]:
    candidates = [backend.name for backend in faster_than_eager(device, "float32")] if settings.lowering else []
    for name, backend in BACKENDS.items():
        refusals = {precision: backend.unavailable(device, precision) for precision in PRECISIONS}
        supported = [precision for precision, why in refusals.items() if why is None]
        if not supported:
            yield Finding(
                f"backend {name}", "not available", refusals["float32"] or "", "note" if name == "openvino" else "ok"
            )
            continue
        why = "; ".join(dict.fromkeys(reason for reason in refusals.values() if reason is not None))
        role = (
            "serves first" if name == "eager" else "replaces eager if faster" if name in candidates else "if requested"
        )
        yield Finding(f"backend {name}", ", ".join(supported), f"{role}; {why}" if why else role)


def _bfloat16(device: torch.device) -> Iterator[Finding]:
    slow = why_bfloat16_is_slow(device)
    if slow is not None:
        yield Finding("bfloat16", "slow", slow)
    elif BACKENDS["openvino"].unavailable(device, "bfloat16") is None:
        yield Finding("bfloat16", "fast", "for speed, try precision=bfloat16 first, especially for ViTs")


def _decoders() -> Iterator[Finding]:
    features = {"JPEG": "jpg", "PNG": "zlib", "WEBP": "webp", "TIFF": "libtiff"}
    missing = [kind for kind, feature in features.items() if not PIL.features.check(feature)]
    turbo = PIL.features.version("libjpeg_turbo")
    yield Finding(
        "decoders",
        f"Pillow {PIL.__version__}, simplejpeg {version('simplejpeg')}",
        f"{', '.join(kind for kind in FORMATS if kind not in missing)}"
        + (f"; Pillow lacks {', '.join(missing)}" if missing else "")
        + (f"; libjpeg-turbo {turbo}" if turbo else ""),
        "note" if missing else "ok",
    )
    try:
        tracing = f"OpenTelemetry {version('opentelemetry-exporter-otlp-proto-http')}"
    except PackageNotFoundError:
        tracing = "not installed; FXSERVE_TRACING needs fxserve[otel]"
    yield Finding("traces", tracing)


def _folders(settings: Settings) -> Iterator[Finding]:
    weights = Path(torch.hub.get_dir()) / "checkpoints"
    yield _folder("downloaded weights", weights, "only cached weights can be served", "set by TORCH_HOME")
    if settings.cache_dir is None:
        yield Finding(
            "compiled models", "not cached", "FXSERVE_CACHE_DIR is empty; compiled again at each start", "note"
        )
    else:
        yield _folder("compiled models", settings.cache_dir, "compiled again at each start", "set by FXSERVE_CACHE_DIR")
    if settings.weights_dir is not None:
        readable = settings.weights_dir.is_dir() and os.access(settings.weights_dir, os.R_OK)
        why = "set by FXSERVE_WEIGHTS_DIR" if readable else "FXSERVE_WEIGHTS_DIR is not a readable folder"
        yield Finding("own weights", str(settings.weights_dir), why, "ok" if readable else "problem")


def _folder(subject: str, folder: Path, otherwise: str, origin: str) -> Finding:
    """Check that ``folder``, or its nearest existing parent, is writable; ``otherwise`` describes the consequence if
    not."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / GiB
    if os.access(existing, os.W_OK):
        return Finding(subject, str(folder), f"{origin}; writable, {free:.0f} GiB free", "ok" if free > 1 else "note")
    return Finding(subject, str(folder), f"{origin}; not writable: {otherwise}", "note")
