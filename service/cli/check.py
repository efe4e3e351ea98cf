"""``fxserve check``: what the machine has, what the service will use of it, and why."""

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

from fxcore.backends import BACKENDS, faster_than_eager
from fxcore.images.files import FORMATS
from service.engine.placement import pick_device
from service.engine.record import PRECISIONS
from service.machine import available_cores, available_memory
from service.settings import GiB, Settings

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line: what it is about, what will be used, and why.

    Attributes:
        verdict: ``problem`` where the service cannot do what its settings say, ``note`` where it is slower or less
            than it might be.
    """

    about: str
    used: str
    why: str = ""
    verdict: Verdict = "ok"


def findings(settings: Settings) -> list[Finding]:
    """Everything, in the order in which it decides how fast the service is."""
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
        *_decoders(),
        *_folders(settings),
    ]


def _versions() -> Iterator[Finding]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("fxserve", "torch", "torchvision"))
    yield Finding("versions", packages, f"Python {platform.python_version()} on {platform.machine()}")


def _device(settings: Settings, device: torch.device) -> Finding:
    asked = f"FXSERVE_DEVICE={settings.device}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / GiB
        return Finding("device", str(device), f"{asked}; {properties.name}, {memory:.0f} GiB")
    if torch.version.cuda is None:
        seen = "this torch is built without CUDA"
    else:
        count = torch.cuda.device_count()
        seen = f"torch for CUDA {torch.version.cuda} sees {count} devices"
    return Finding("device", str(device), f"{asked}; {seen}; {torch.backends.cpu.get_cpu_capability()}")


def _threads(settings: Settings) -> Iterator[Finding]:
    cores, machine = available_cores(), os.cpu_count() or 1
    limited = f"of {machine} that the machine has; affinity or a quota takes the rest" if cores < machine else "all"
    yield Finding("cores", str(cores), limited)
    if settings.workers > 1:
        yield Finding("processes", str(settings.workers), "each with its own models; threads below are of one")
    busy = settings.workers * (settings.compute_threads + settings.decode_threads)
    fight = busy > 2 * cores
    yield Finding(
        "threads",
        f"{settings.compute_threads} compute, {settings.decode_threads} decode, {settings.encode_threads} encode, "
        f"{settings.build_threads} build",
        f"{busy} that compute or decode on {cores} cores" + (": they will fight for them" if fight else ""),
        "note" if fight else "ok",
    )


def _memory(settings: Settings) -> Iterator[Finding]:
    there = available_memory()
    wanted = settings.workers * (settings.memory_budget + settings.max_inflight_bytes)
    short = wanted > there
    yield Finding(
        "memory",
        f"{settings.memory_budget / GiB:.1f} GiB for models, {settings.max_inflight_bytes / GiB:.1f} GiB in flight",
        f"{there / GiB:.1f} GiB may be used"
        + ("; lower FXSERVE_MEMORY_BUDGET or FXSERVE_MAX_INFLIGHT_BYTES" if short else ""),
        "note" if short else "ok",
    )


def _backends(settings: Settings, device: torch.device) -> Iterator[Finding]:
    likely = [backend.name for backend in faster_than_eager(device, "float32")] if settings.lowering else []
    for name, backend in BACKENDS.items():
        refusals = {precision: backend.unavailable(device, precision) for precision in PRECISIONS}
        served = [precision for precision, why in refusals.items() if why is None]
        if not served:
            yield Finding(
                f"backend {name}", "not here", refusals["float32"] or "", "note" if name == "openvino" else "ok"
            )
            continue
        why = "; ".join(dict.fromkeys(reason for reason in refusals.values() if reason is not None))
        role = (
            "answers first" if name == "eager" else "takes over from eager if faster" if name in likely else "if named"
        )
        yield Finding(f"backend {name}", ", ".join(served), f"{role}; {why}" if why else role)


def _decoders() -> Iterator[Finding]:
    kinds = {"JPEG": "jpg", "PNG": "zlib", "WEBP": "webp", "TIFF": "libtiff"}
    missing = [kind for kind, feature in kinds.items() if not PIL.features.check(feature)]
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
    yield _folder("downloaded weights", weights, "only what is there already can be served", "TORCH_HOME says where")
    if settings.cache_dir is None:
        yield Finding("compiled models", "not kept", "FXSERVE_CACHE_DIR is empty; each start compiles anew", "note")
    else:
        yield _folder("compiled models", settings.cache_dir, "each start compiles anew", "FXSERVE_CACHE_DIR")
    if settings.weights_dir is not None:
        there = settings.weights_dir.is_dir() and os.access(settings.weights_dir, os.R_OK)
        told = "FXSERVE_WEIGHTS_DIR" if there else "FXSERVE_WEIGHTS_DIR is no folder that can be read"
        yield Finding("own weights", str(settings.weights_dir), told, "ok" if there else "problem")


def _folder(about: str, folder: Path, otherwise: str, told: str) -> Finding:
    """Whether ``folder``, or the nearest one above it that exists, can be written to."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free / GiB
    if os.access(there, os.W_OK):
        return Finding(about, str(folder), f"{told}; writable, {free:.0f} GiB free", "ok" if free > 1 else "note")
    return Finding(about, str(folder), f"{told}; not writable: {otherwise}", "note")
