"""A Ray Serve application, following its documentation on dynamic request batching."""

from __future__ import annotations

import os
import signal
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, os.path.dirname(__file__))

import common
import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 1, "runtime_env": {}})
class Features:
    def __init__(self, model: str, nodes: dict[str, str]) -> None:
        torch.set_num_threads(os.cpu_count() or 1)  # Ray limits an actor's OpenMP to one thread per CPU it reserves
        self.features = common.Features(model, nodes)

    @serve.batch(max_batch_size=common.MAX_BATCH, batch_wait_timeout_s=common.WAIT_SECONDS)
    async def compute(self, images: list[bytes]) -> list[bytes]:
        batch = torch.stack([self.features.decode(data) for data in images])
        return [common.encode(outputs) for outputs in self.features.compute(batch)]

    async def __call__(self, request: Request) -> Response:
        return Response(await self.compute(await request.body()), media_type=common.MEDIA_TYPE)


def main() -> None:
    model, nodes, port = common.arguments()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Features.bind(model, nodes), name="features", route_prefix="/predict")
    try:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
