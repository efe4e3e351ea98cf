"""A linear probe: how well a layer's features tell handwritten digits apart.

    python tests/examples/probe.py [--server URL] [--model efficientnet_lite0] [--node C4] [--weights DEFAULT]

The digits are scikit-learn's, 8 x 8 pixels each. The server computes features; only a logistic regression is trained.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from service.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--node", default="C4")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--digits", type=int, default=1797)
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    grey = (images[: options.digits] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)
    pixels = np.repeat(np.kron(grey, np.ones((1, 8, 8), np.uint8))[..., None], 3, axis=3)  # [N, 64, 64, 3]
    with Client(options.server) as client:
        extractor = client.extractor(options.model, [options.node], weights=options.weights)
        features = extractor(pixels, pool="avg", preprocess="none")[options.node]
    seen, unseen, known, asked = train_test_split(features, labels[: options.digits], test_size=0.3, random_state=0)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(seen, known)
    print(f"accuracy {probe.score(unseen, asked):.3f} on {len(unseen)} digits, {options.model} {options.node}")


if __name__ == "__main__":
    main()
