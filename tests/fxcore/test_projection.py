"""Projections, against scikit-learn's own."""

import numpy as np
import pytest
import torch
from sklearn.random_projection import SparseRandomProjection

from fxcore.projection import matrix_bytes, project, projection_matrix


@pytest.mark.filterwarnings("ignore:The number of components is higher")
@pytest.mark.parametrize(
    ("values", "components", "seed"),
    # A single value is projected densely; below 10,000 scikit-learn permutes, above it draws, and about there either.
    [
        (1, 7, 0),
        (2, 5, 1),
        (3, 40, 2),
        (12, 9, 0),
        (2048, 64, 2**32 - 1),
        (9_980, 40, 3),
        (10_050, 40, 4),
        (100_352, 128, 5),
    ],
)
def test_matrices_are_scikit_learns(values, components, seed):
    theirs = SparseRandomProjection(n_components=components, random_state=seed)
    rows = np.random.default_rng(0).standard_normal((3, values), dtype=np.float32)
    expected = theirs.fit_transform(rows)
    matrix = projection_matrix(values, components, seed)
    dense = theirs.components_.toarray() if values > 1 else np.asarray(theirs.components_)
    assert np.array_equal(matrix.to_dense().numpy(), dense.astype(np.float32))
    np.testing.assert_allclose(project(torch.from_numpy(rows), matrix).numpy(), expected, rtol=1e-4, atol=1e-5)
    held = sum(part.nbytes for part in (matrix.crow_indices(), matrix.col_indices(), matrix.values()))
    assert matrix_bytes(values, components) == pytest.approx(held, rel=0.15, abs=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_shape_are_flattened_and_computed_in_float32(dtype):
    maps = torch.randn(4, 5, 3, 2).to(dtype)
    matrix = projection_matrix(30, 8, 0)
    projected = project(maps, matrix)
    assert projected.dtype == torch.float32
    torch.testing.assert_close(projected, maps.flatten(1).float() @ matrix.to_dense().T)
    assert project(torch.ones(4), projection_matrix(1, 8, 0)).shape == (4, 8)
    assert project(maps[:0], matrix).shape == (0, 8)
