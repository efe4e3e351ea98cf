"""Image search: find the images in a folder that are most similar to a query image.

    python tests/examples/search.py QUERY FOLDER [--server URL] [--model efficientnet_lite0] [--weights DEFAULT]

Every image becomes one vector, the average of its C5 normalised to length 1; neighbours are found by cosine similarity.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sklearn.neighbors import NearestNeighbors

from service.client import Client

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--results", type=int, default=5)
    options = parser.parse_args()

    files = sorted(file for file in options.folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    with Client(options.server) as client:
        extractor = client.extractor(options.model, ["C5"], weights=options.weights)
        vectors = extractor(files, pool="avg", normalize="l2")["C5"]
        wanted = extractor(options.query, pool="avg", normalize="l2")["C5"]
    index = NearestNeighbors(n_neighbors=min(options.results, len(files)), metric="cosine").fit(vectors)
    distances, places = index.kneighbors(wanted)
    for distance, place in zip(distances[0], places[0], strict=True):
        print(f"{1 - distance:.3f}  {files[place]}")


if __name__ == "__main__":
    main()
