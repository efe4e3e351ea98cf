"""Why not the second? Show where in a photo the evidence for a model's first and second class is, by Grad-CAM.

    python tests/examples/second_best.py PHOTO PICTURE [--server URL] [--model efficientnet_lite0]
        [--result classifier.1] [--at C5] [--weights DEFAULT]

Both maps are written to PICTURE side by side, white where the evidence is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import PIL.Image

from service.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--result", default="classifier.1")
    parser.add_argument("--at", default="C5")
    parser.add_argument("--weights", default="DEFAULT")
    options = parser.parse_args()

    with Client(options.server) as client:
        extractor = client.extractor(options.model, {options.result: "scores"}, weights=options.weights)
        scores = extractor(options.photo)["scores"][0]
        pictures = []
        for place, index in zip(("first", "second"), np.argsort(-scores), strict=False):
            found = extractor.attributions(options.photo, of=options.result, at=options.at, target=int(index))
            [cam] = found["attribution"]
            row, column = np.unravel_index(cam.argmax(), cam.shape)
            print(f"{place}: class {index}, strongest at row {row}, column {column} of {cam.shape[0]} x {cam.shape[1]}")
            pictures.append(
                PIL.Image.fromarray((255 * cam / max(cam.max(), 1e-12)).astype(np.uint8)).resize((224, 224))
            )
    PIL.Image.fromarray(np.hstack([np.asarray(picture) for picture in pictures])).save(options.picture)


if __name__ == "__main__":
    main()
