"""Every ``FXSERVE_*`` variable, in one class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.machine import available_cores

MiB = 1024**2
GiB = 1024**3


def own_cores(settings: dict[str, Any]) -> int:
    """Cores of one server process, where the machine is shared by ``workers`` of them."""
    return max(1, available_cores() // int(settings.get("workers", 1)))


def usual_batch(settings: dict[str, Any]) -> int:
    """Most rows in a batch: 32 on a GPU; on a CPU four for each core, between 8 and 32.

    The activations of larger batches do not fit into a CPU's caches: small models get slower with them, large ones no
    faster.
    """
    import torch  # takes seconds: only once settings are read

    device = str(settings.get("device", "auto"))
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return 32
    return min(max(8, 4 * own_cores(settings)), 32)


def default_cache_dir() -> Path:
    """``~/.cache/fxserve``, or where ``XDG_CACHE_HOME`` says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxserve"


LogFormat = Literal["text", "json"]


class Settings(BaseSettings):
    """What the service is told from outside; each field is the environment variable ``FXSERVE_<FIELD>``.

    Lists are separated by commas, extractors to preload by semicolons.
    """

    model_config = SettingsConfigDict(env_prefix="FXSERVE_", extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")

    workers: int = Field(
        default=1,
        ge=1,
        description="Server processes that `fxserve serve` starts on one port. Each has its own memory and all the "
        "limits below for itself; extractors are known to all, cores are split among them.",
    )
    log_format: LogFormat = Field(default="text", description="Log lines of `fxserve serve`: text, or json.")
    tracing: bool = Field(
        default=False,
        description="Whether OpenTelemetry spans are sent, to where OTEL_EXPORTER_OTLP_ENDPOINT says; needs the extra "
        "otel.",
    )
    grace_period: float = Field(
        default=25.0, gt=0, description="Seconds that accepted requests get to finish after SIGTERM."
    )

    device: str = Field(default="auto", description="Where models run: auto (CUDA if there is one), cpu, cuda, cuda:1.")
    compute_threads: int = Field(
        default_factory=own_cores, ge=1, description="Threads that one batch is computed with on CPU."
    )
    decode_threads: int = Field(
        default_factory=lambda settings: max(1, own_cores(settings) // 2),
        ge=1,
        description="Threads that decode and preprocess images; more than half the cores would fight with computing.",
    )
    encode_threads: int = Field(default=2, ge=1, description="Threads that write answers.")
    build_threads: int = Field(default=2, ge=1, description="Threads that trace models and build extractors.")

    lowering: bool = Field(
        default=True,
        description="Whether backend=auto looks for a faster backend than eager for extractors that are used; float32 "
        "values change by about 1e-6 when one takes over.",
    )
    cache_dir: Path | None = Field(
        default_factory=default_cache_dir,
        description="Folder that compiled models, and what was measured of them, are kept in between starts, at most "
        "4 GiB; empty keeps none.",
    )
    calibration_dir: Path | None = Field(
        default=None, description="Folder of photographs that int8 is calibrated on; without it, ones that are shipped."
    )

    models: Annotated[tuple[str, ...], NoDecode] | None = Field(
        default=None,
        description="The only models served, separated by commas: names and shell patterns, as in "
        "`resnet*,timm.vit_*`; all where not set.",
    )
    models_dir: Path | None = Field(
        default=None, description="Folder with models.toml, which describes models of your own, and their weights."
    )
    preload: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Extractors to build before /readyz says yes, separated by semicolons: "
        "resnet50:C4,C5;mobilenet_v3_small@random:features.8=C4. Weights follow '@', as in "
        "resnet50@file:mine.pth:C4, a key follows '='.",
    )
    extractors: str | None = Field(
        default=None,
        description="Folder, or URL of a bucket (s3://, gs://, abfs://; needs s3fs, gcsfs or adlfs), that keeps what "
        "extractors are made of, their names and deletions: every server process over the same one knows them all, "
        "after a restart too. Without it, processes of one server share a temporary one.",
    )
    weights_dir: Path | None = Field(
        default=None, description="Folder that file:NAME weights are read from; without it there are none."
    )

    api_keys_file: Path | None = Field(
        default=None,
        description="File of API keys, a line of `fxserve key` each, read again on SIGHUP; without it anybody may do "
        "anything.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins whose web pages may use this service from a browser, separated by commas; * is all.",
    )

    hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Names that the server is called by in public, or shell patterns of them, separated by commas; "
        "without API keys, requests for other names that anybody could register are refused.",
    )

    max_body_bytes: int = Field(default=64 * MiB, ge=1, description="Largest request body.")
    body_timeout: float = Field(
        default=20.0,
        gt=0,
        description="Seconds that a client may keep the server waiting for a body; each 64 KiB extend that by one.",
    )
    preprocess: Literal["default", "pil", "fast"] = Field(
        default="default",
        description="What preprocess=default means: default, the weights' own transform of torchvision's decoded "
        "tensor; pil, of the PIL image; fast, as default, but large JPEG files are decoded at a half or a quarter, and "
        "on CUDA by nvJPEG where several follow one another, whose colours are less close.",
    )
    max_pixels: int = Field(default=50_000_000, ge=1, description="Largest image, in pixels.")
    max_response_bytes: int = Field(default=256 * MiB, ge=1, description="Largest answer, as raw tensor bytes.")
    max_inflight: int = Field(default=256, ge=1, description="Most requests admitted at a time.")
    max_inflight_bytes: int = Field(
        default=2 * GiB, ge=1, description="Most bytes of bodies, decoded inputs and answers of all requests together."
    )
    max_batch: int = Field(default_factory=usual_batch, ge=1, description="Most rows in a batch.")
    max_batch_bytes: int = Field(
        default=1 * GiB, ge=1, description="Most bytes of input, output and largest activations in a batch."
    )
    request_timeout: float = Field(default=60.0, gt=0, description="Seconds a request may take.")
    memory_budget: int = Field(
        default=8 * GiB,
        ge=1,
        description="Bytes of weights, extractors and traced graphs kept; the least recently used go first.",
    )

    @field_validator(
        "cache_dir", "calibration_dir", "models_dir", "weights_dir", "api_keys_file", "extractors", mode="before"
    )
    @classmethod
    def _no_folder(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("calibration_dir")
    @classmethod
    def _is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"there is no folder {value}")
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _split_models(cls, value: object) -> object:
        return _split(value, ",") or None if isinstance(value, str) else value

    @field_validator("cors_origins", "hosts", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return _split(value, ",") if isinstance(value, str) else value

    @field_validator("preload", mode="before")
    @classmethod
    def _split_preload(cls, value: object) -> object:
        return _split(value, ";") if isinstance(value, str) else value


def _split(value: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(separator) if part.strip())
