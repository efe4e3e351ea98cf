import base64
import json

import numpy as np
import pytest
import torch

from service.codecs.tensors import json as codec
from service.schemas.v1.features import FeatureTensor


def written(outputs, encoding="json"):
    parts = codec.write({"model": "m", "images": 2}, {key: f"node.{key}" for key in outputs}, outputs, encoding)
    return json.loads(b"".join(parts))


def test_document():
    outputs = {"b": torch.tensor([[1.5, -2.0]]), "a": torch.tensor([[3]])}
    assert written(outputs) == {
        "model": "m",
        "images": 2,
        "outputs": [
            {"name": "b", "node": "node.b", "shape": [1, 2], "datatype": "FP32", "data": [1.5, -2.0]},
            {"name": "a", "node": "node.a", "shape": [1, 1], "datatype": "INT64", "data": [3]},
        ],
    }


# Sizes around the step that numbers are written in, and one over that of base64.
@pytest.mark.parametrize("count", [0, 1, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 200_003])
@pytest.mark.parametrize("encoding", ["json", "base64"])
def test_every_float32_survives(count, encoding):
    values = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.nan_to_num(values, 0.0, 1.0, -1.0)
    [output] = written({"a": values}, encoding)["outputs"]
    data = output["data"]
    read = (
        np.frombuffer(base64.b64decode(data, validate=True), "<f4") if encoding == "base64" else np.array(data, "<f4")
    )
    np.testing.assert_array_equal(read.view("<i4"), values.view(torch.int32).numpy())


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "FP16"),
        (torch.bfloat16, "BF16"),
        (torch.float64, "FP64"),
        (torch.uint8, "UINT8"),
        (torch.bool, "BOOL"),
    ],
)
def test_other_dtypes(dtype, name):
    values = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)
    [numbers] = written({"a": values})["outputs"]
    [encoded] = written({"a": values}, "base64")["outputs"]
    assert numbers["datatype"] == encoded["datatype"] == name
    assert numbers["data"] == [0, 1, 1, 0]
    read = torch.frombuffer(bytearray(base64.b64decode(encoded["data"])), dtype=dtype)
    assert torch.equal(read.reshape(2, 2), values)


def test_what_json_has_no_number_for_is_null():
    [output] = written({"a": torch.tensor([float("nan"), float("inf"), 1.0])})["outputs"]
    assert output["data"] == FeatureTensor(**output).data == [None, None, 1.0]
