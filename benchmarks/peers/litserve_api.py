"""A LitServe server, following its documentation on file requests and on batching."""

import common
import litserve
import torch
from fastapi import Response, UploadFile


class FeaturesAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        model, nodes, _ = common.arguments()
        self.features = common.Features(model, nodes)

    # The annotation is evaluated at run time, so it must not be a string.
    def decode_request(self, request: UploadFile) -> torch.Tensor:
        return self.features.decode(request.file.read())

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return self.features.compute(batch if batch.ndim == 4 else batch[None])

    def unbatch(self, output: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        return output

    def encode_response(self, output: dict[str, torch.Tensor]) -> Response:
        return Response(common.encode(output), media_type=common.MEDIA_TYPE)


if __name__ == "__main__":
    api = FeaturesAPI(max_batch_size=common.MAX_BATCH, batch_timeout=common.WAIT_SECONDS)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=common.arguments()[2], log_level="warning", generate_client_file=False)
