"""A mosec server, following its PyTorch example: a stage of preprocessing workers, then one that computes batches."""

from __future__ import annotations

import os
import sys

import common
import torch
from mosec import Server, Worker

# mosec spawns its workers: they import this file again and find the arguments here.
if "BENCHMARK_PEER" in os.environ:
    sys.argv[1:] = os.environ["BENCHMARK_PEER"].split(" ")
model, nodes, port = common.arguments()


class Preprocess(Worker):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.transform = common.transform(model)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> torch.Tensor:
        return common.decode(self.transform, data)


class Inference(Worker):
    resp_mime_type = common.MEDIA_TYPE

    def __init__(self) -> None:
        super().__init__()
        self.features = common.Features(model, nodes)

    def forward(self, data: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return self.features.compute(torch.stack(data))

    def serialize(self, data: dict[str, torch.Tensor]) -> bytes:
        return common.encode(data)


if __name__ == "__main__":
    os.environ["BENCHMARK_PEER"] = " ".join(sys.argv[1:5])
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--timeout", "60000", "--log-level", "warning"]
    server = Server()
    server.append_worker(Preprocess, num=2)
    server.append_worker(
        Inference, num=1, max_batch_size=common.MAX_BATCH, max_wait_time=int(1000 * common.WAIT_SECONDS)
    )
    server.run()
