"""The client for ordinary code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx

from service.client import flows
from service.client.images import parts
from service.client.parameters import (
    MAX_BODY_BYTES,
    Backend,
    Common,
    Described,
    Dtype,
    Pool,
    Precision,
    Preprocess,
    feature_query,
)
from service.client.tensors import Assembly

Result = TypeVar("Result")


class Client(Common):
    __doc__ = f"A client of one server; safe to use from several threads.\n{Common.__doc__}"

    def _connect(self) -> None:
        self._http = httpx.Client(base_url=self.url, headers=self.headers)

    def models(self, *, task: str | None = None, q: str | None = None) -> list[dict[str, Any]]:
        """The models that are served: name, task and weights of each; of one ``task``, or with ``q`` in the name."""
        return self._run(flows.models(task, q, self.patience))

    def model(self, model: str) -> dict[str, Any]:
        """One model: its weights, inputs, preprocessing and levels."""
        return self._run(flows.model(model, self.patience))

    def nodes(
        self, model: str, *, weights: str = "DEFAULT", transforms: Literal["attention_maps"] | None = None
    ) -> dict[str, Any]:
        """The names of a model's nodes: ``eval_nodes``, ``train_nodes``, and the ``levels`` that stand for some.

        Args:
            weights: the weights whose structure is described, as of :meth:`extractor`; none are loaded.
            transforms: list the nodes that this transform brings, too.
        """
        return self._run(flows.nodes(model, weights, transforms, self.patience))

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
        image_size: int | None = None,
        wait: float = flows.DEFAULT_WAIT,
    ) -> Extractor:
        """An extractor of ``nodes`` (names, or node → key), made by the server if it has none like it.

        Args:
            weights: ``DEFAULT``, a name from :meth:`model`, ``random`` (repeatable), or ``file:NAME`` of the server's.
            name: to find it by, beside its id.
            precision: what it computes in.
            backend: what computes it; ``auto`` is eager at first and the fastest that agrees with it later.
            transforms: graph passes, in order: names, or ``{"name": …, "params": {…}}``; with ``"optional": True``
                beside them, one may find nothing to change.
            image_size: crop images to a square of this side instead of the weights' own.
            wait: seconds to wait until it is ready.

        Raises:
            Problem: the server cannot make it; by subclass ``UnknownModel``, ``UnknownNode``, ``WeightsUnavailable``…
        """
        spec = flows.spec_of(
            model,
            nodes,
            weights=weights,
            name=name,
            precision=precision,
            backend=backend,
            transforms=list(transforms),
            image_size=image_size,
        )
        return Extractor(self, self._run(flows.make_extractor(spec, wait, self.patience)), spec)

    def extractors(self) -> list[Extractor]:
        """The extractors that the server has, one process of it where it is several."""
        found = self._run(flows.fetch("/v1/extractors", self.patience))["extractors"]
        return [Extractor(self, description, None) for description in found]

    def find(self, id_or_name: str) -> Extractor:
        """The extractor of that id or name; it is asked for by id, and cannot be made again."""
        return Extractor(self, self._run(flows.fetch(flows.extractor_path(id_or_name), self.patience)), None)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: flows.Flow[Result]) -> Result:
        result: Any = None
        failed: httpx.TransportError | None = None
        while True:
            try:
                step = flow.send(result) if failed is None else flow.throw(failed)
            except StopIteration as end:
                value: Result = end.value
                return value
            result, failed = None, None
            try:
                result = self._take(step)
            except httpx.TransportError as error:
                failed = error

    def _take(self, step: flows.Step) -> Any:
        if isinstance(step, flows.Wait):
            return time.sleep(step.seconds)
        if isinstance(step, flows.Work):
            return step.function()
        request = self._http.build_request(
            step.method, step.path, params=step.query, headers=step.headers, content=step.body, timeout=step.timeout
        )
        response = self._http.send(request, stream=True)
        try:
            receiver = flows.Receiver(response)
            for chunk in response.iter_raw():
                receiver.feed(chunk)
        finally:
            response.close()
        return receiver.answer()

    def _run_all(self, all_flows: Sequence[flows.Flow[None]]) -> None:
        """Run flows at the same time; the first error ends them all."""
        if len(all_flows) == 1:
            self._run(all_flows[0])
            return
        pool = ThreadPoolExecutor(min(self.concurrency, len(all_flows)), "fxserve-client")
        running = [pool.submit(self._run, flow) for flow in all_flows]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for future in running:
            if future.done():
                future.result()


class Extractor(Described):
    """An extractor on the server: call it with images.

    One that :meth:`Client.extractor` made is made again where the server does not know it: after a restart, or by
    another of its processes.
    """

    def __init__(self, client: Client, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        super().__init__(description, spec)
        self._client = client

    def __call__(
        self,
        images: Any,
        *,
        pool: Pool = "none",
        dtype: Dtype | None = None,
        normalize: Literal["l2"] | None = None,
        preprocess: Preprocess = "default",
        boxes: Any = None,
        roi_size: int | None = None,
        as_torch: bool = False,
    ) -> dict[str, Any]:
        """The features of one or more images, by key; the first dimension is the images in the order given.

        Where images of different sizes give maps of different sizes (detectors, segmentation), an output is a list with
        the map of each image.

        Args:
            images: one or a sequence of: a path, the bytes of an image file, a PIL image, a uint8 array or tensor
                (``[H, W, 3]`` or ``[3, H, W]``), a floating one that is preprocessed already (``[3, H, W]``); or a
                batch of these with one more dimension in front; or a mapping from the model's input names to batches.
            pool: one vector an image instead of a map.
            dtype: of floating outputs, to halve what is sent; numpy gets bfloat16 widened to float32.
            normalize: ``l2``: unit length over the channels.
            preprocess: ``default`` is the weights' own transform of the decoded tensor, unless the server is set to
                another (``client.model(name)["default_preprocess"]``); ``pil`` is that of the PIL image; ``fast``
                decodes large JPEG files at a half or a quarter; ``none`` only scales pixels to [0, 1].
            boxes: with ``pool="roi"``: ``[x1, y1, x2, y2]`` in pixels of the image, a list or array of them for each
                image, or for the one image. The first dimension is the boxes then, and ``box_image`` says whose image
                each is of. Images are files, bytes or PIL images.
            roi_size: positions a side of what each box becomes, 7 where not given; 1 makes it a vector.
            as_torch: torch tensors instead of arrays.

        Raises:
            Problem: the server refused; nothing of the call is returned. Of an image: ``error.index``.
        """
        alone = not self.one_size or preprocess == "none"
        todo = parts(images, self.rows(pool), MAX_BODY_BYTES, alone, boxes)
        assembly = Assembly(todo[-1].end)
        query = feature_query(pool, dtype, normalize, preprocess, roi_size)
        patience = self._client.patience
        self._client._run_all([flows.extract(self.held, part, query, assembly, patience) for part in todo])
        return assembly.tensors() if as_torch else assembly.arrays()

    def delete(self) -> None:
        """Have the server forget it, one process of it where it is several; a call has it made again."""
        self._client._run(flows.delete(flows.extractor_path(self.id), self._client.patience))
