"""Statistics of all outputs of a run, instead of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import orjson
import torch

from fxcore.errors import FxError
from fxcore.statistics.output_statistics import OutputStatistics, by_channel
from service.codecs.tensors import safetensors
from service.offline.batches import Result
from service.offline.runners.runner import RowLayout, Rows

_MAX_COVARIANCES = 512 * 1024**2
"""Maximum bytes of all covariances; a batch needs the same amount again."""

_MAX_ENTRIES = 512 * 1024
"""Maximum entries of ``top``: images times channels of all outputs."""

_PATHS = "paths"


class Statistics:
    """Statistics of all outputs of a run.

    Statistics of other images can be merged into them, whether they come from another run, machine or actor.

    Args:
        outputs: key → statistics of one output.
        layouts: key → layout of the rows to add; empty if only statistics are merged.
    """

    def __init__(self, outputs: Mapping[str, OutputStatistics], layouts: Mapping[str, RowLayout]) -> None:
        self.outputs = dict(outputs)
        self._layouts = layouts

    @classmethod
    def empty(cls, reduce: str, layouts: Mapping[str, RowLayout], probe: Rows) -> Statistics:
        """Return statistics of no images.

        Args:
            reduce: see :func:`service.choices.reductions`.
            layouts: key → layout of rows.
            probe: rows of any image.

        Raises:
            FxError: they would take too much memory.
        """
        names = dict(one.partition(":")[::2] for one in reduce.split(","))
        top = int(names.get("top", 0))
        values = {key: by_channel(probe[key], one.layout, one.prefix) for key, one in layouts.items()}
        channels = {key: one.shape[1] for key, one in values.items()}
        if "cov" in names:
            _check_covariances(channels)
        if top * sum(channels.values()) > _MAX_ENTRIES:
            most = _MAX_ENTRIES // sum(channels.values())
            raise FxError(
                f"--reduce top:{top} of {sum(channels.values()):,} channels keeps too many entries; "
                + (f"the maximum is top:{most}" if most else "name fewer nodes, or pool maps whose layout is unknown")
            )
        moments = bool({"mean", "std"} & {*names})
        return cls(
            {
                key: OutputStatistics.empty(one, moments=moments, covariance="cov" in names, top=top)
                for key, one in values.items()
            },
            layouts,
        )

    def add(self, result: Result) -> tuple[list[str], list[tuple[str, str]]]:
        """Add rows of images, except images with a value that is not finite.

        Args:
            result: the rows. With ``top``, an image has one row. Keys that are not outputs are ignored.

        Returns:
            paths of the images that were added, and (path, reason) of those that were not.
        """
        if not result.paths:
            return [], result.errors
        paths, errors = result.paths, dict(result.errors)
        values = {key: by_channel(result.rows[key], one.layout, one.prefix) for key, one in self._layouts.items()}
        for key, one in values.items():
            reason = None
            if one.shape[1] != self.outputs[key].channels:
                reason = f"{key} has {one.shape[1]} channels, not {self.outputs[key].channels} as for other images"
            elif not self.outputs[key].takes(one):
                reason = f"{key} has {one.ndim - 2} dimensions of positions, not as many as for other images"
            if reason is not None:
                return [], [*result.errors, *((path, reason) for path in dict.fromkeys(paths))]
            finite = one.flatten(1).isfinite().all(1).tolist()
            for path, is_finite in zip(paths, finite, strict=True):
                if not is_finite:
                    errors.setdefault(path, f"{key} has values that are not finite")
        if errors:
            kept = [row for row, path in enumerate(paths) if path not in errors]
            paths = [paths[row] for row in kept]
            values = {key: one[kept] for key, one in values.items()}
        for key, one in values.items():
            self.outputs[key].add(paths, one)
        return list(dict.fromkeys(paths)), list(errors.items())

    def merge(self, other: Statistics) -> None:
        """Add the images of ``other``, which has the same statistics for other images.

        Raises:
            FxError: it has other outputs or channels.
        """
        if self.outputs.keys() != other.outputs.keys():
            raise FxError(f"statistics of {', '.join(self.outputs)} and of {', '.join(other.outputs)} cannot be merged")
        for key, one in self.outputs.items():
            one.merge(other.outputs[key])

    def states(self) -> dict[str, bytes]:
        """Return each output's statistics as bytes; see :meth:`from_states`."""
        states = {}
        for key, one in self.outputs.items():
            tensors, paths = one.state()
            text = torch.from_numpy(np.frombuffer(orjson.dumps(paths), np.uint8).copy())
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            states[key] = b"".join(safetensors.write({**tensors, _PATHS: text}, {}))
        return states

    @classmethod
    def from_states(cls, states: Mapping[str, bytes]) -> Statistics:
        """Restore statistics from the result of :meth:`states`, to be merged."""
        outputs = {}
        for key, state in states.items():
            tensors = safetensors.read(bytearray(state))
            paths = orjson.loads(tensors.pop(_PATHS).numpy().tobytes())
            outputs[key] = OutputStatistics.from_state(tensors, paths)
        return cls(outputs, {})


def _check_covariances(channels: Mapping[str, int]) -> None:
    sizes = {key: 8 * count**2 for key, count in channels.items()}
    if sum(sizes.values()) > _MAX_COVARIANCES:
        largest = max(sizes, key=lambda key: sizes[key])
        whole = f" of {sum(sizes.values()) / 1024**2:,.0f} MiB in all" if len(sizes) > 1 else ""
        raise FxError(
            f"--reduce cov of {largest} needs {sizes[largest] / 1024**2:,.0f} MiB{whole}, for {channels[largest]:,} "
            f"channels; {_MAX_COVARIANCES // 1024**2} MiB are allowed: name fewer nodes, or use --project 4096"
        )
