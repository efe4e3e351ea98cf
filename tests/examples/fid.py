"""The Fréchet distance (FID) between two folders of images, from their statistics.

    fxserve extract real/ --model inception_v3 --nodes avgpool --pool avg --reduce mean,cov --out statistics-real/
    fxserve extract fake/ --model inception_v3 --nodes avgpool --pool avg --reduce mean,cov --out statistics-fake/
    python tests/examples/fid.py statistics-real/ statistics-fake/ [--node avgpool]

Only distances with the same model, node and preprocessing are comparable. Published distances use a different Inception
from torchvision's. A folder should have several times more images than the node has channels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--node", default="avgpool")
    options = parser.parse_args()
    first, second = (load_file(folder / "stats.safetensors") for folder in options.folders)
    means, covariances = ([one[f"{options.node}.{name}"] for one in (first, second)] for name in ("mean", "cov"))
    print(f"{frechet_distance(*means, *covariances):.6g}")


def frechet_distance(mean: NDArray[Any], other_mean: NDArray[Any], cov: NDArray[Any], other_cov: NDArray[Any]) -> float:
    """Return the squared Fréchet distance of two Gaussians (Dowson and Landau, 1982; Heusel et al., 2017)."""
    # Compute the trace of sqrtm(cov @ other_cov) with a symmetric matrix.
    values, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    product = np.linalg.eigvalsh(root @ other_cov @ root)
    trace = np.trace(cov) + np.trace(other_cov) - 2 * np.sqrt(product.clip(min=0)).sum()
    return float(np.square(mean - other_mean).sum() + trace)


if __name__ == "__main__":
    main()
