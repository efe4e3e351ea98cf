"""The synchronous client."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx

from service.choices import Attribution, Backend, Dtype, Fit, Precision, Preprocess, Source
from service.client import flows
from service.client.base import MAX_ROWS, BaseClient, BaseExtractor, attribution_query, feature_query, token_indices
from service.client.images import Part
from service.client.responses import Receiver, Response

Result = TypeVar("Result")


def _run(flow: Coroutine[Any, Any, Result]) -> Result:
    """Run a flow, which never suspends because the client's methods block."""
    try:
        flow.send(None)
    except StopIteration as end:
        value: Result = end.value
        return value
    raise AssertionError("unreachable")


class Client(BaseClient):
    __doc__ = f"A client of one server. Threads and forked processes may share it.\n{BaseClient.__doc__}"

    def _connect(self) -> None:
        self._http = httpx.Client(base_url=self.url, headers=self.headers)
        self._process = os.getpid()

    def models(
        self, *, task: str | None = None, q: str | None = None, source: Source | None = None
    ) -> list[dict[str, Any]]:
        """List the models served: name, task and weights of each.

        Args:
            task: only models for this task.
            q: only models whose name contains this.
            source: only models from this source; timm's are listed only with ``timm``, and ``own`` are the operator's.
        """
        return _run(flows.models(self, task, q, source))

    def model(self, model: str) -> dict[str, Any]:
        """Describe one model: its weights, inputs, preprocessing and levels."""
        return _run(flows.model(self, model))

    def nodes(
        self, model: str, *, weights: str = "DEFAULT", transforms: Literal["attention_maps"] | None = None
    ) -> dict[str, Any]:
        """List a model's node names: ``eval_nodes``, ``train_nodes``, and ``levels``, which are aliases of some.

        Args:
            weights: as in :meth:`extractor`; they determine the model's structure and are not loaded.
            transforms: also list the nodes that this transform adds.
        """
        return _run(flows.nodes(self, model, weights, transforms))

    def extractor(
        self,
        model: str,
        nodes: Sequence[str] | Mapping[str, str],
        *,
        weights: str = "DEFAULT",
        name: str | None = None,
        precision: Precision = "float32",
        backend: Backend = "auto",
        transforms: Sequence[str | Mapping[str, Any]] = (),
        image_size: int | Sequence[int] | None = None,
        fit: Fit = "crop",
        inputs: Sequence[str] | None = None,
        wait: float = flows.DEFAULT_WAIT,
    ) -> Extractor:
        """Create an extractor of ``nodes`` (names, or a map node → key), or find the existing one of the same spec.

        Args:
            weights: ``DEFAULT``, a name from :meth:`model`, ``random`` (repeatable), or ``file:NAME`` for a file in
                the server's weights folder.
            name: an alias for its id, for :meth:`find`.
            precision: the arithmetic the model runs in.
            backend: the backend that runs the model; ``auto`` begins with eager and switches to the fastest backend
                that agrees with it.
            transforms: graph passes, in order: names, or ``{"name": …, "params": {…}}``; a step with ``"optional":
                True`` is allowed to find nothing to change.
            image_size: size of the input in pixels, a side or ``[height, width]``; None for the weights' own.
            fit: how an image is brought to that size: ``crop`` like the weights' own transform, ``stretch``, ``pad``
                (the output ``valid_box`` is the image's position), or ``native``, where ``image_size`` is the shorter
                side and nothing is cropped.
            inputs: nodes to begin at instead of the model's inputs; call it with a mapping from these names to arrays.
            wait: seconds to wait for the build.

        Raises:
            Problem: the server cannot build it: ``UnknownModel``, ``UnknownNode``, ``WeightsUnavailable``, …
            TimedOut: it is not ready within ``wait`` seconds.
        """
        spec = flows.extractor_spec(
            model,
            nodes,
            weights=weights,
            name=name,
            precision=precision,
            backend=backend,
            transforms=transforms,
            image_size=image_size,
            fit=fit,
            inputs=inputs,
        )
        return Extractor(self, _run(flows.create_extractor(self, spec, wait)), spec)

    def extractors(self) -> list[Extractor]:
        """List the server's extractors."""
        found = _run(flows.extractors(self))
        return [Extractor(self, description, None) for description in found]

    def find(self, id_or_name: str) -> Extractor:
        """Look up an extractor by id or name. Without its spec, it cannot be recreated if the server forgets it."""
        return Extractor(self, _run(flows.extractor(self, id_or_name)), None)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _send(self, request: flows.Request) -> Response:
        # A forked process has the sockets of its parent, on which both would read each other's responses.
        if self._process != os.getpid() and not self._http.is_closed:
            self._connect()
        http = self._http
        response = http.send(http.build_request(**vars(request)), stream=True)
        try:
            receiver = Receiver(response)
            for chunk in response.iter_raw():
                receiver.feed(chunk)
        finally:
            response.close()
        return receiver.response()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _call(self, function: Callable[[], Result]) -> Result:
        return function()

    def _run_all(self, all_flows: Sequence[flows.Flow]) -> None:
        """Run flows concurrently; the first error cancels the others."""
        if len(all_flows) == 1:
            _run(all_flows[0]())
            return
        pool = ThreadPoolExecutor(min(self.concurrency, len(all_flows)), "fxserve-client")
        running = [pool.submit(lambda flow: _run(flow()), flow) for flow in all_flows]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for future in running:
            if future.done():
                future.result()


class Extractor(BaseExtractor):
    """An extractor on the server, called with images.

    If it comes from :meth:`Client.extractor`, it is recreated when the server no longer knows it, for example after a
    restart.
    """

    def __init__(self, client: Client, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        super().__init__(description, spec)
        self._client = client

    def __call__(
        self,
        images: Any,
        *,
        pool: str = "none",
        dtype: Dtype | None = None,
        normalize: Literal["l2"] | None = None,
        preprocess: Preprocess = "default",
        boxes: Any = None,
        points: Any = None,
        masks: Any = None,
        edits: Iterable[Mapping[str, Any]] = (),
        roi_size: int | None = None,
        project: int | None = None,
        seed: int | None = None,
        tokens: Iterable[int] | None = None,
        as_torch: bool = False,
    ) -> dict[str, Any]:
        """Compute the features of one or more images, by key. The first dimension is the images, in the order given.

        If maps have different sizes because images do (detection, segmentation), an output is a list with one map per
        image.

        Args:
            images: one image or a sequence of them, or a mapping from the model's input names to batches. An image is
                a path, the bytes of an image file, a PIL image, a uint8 array or tensor (``[H, W, 3]`` or
                ``[3, H, W]``), or a floating-point one that is already preprocessed (``[3, H, W]``). Arrays may have
                a leading batch dimension.
            pool: how to pool each map to one vector per image: ``avg``, ``max``, ``gem`` or ``cls``, or several joined
                by ``+``; ``roi`` pools ``boxes``, ``points`` samples ``points`` and ``mask`` averages over ``masks``.
            dtype: dtype of floating-point outputs; 16 bits halve the transfer. In NumPy arrays, bfloat16 is widened to
                float32.
            normalize: ``l2`` scales to unit length over the channels.
            preprocess: ``default`` is the weights' own transform applied to the decoded tensor, unless the server is
                configured otherwise (``client.model(name)["default_preprocess"]``); ``pil`` applies it to the PIL
                image; ``fast`` decodes large JPEG files at half or quarter size; ``none`` only scales pixels to [0, 1].
            boxes: with ``pool="roi"``: for each image, or for the single image, a list or array of
                ``[x1, y1, x2, y2]`` in its pixels. The first dimension is then the boxes, and ``box_image`` is the
                index of each box's image. Images must be files, bytes or PIL images.
            points: with ``pool="points"``, likewise: lists or arrays of ``[x, y]``, and ``point_image``.
            masks: with ``pool="mask"``, likewise: lists of masks of the image's size, and ``mask_image``. A mask is an
                array or tensor ``[height, width]``, a PIL image or a PNG file (path or bytes), each zero outside the
                mask, or COCO run lengths from pycocotools.
            edits: edits of inner values, in order: mappings with ``node`` and any of ``scale``, ``shift``,
                ``channels``, ``tokens``, ``box`` and ``images`` (indices), such as ``{"node": "layer2", "channels":
                [5], "scale": 0}``. Images must be files, bytes or PIL images.
            roi_size: side of each pooled box, 7 by default; 1 gives a vector.
            project: project each row, flattened after pooling, to this many values, with the matrix of scikit-learn's
                ``SparseRandomProjection(n_components=project, random_state=seed)``.
            seed: seed of the projection, 0 by default.
            tokens: indices of the tokens to return, or of the queries for attention weights: ``[0]`` selects the class
                token's row of ``[N, heads, L, L]`` and returns ``[N, heads, 1, L]``.
            as_torch: return torch tensors instead of NumPy arrays.

        Raises:
            Problem: the server rejected a request, so the whole call fails. For a bad image, ``error.index`` is its
                index.
            FxserveError: the server could not be reached or did not answer in time.
        """
        chosen = token_indices(tokens)
        parts = self._split(images, self.rows(pool, project, chosen), preprocess, boxes, points, masks, edits)
        query = feature_query(pool, dtype, normalize, preprocess, chosen, roi_size=roi_size, project=project, seed=seed)
        return self._call(parts, query, as_torch)

    def attributions(
        self,
        images: Any,
        *,
        of: str,
        at: str | None = None,
        target: int | Literal["max"] = "max",
        method: Attribution = "gradcam",
        steps: int = 20,
        preprocess: Preprocess = "default",
        as_torch: bool = False,
    ) -> dict[str, Any]:
        """Attribute the result of a node to the values of another. Returns ``attribution`` and ``targets``.

        The extractor's outputs are ignored: only its model, weights and size matter. With ``fit="pad"``, ``valid_box``
        is returned, too.

        Args:
            images: as in a call.
            of: a node with one vector per image, such as ``fc``.
            at: the node whose values the result is attributed to; None for the model's input, which ``gradcam`` does
                not support.
            target: index of the result value, or ``max`` for the largest one of each image.
            method: ``gradcam`` gives ``[n, H, W]``; ``gradient`` and ``integrated_gradients`` the shape of the values.
            steps: number of steps of ``integrated_gradients``.
            preprocess: as in a call.
            as_torch: return torch tensors instead of NumPy arrays.

        Raises:
            Problem, FxserveError: as in a call.
        """
        parts = self._split(images, MAX_ROWS, preprocess)
        query = attribution_query(of, at, target, method, steps, preprocess)
        return self._call(parts, query, as_torch, "attributions")

    def _call(
        self, parts: Sequence[Part], query: Mapping[str, str], as_torch: bool, resource: str = "features"
    ) -> dict[str, Any]:
        all_flows, assembly = flows.call(self._client, self.ref, parts, query, resource)
        self._client._run_all(all_flows)
        return assembly.tensors() if as_torch else assembly.arrays()

    def delete(self) -> None:
        """Delete the extractor on the server. Calling it afterwards recreates it if its spec is known."""
        _run(flows.delete(self._client, flows.extractor_path(self.id)))
