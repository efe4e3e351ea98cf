"""A FastAPI endpoint following its tutorial on file uploads: ``def``, so it runs in the thread pool. No batching."""

from __future__ import annotations

import common
import uvicorn
from fastapi import FastAPI, Response, UploadFile

model, nodes, port = common.arguments()
features = common.Features(model, nodes)
app = FastAPI()


@app.post("/predict")
def predict(request: UploadFile) -> Response:
    outputs = features.compute(features.decode(request.file.read())[None])
    return Response(common.encode(outputs[0]), media_type=common.MEDIA_TYPE)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
