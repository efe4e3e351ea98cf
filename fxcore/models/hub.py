"""Weights from the Hugging Face hub, in its shared cache (``HF_HOME``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fxcore.errors import WeightsUnavailable, summarize
from fxcore.models.entry import WeightsInfo

_PICKLED = "pytorch_model.bin"
"""Default weights file of a repository on the hub."""

_SAFE = {_PICKLED: "model.safetensors", "open_clip_pytorch_model.bin": "open_clip_model.safetensors"}
"""Names of the safetensors files whose stem differs from the pickled file's."""

_REACH_TIMEOUT = 5.0
"""Seconds to wait for the hub's first response."""


@dataclass(frozen=True)
class HubWeights(WeightsInfo):
    """Published weights in a repository on the hub.

    Attributes:
        repository: repository id such as ``timm/resnet18.a1_in1k``, optionally with ``@revision``.
        filename: name of the weights file; None for timm's default.
    """

    repository: str = ""
    filename: str | None = None

    @property
    def file(self) -> Path:
        """Path of the file in the cache, or where it would be."""
        cached = self._cached()
        return cached or self._folder() / self._names()[0]

    @property
    def cached(self) -> bool:
        return self._cached() is not None

    @property
    def revision(self) -> str | None:
        cached = self._cached()
        return cached.relative_to(self._folder() / "snapshots").parts[0] if cached is not None else None

    def download(self) -> None:
        """Download the file into the shared cache unless it is already there.

        Raises:
            WeightsUnavailable: the file cannot be downloaded.
        """
        if self.cached:
            return
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

        name, revision = self._repository()
        for number, file in enumerate(names := self._names(), 1):
            try:
                # Check once that the hub is reachable: without a network, a download retries for half a minute.
                get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=_REACH_TIMEOUT)
                hf_hub_download(
                    name, file, revision=revision, cache_dir=constants.HF_HUB_CACHE, etag_timeout=_REACH_TIMEOUT
                )
                return
            except Exception as error:
                missing = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
                if missing and number < len(names):
                    continue
                what = f"`hf download {name}`"
                if isinstance(error, GatedRepoError):
                    what = f"a token in HF_TOKEN of one who accepted its licence at https://huggingface.co/{name}"
                raise WeightsUnavailable(
                    f"{names[0]} of {name} is not in {self._folder()} and could not be downloaded "
                    f"({summarize(error, 200)}); get it with {what}, or ask for weights=random to try without",
                    file=names[0],
                    folder=str(self._folder()),
                ) from error

    def _cached(self) -> Path | None:
        from huggingface_hub import constants, try_to_load_from_cache

        name, revision = self._repository()
        for file in self._names():
            found = try_to_load_from_cache(name, file, cache_dir=constants.HF_HUB_CACHE, revision=revision)
            if isinstance(found, str):
                return Path(found)
        return None

    def _folder(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self._repository()[0], repo_type="model")

    def _repository(self) -> tuple[str, str | None]:
        name, _, revision = self.repository.partition("@")
        return name, revision or None

    def _names(self) -> list[str]:
        """Return the possible file names in timm's order, safetensors first."""
        name = self.filename or _PICKLED
        stem = name.removesuffix(".bin")
        return [_SAFE.get(name, f"{stem}.safetensors"), name] if stem != name else [name]
