"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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


class AsyncClient(Common):
    __doc__ = f"A client of one server, for one event loop.\n{Common.__doc__}"

    def _connect(self) -> None:
        self._http = httpx.AsyncClient(base_url=self.url, headers=self.headers)

    async def models(self, *, task: str | None = None, q: str | None = None) -> list[dict[str, Any]]:
        """The models that are served: name, task and weights of each; of one ``task``, or with ``q`` in the name."""
        return await self._run(flows.models(task, q, self.patience))

    async def model(self, model: str) -> dict[str, Any]:
        """One model: its weights, inputs, preprocessing and levels."""
        return await self._run(flows.model(model, self.patience))

    async def nodes(
        self, model: str, *, weights: str = "DEFAULT", transforms: Literal["attention_maps"] | None = None
    ) -> dict[str, Any]:
        """The names of a model's nodes: ``eval_nodes``, ``train_nodes``, and the ``levels`` that stand for some.

        Args:
            weights: the weights whose structure is described, as of :meth:`extractor`; none are loaded.
            transforms: list the nodes that this transform brings, too.
        """
        return await self._run(flows.nodes(model, weights, transforms, self.patience))

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
        image_size: int | None = None,
        wait: float = flows.DEFAULT_WAIT,
    ) -> AsyncExtractor:
        """An extractor of ``nodes``; arguments and errors as of :meth:`service.client.Client.extractor`."""
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
        return AsyncExtractor(self, await self._run(flows.make_extractor(spec, wait, self.patience)), spec)

    async def extractors(self) -> list[AsyncExtractor]:
        """The extractors that the server has, one process of it where it is several."""
        found = (await self._run(flows.fetch("/v1/extractors", self.patience)))["extractors"]
        return [AsyncExtractor(self, description, None) for description in found]

    async def find(self, id_or_name: str) -> AsyncExtractor:
        """The extractor of that id or name; it is asked for by id, and cannot be made again."""
        return AsyncExtractor(self, await self._run(flows.fetch(flows.extractor_path(id_or_name), self.patience)), None)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, flow: flows.Flow[Result]) -> Result:
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
                result = await self._take(step)
            except httpx.TransportError as error:
                failed = error

    async def _take(self, step: flows.Step) -> Any:
        if isinstance(step, flows.Wait):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, flows.Work):
            return await asyncio.to_thread(step.function)
        request = self._http.build_request(
            step.method, step.path, params=step.query, headers=step.headers, content=step.body, timeout=step.timeout
        )
        response = await self._http.send(request, stream=True)
        try:
            receiver = flows.Receiver(response)
            async for chunk in response.aiter_raw():
                receiver.feed(chunk)
        finally:
            await response.aclose()
        return receiver.answer()

    async def _run_all(self, all_flows: Sequence[flows.Flow[None]]) -> None:
        """Run flows at the same time; the first error ends them all."""
        places = asyncio.Semaphore(self.concurrency)

        async def run(flow: flows.Flow[None]) -> None:
            async with places:
                await self._run(flow)

        running = [asyncio.ensure_future(run(flow)) for flow in all_flows]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class AsyncExtractor(Described):
    """An extractor on the server: call it with images; made again as :class:`service.client.Extractor` is."""

    def __init__(self, client: AsyncClient, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        super().__init__(description, spec)
        self._client = client

    async def __call__(
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

        Arguments and errors are those of :meth:`service.client.Extractor.__call__`.
        """
        alone = not self.one_size or preprocess == "none"
        todo = await asyncio.to_thread(parts, images, self.rows(pool), MAX_BODY_BYTES, alone, boxes)
        assembly = Assembly(todo[-1].end)
        query = feature_query(pool, dtype, normalize, preprocess, roi_size)
        patience = self._client.patience
        await self._client._run_all([flows.extract(self.held, part, query, assembly, patience) for part in todo])
        return assembly.tensors() if as_torch else assembly.arrays()

    async def delete(self) -> None:
        """Have the server forget it, one process of it where it is several; a call has it made again."""
        await self._client._run(flows.delete(flows.extractor_path(self.id), self._client.patience))
