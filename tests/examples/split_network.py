"""Split a network: the backbone runs on the server, the head here in onnxruntime, as a browser could run it.

    python tests/examples/split_network.py PHOTO [--server URL] [--model resnet18] [--at layer3] [--weights DEFAULT]

An extractor may start at any node. The extractor from ``--at`` to the model's result is downloaded once, as ONNX; after
that, the server computes only the first half.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
import numpy as np
import onnxruntime

from service.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--at", default="layer3")
    parser.add_argument("--result", default="fc")
    parser.add_argument("--weights", default="DEFAULT")
    options = parser.parse_args()

    with Client(options.server) as client:
        backbone = client.extractor(options.model, [options.at], weights=options.weights)
        head = client.extractor(options.model, [options.result], inputs=[options.at], weights=options.weights)
        file = httpx.get(f"{options.server}/v1/extractors/{head.id}/export?format=onnx", timeout=300).raise_for_status()
        features = backbone(options.photo)
        expected = head(features)[options.result]
    session = onnxruntime.InferenceSession(file.content)
    [scores] = session.run([options.result], {options.at: features[options.at]})
    apart = np.abs(scores - expected).max() / np.abs(expected).max()
    print(f"class {scores.argmax()} by the head here, class {expected.argmax()} by the server; apart by {apart:.1e}")


if __name__ == "__main__":
    main()
