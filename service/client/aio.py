"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx

from service.choices import Attribution, Backend, Dtype, Fit, Precision, Preprocess, Source
from service.client import flows
from service.client.base import MAX_ROWS, BaseClient, BaseExtractor, attribution_query, feature_query, token_indices
from service.client.images import Part
from service.client.responses import Receiver, Response

Result = TypeVar("Result")


class AsyncClient(BaseClient):
    __doc__ = f"An asyncio client of one server, for use in one event loop.\n{BaseClient.__doc__}"

    def _connect(self) -> None:
        self._http = httpx.AsyncClient(base_url=self.url, headers=self.headers)

    async def models(
        self, *, task: str | None = None, q: str | None = None, source: Source | None = None
    ) -> list[dict[str, Any]]:
        """List the models served. For arguments see :meth:`service.client.Client.models`."""
        return await flows.models(self, task, q, source)

    async def model(self, model: str) -> dict[str, Any]:
        """Describe one model: its weights, inputs, preprocessing and levels."""
        return await flows.model(self, model)

    async def nodes(
        self, model: str, *, weights: str = "DEFAULT", transforms: Literal["attention_maps"] | None = None
    ) -> dict[str, Any]:
        """List a model's node names. For arguments see :meth:`service.client.Client.nodes`."""
        return await flows.nodes(self, model, weights, transforms)

    async def extractor(
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
    ) -> AsyncExtractor:
        """Create an extractor of ``nodes``. For arguments and errors see :meth:`service.client.Client.extractor`."""
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
        return AsyncExtractor(self, await flows.create_extractor(self, spec, wait), spec)

    async def extractors(self) -> list[AsyncExtractor]:
        """List the server's extractors."""
        found = await flows.extractors(self)
        return [AsyncExtractor(self, description, None) for description in found]

    async def find(self, id_or_name: str) -> AsyncExtractor:
        """Look up an extractor by id or name. Without its spec, it cannot be recreated if the server forgets it."""
        return AsyncExtractor(self, await flows.extractor(self, id_or_name), None)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, request: flows.Request) -> Response:
        response = await self._http.send(self._http.build_request(**vars(request)), stream=True)
        try:
            receiver = Receiver(response)
            async for chunk in response.aiter_raw():
                receiver.feed(chunk)
        finally:
            await response.aclose()
        return receiver.response()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.to_thread(function)

    async def _run_all(self, all_flows: Sequence[flows.Flow]) -> None:
        """Run flows concurrently; the first error cancels the others."""
        slots = asyncio.Semaphore(self.concurrency)

        async def run(flow: flows.Flow) -> None:
            async with slots:
                await flow()

        running = [asyncio.ensure_future(run(flow)) for flow in all_flows]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class AsyncExtractor(BaseExtractor):
    """An extractor on the server, called with images; the asyncio form of :class:`service.client.Extractor`."""

    def __init__(self, client: AsyncClient, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        super().__init__(description, spec)
        self._client = client

    async def __call__(
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

        For arguments and errors see :meth:`service.client.Extractor.__call__`.
        """
        chosen = token_indices(tokens)
        rows = self.rows(pool, project, chosen)
        parts = await asyncio.to_thread(self._split, images, rows, preprocess, boxes, points, masks, edits)
        query = feature_query(pool, dtype, normalize, preprocess, chosen, roi_size=roi_size, project=project, seed=seed)
        return await self._call(parts, query, as_torch)

    async def attributions(
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
        """Compute attributions. For arguments and errors see :meth:`service.client.Extractor.attributions`."""
        parts = await asyncio.to_thread(self._split, images, MAX_ROWS, preprocess)
        query = attribution_query(of, at, target, method, steps, preprocess)
        return await self._call(parts, query, as_torch, "attributions")

    async def _call(
        self, parts: Sequence[Part], query: Mapping[str, str], as_torch: bool, resource: str = "features"
    ) -> dict[str, Any]:
        all_flows, assembly = flows.call(self._client, self.ref, parts, query, resource)
        await self._client._run_all(all_flows)
        return assembly.tensors() if as_torch else assembly.arrays()

    async def delete(self) -> None:
        """Delete the extractor on the server. Calling it afterwards recreates it if its spec is known."""
        await flows.delete(self._client, flows.extractor_path(self.id))
