"""Random projections of long rows to short rows that nearly keep distances, like scikit-learn's SparseRandomProjection.

The matrices are bit-identical to scikit-learn's but generated without it: a row of ``n`` values has about ``sqrt(n)``
entries of the same magnitude and random sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxcore.quiet import quiet

_PERMUTED = (0.01, 0.99)
"""Range of the fraction of chosen places in which scikit-learn uses the start of a permutation; outside it, it draws
places one by one."""


def projection_matrix(values: int, components: int, seed: int) -> Tensor:
    """Return ``SparseRandomProjection(n_components=components, random_state=seed).fit(rows).components_``.

    Args:
        values: number of values in a row.
        components: number of values in a projected row.
        seed: seed from 0 to 2**32 - 1.

    Returns:
        Sparse CSR, float32 ``[components, values]``.

    >>> projection_matrix(16, 2, seed=0).to_dense().unique()
    tensor([-1.4142,  0.0000,  1.4142])
    """
    rng = np.random.RandomState(seed)
    density = 1 / math.sqrt(values)
    ends: Sequence[int]
    if density == 1:
        dense = rng.binomial(1, 0.5, (components, values)) * 2 - 1
        places, ends = [np.zeros(1, np.int64)] * components, range(components + 1)
        signs = dense.ravel()
    else:
        places = [_places(rng, values, rng.binomial(values, density)) for _ in range(components)]
        ends = [0, *np.cumsum([len(row) for row in places])]
        signs = rng.binomial(1, 0.5, size=ends[-1]) * 2 - 1
    scaled = np.sqrt(1 / density) / np.sqrt(components) * signs
    with quiet():  # "Sparse CSR tensor support is in beta"
        return torch.sparse_csr_tensor(
            torch.tensor(np.asarray(ends), dtype=torch.int32),
            torch.tensor(np.concatenate(places), dtype=torch.int32),
            torch.tensor(scaled, dtype=torch.float32),
            (components, values),
            check_invariants=False,
        )


def project(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return ``rows``, flattened, times the transposed ``matrix``.

    Args:
        rows: floating-point ``[N, ...]``.
        matrix: a matrix from :func:`projection_matrix`, on the same device.

    Returns:
        float32 ``[N, components]``.
    """
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    if flat.device.type != "cpu":
        projected: Tensor = torch.sparse.mm(matrix, flat.float().t()).t()
        return projected.contiguous()
    projected = torch.empty(len(flat), len(matrix))
    for row, short in zip(flat.float(), projected, strict=True):  # faster than a single matrix product
        torch.mv(matrix, row, out=short)
    return projected


def matrix_bytes(values: int, components: int) -> int:
    """Return the approximate bytes of the result of :func:`projection_matrix`."""
    return components * (8 * math.isqrt(values) + 12)


def _places(rng: np.random.RandomState, values: int, count: int) -> NDArray[np.int64]:
    """Choose ``count`` of ``values`` places without replacement, like scikit-learn's ``sample_without_replacement``."""
    low, high = _PERMUTED
    if low < count / values < high:
        return rng.permutation(values)[:count]
    if count == values:  # nearly equal counts have negligible probability
        return np.arange(count)
    found = np.empty(0, np.int64)
    while len(found) < count:  # equivalent to drawing places one by one, but vectorized
        drawn = np.concatenate([found, rng.randint(values, size=count - len(found))])
        _, first = np.unique(drawn, return_index=True)
        found = drawn[np.sort(first)]
    return found
