"""Find the channels that a prediction depends on, by switching off each channel of a layer in turn.

    python tests/examples/ablate.py PHOTO [--server URL] [--model efficientnet_lite0] [--at C5]
        [--result classifier.1] [--weights DEFAULT] [--top 10]

Each row of a request has its own edit, so the server computes sixteen ablations as one batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from service.client import Client

EDITS = 16  # maximum per request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--at", default="C5")
    parser.add_argument("--result", default="classifier.1")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--top", type=int, default=10)
    options = parser.parse_args()

    with Client(options.server) as client:
        nodes = {options.result: "scores", options.at: "map"}
        info = client.extractor(options.model, nodes, weights=options.weights).outputs[1]
        channels = info["shape"][1 if info["layout"] == "NCHW" else -1]
        extractor = client.extractor(options.model, {options.result: "scores"}, weights=options.weights)
        [scores] = extractor(options.photo)["scores"]
        predicted = int(scores.argmax())
        left = []
        for start in range(0, channels, EDITS):
            off = range(start, min(start + EDITS, channels))
            edits = [
                {"node": options.at, "channels": [channel], "scale": 0, "images": [row]}
                for row, channel in enumerate(off)
            ]
            left += extractor([options.photo] * len(off), edits=edits)["scores"][:, predicted].tolist()
    lost = scores[predicted] - np.array(left)
    print(f"class {predicted} has {scores[predicted]:.4f}")
    for channel in np.argsort(-lost)[: options.top]:
        print(f"{lost[channel]:+.4f} lost without channel {channel}")


if __name__ == "__main__":
    main()
