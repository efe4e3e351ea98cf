"""The service's settings: every ``FXSERVE_*`` variable, in one class."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.choices import LogFormat, LogLevel, ServerPreprocess
from service.machine import available_cores, available_memory

MiB = 1024**2
GiB = 1024**3

SHARED_WEIGHTS = "FXSERVE_SHARED_WEIGHTS"
"""Environment variable that `fxserve serve` sets for several server processes: the folder of the files through which
they share weights."""


_ORIGIN = re.compile(
    r"\*|null|(?!http://[^/]*:80$|https://[^/]*:443$)"
    r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
    r"|(?!https?:)[a-z][a-z0-9+.-]*://[^/\s]*"
)
"""Origins as browsers send them: of web pages in lower case and without the scheme's own port. Those of other schemes,
such as extensions of browsers, have other rules."""

_HOST_PATTERN = re.compile(r"[A-Za-z0-9._*?!\[\]-]+|(?=.*:.*:)[A-Za-z0-9._*?!\[\]:%-]+")
"""Names of hosts, shell patterns of them, and addresses. A single colon would come before a port."""


def cores_per_worker(settings: dict[str, Any]) -> int:
    """Return the number of cores for each of the ``workers`` server processes."""
    return max(1, available_cores() // int(settings.get("workers", 1)))


def default_max_batch(settings: dict[str, Any]) -> int:
    """Return the default maximum rows per batch: 32 on a GPU; four per computing thread on a CPU, between 8 and 32.

    Activations of larger batches do not fit in a CPU's caches: small models get slower, and large ones do not get
    faster.
    """
    if on_gpu(settings):
        return 32
    return min(max(8, 4 * int(settings.get("compute_threads", 1))), 32)


def on_gpu(settings: dict[str, Any]) -> bool:
    """Return whether models run on a GPU."""
    import torch  # slow to import, so not at module level

    device = str(settings.get("device", "auto"))
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def memory_per_worker(settings: dict[str, Any]) -> int:
    """Return the bytes of memory for each of the ``workers`` server processes."""
    return available_memory() // int(settings.get("workers", 1))


def default_cache_dir() -> Path | None:
    """Return ``$XDG_CACHE_HOME/fxserve``, or ``~/.cache/fxserve``; None for a user without a home directory."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder, "fxserve")
    try:
        return Path.home() / ".cache/fxserve"
    except RuntimeError:  # HOME is not set, and the user's id is unknown, as in some containers
        return None


class Settings(BaseSettings):
    """The settings of the service. Each field is read from the environment variable ``FXSERVE_<FIELD>``.

    Lists are separated by commas, extractors to preload by semicolons.
    """

    model_config = SettingsConfigDict(env_prefix="FXSERVE_", extra="forbid")

    # An empty address would mean all interfaces.
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")

    workers: int = Field(
        default=1,
        ge=1,
        description="Server processes that `fxserve serve` runs on one port, sharing extractors and splitting cores; "
        "the limits below apply to each.",
    )
    log_format: LogFormat = Field(
        default="text", description="Format of the log: `text`, or `json` with one object per line."
    )
    log_level: LogLevel = Field(
        default="warning",
        description="Log level of `fxserve serve`: `critical`, `error`, `warning`, `info`, `debug`; the last two log "
        "each request.",
    )
    tracing: bool = Field(
        default=False,
        description="Send OpenTelemetry spans to `OTEL_EXPORTER_OTLP_ENDPOINT`; needs the extra `otel`.",
    )
    grace_period: float = Field(
        default=25.0, gt=0, description="Seconds for accepted requests to finish after SIGTERM."
    )

    device: str = Field(
        default="auto", description="Device that models run on: `auto` (CUDA if available), `cpu`, `cuda`, `cuda:1`."
    )
    compute_threads: int = Field(
        default_factory=cores_per_worker, ge=1, le=1024, description="Threads that compute a batch on CPU."
    )
    decode_threads: int = Field(
        default_factory=lambda settings: max(1, cores_per_worker(settings) // 2),
        ge=1,
        le=1024,
        description="Threads that decode and preprocess images; with more than half the cores they compete with the "
        "model for them.",
    )
    encode_threads: int = Field(default=2, ge=1, le=1024, description="Threads that encode responses.")
    build_threads: int = Field(default=2, ge=1, le=1024, description="Threads that trace models and build extractors.")

    lowering: bool = Field(
        default=True,
        description="Let `backend=auto` compile extractors that are in use and switch to a faster backend than eager; "
        "float32 values change by about 1e-6 when it does.",
    )
    cache_dir: Path | None = Field(
        default_factory=default_cache_dir,
        description="Folder that caches compiled models and their measurements across restarts, up to 4 GiB; empty "
        "disables the cache.",
    )
    calibration_dir: Path | None = Field(
        default=None,
        description="Folder of images to calibrate int8 on; by default, the photographs that come with fxserve.",
    )

    models: Annotated[tuple[str, ...], NoDecode] | None = Field(
        default=None,
        description="Models to serve, separated by commas: names and shell patterns, as in `resnet*,timm.vit_*`; all "
        "by default.",
    )
    models_dir: Path | None = Field(
        default=None,
        description="Folder with `models.toml`, which describes models of your own, and with their weights.",
    )
    statistics: Path | None = Field(
        default=None,
        description="Folder created by `fxserve extract --reduce top:N`. The page shows its images with the largest "
        "values of each channel to everyone with read access.",
    )
    preload: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Extractors to build before `/readyz` answers 200, separated by semicolons: "
        "`MODEL[@WEIGHTS]:NODE[=KEY],…`, as in `resnet50:C4,C5;mobilenet_v3_small@random:features.8=C4` or "
        "`resnet50@file:mine.pth:C4`. Without nodes, as in `vit_b_16`, they are the model's levels, or its last value "
        "if it has none.",
    )
    extractors: str | None = Field(
        default=None,
        description="Folder, or URL of a bucket (`s3://`, `gs://`, `abfs://`; needs s3fs, gcsfs or adlfs), that stores "
        "extractors' specs and names. All server processes that use the same one share their extractors, "
        "also across restarts. By default they are lost when the server ends; the processes of one server share a "
        "temporary folder.",
    )
    max_nodes: int = Field(
        default=64,
        ge=1,
        description="Maximum number of nodes of a request with a name such as `blocks.*`; without `*` it is 1024.",
    )
    max_stored_extractors: int = Field(
        default=10_000,
        ge=1,
        description="Maximum number of extractors in `FXSERVE_EXTRACTORS`; at most half may come from one-step "
        "requests.",
    )
    weights_dir: Path | None = Field(
        default=None, description="Folder that weights `file:NAME` are loaded from; not available by default."
    )

    api_keys_file: Path | None = Field(
        default=None,
        description="File of API keys, one line of `fxserve key` each, reloaded on SIGHUP. By default no key is "
        "needed, and anyone may do anything.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins whose web pages may call this service from a browser, separated by commas; `*` allows "
        "all.",
    )

    hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Public host names of the server, or shell patterns of them, separated by commas. Without API "
        "keys, requests for any other name that could be registered in DNS are refused.",
    )

    max_body_bytes: int = Field(
        default=64 * MiB,
        ge=1,
        description="Maximum bytes of a request body with images, and of an image file of `fxserve extract`; bodies "
        "without images may have at most 2 MiB of it.",
    )
    body_timeout: float = Field(
        default=20.0,
        gt=0,
        description="Seconds that the server waits for a request's body; each 64 KiB received extends the deadline by "
        "a second.",
    )
    preprocess: ServerPreprocess = Field(
        default="default",
        description="What `preprocess=default` means: `default`, the weights' own transform of the tensor that "
        "torchvision decodes; `pil`, that of the PIL image; `fast`, like `default`, except that large JPEG files are "
        "decoded at half or quarter size.",
    )
    max_pixels: int = Field(default=50_000_000, ge=1, description="Maximum pixels of an image.")
    max_response_bytes: int = Field(
        default=256 * MiB, ge=1, description="Maximum bytes of the tensors in a response, before encoding."
    )
    max_inflight: int = Field(default=256, ge=1, description="Maximum requests in flight.")
    max_inflight_bytes: int = Field(
        default_factory=lambda settings: min(2 * GiB, memory_per_worker(settings) // 8),
        ge=1,
        description="Maximum bytes of bodies, decoded inputs and responses of all requests in flight.",
    )
    max_batch: int = Field(default_factory=default_max_batch, ge=1, description="Maximum rows in a batch.")
    max_batch_bytes: int = Field(
        default=1 * GiB,
        ge=1,
        description="Maximum bytes of a batch: its inputs, outputs and peak activations. An image that needs more than "
        "eight times as much by itself is refused, unless it has about the model's usual size.",
    )
    request_timeout: float = Field(default=60.0, gt=0, description="Time limit of a request, in seconds.")
    memory_budget: int = Field(
        default_factory=lambda settings: (
            8 * GiB if on_gpu(settings) else min(8 * GiB, memory_per_worker(settings) // 2)
        ),
        ge=1,
        description="Bytes of memory for weights, extractors, traced graphs and projections; the least recently used "
        "are evicted.",
    )

    def needed_memory(self) -> int:
        """Return the bytes of models, unless they are on a GPU, and requests that the limits allow in all processes."""
        models = 0 if on_gpu(vars(self)) else self.memory_budget
        return self.workers * (models + self.max_inflight_bytes)

    @field_validator(
        *("cache_dir", "calibration_dir", "models_dir", "weights_dir", "api_keys_file", "extractors", "statistics"),
        mode="before",
    )
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("calibration_dir")
    @classmethod
    def _must_exist(cls, value: Path | None) -> Path | None:
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

    @field_validator("cors_origins")
    @classmethod
    def _must_be_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin!r} is not an origin as browsers send it: write scheme and host, both in lower case, and "
                    "the port unless it is the scheme's own, as in https://lab.example or http://localhost:3000"
                )
        return value

    @field_validator("hosts")
    @classmethod
    def _must_be_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if _HOST_PATTERN.fullmatch(host) is None:
                raise ValueError(
                    f"{host!r} is not a host name: leave out scheme, port and path, as in fx.example.com or "
                    "*.example.com, and write letters beyond ASCII in Punycode (xn--…)"
                )
        return value

    @field_validator("preload", mode="before")
    @classmethod
    def _split_preload(cls, value: object) -> object:
        return _split(value, ";") if isinstance(value, str) else value


def _split(value: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(separator) if part.strip())
