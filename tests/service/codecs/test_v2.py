"""The wire format of the Open Inference Protocol: any body is parsed or refused."""

import base64
import contextlib
import copy
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.codecs import v2
from service.problems import Problem
from service.schemas.v2 import TensorMetadata

INPUTS = [
    TensorMetadata(name="image", datatype="BYTES", shape=[-1]),
    TensorMetadata(name="x", datatype="FP32", shape=[-1, 3, 4, 4]),
]


def test_an_image_for_a_model_that_takes_none():
    clips = [TensorMetadata(name="x", datatype="FP32", shape=[-1, 3, 2, 4, 4])]
    with pytest.raises(Problem, match="describe this model's inputs in JSON"):
        v2.read(v2.Body(bytearray(4 * 3 * 2 * 4 * 4), None, "", "image/png"), 1000, clips)


def read_images(shape, data):
    image = {"name": "image", "datatype": "BYTES", "shape": shape, "data": data}
    body = json.dumps({"inputs": [image]}).encode()
    return v2.read(v2.Body(bytearray(body), None, "", "application/json"), 1_000_000, INPUTS).images


@pytest.mark.parametrize("shape", [[2], [2, 1], [1, 2], [1, 1, 2]])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_images_in_json_are_flat_or_nested(shape, nested, prefix):
    data = np.array([prefix + base64.b64encode(image).decode() for image in (b"one", b"two")])
    assert read_images(shape, (data.reshape(shape) if nested else data).tolist()) == [b"one", b"two"]


def test_images_of_another_datatype_are_refused():
    image = {"name": "image", "datatype": "UINT8", "shape": [3], "data": [1, 2, 3]}
    body = v2.Body(bytearray(json.dumps({"inputs": [image]}).encode()), None, "", "application/json")
    with pytest.raises(Problem, match=r"^input 'image' must be BYTES \(encoded images\), not 'UINT8'$"):
        v2.read(body, 1000, INPUTS)
    own = TensorMetadata(name="image", datatype="FP32", shape=[-1, 3])  # some models call their tensors so
    for inputs in ([INPUTS[1]], [INPUTS[0], own]):
        assert v2.read(body, 1000, inputs).tensors["image"].tolist() == [1, 2, 3]


def test_a_grid_of_images_is_refused():
    with pytest.raises(Problem, match=r"encoded images must have \[n\]"):
        read_images([2, 2], [["AAAA", "AAAA"]] * 2)


def test_as_many_images_as_in_other_forms():
    assert len(read_images([1024], ["AAAA"] * 1024)) == 1024
    with pytest.raises(Problem, match="has 1025 images; send at most 1024 at a time"):
        read_images([1025], ["AAAA"] * 1025)


NUMBERS = [True, -1, 0, 3, 1.5, 2**70]
ODD = [None, *NUMBERS, "", "x", "FP32", "BYTES", "AAAA", [], [1], [[1, 2], [3]], ["AAAA"], {}, {"x": 1}]
PLACES = [("inputs",), ("outputs",), ("parameters",), ("id",), ("outputs", 0), ("outputs", 0, "parameters")]
OF_AN_INPUT = [(), *[(field,) for field in ("name", "shape", "datatype", "parameters", "data")]]
OF_AN_INPUT += [("shape", 0), ("parameters", "binary_data_size")]
SPOILED = st.sampled_from([*PLACES, *[("inputs", 0, *place) for place in OF_AN_INPUT]])


@given(
    st.lists(st.tuples(SPOILED, st.sampled_from(ODD)), max_size=3),
    st.binary(max_size=40),
    st.sampled_from([None, "0", "5", "right", "-1", "x", "100000"]),
)
@example([(("inputs", 0, "parameters", "binary_data_size"), -1)], b"", "right")
@example([(("inputs", 0, "data"), [1])], b"", "right")
def test_whatever_is_sent_is_parsed_or_refused(changes, tail, header):
    document = {
        "id": "1",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}],
        "outputs": [{"name": "a"}],
    }
    for path, value in changes:
        place = document
        with contextlib.suppress(LookupError, TypeError):
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = copy.deepcopy(value)  # or two of them could hold each other
    head = json.dumps(document).encode()
    body = v2.Body(bytearray(head + tail), str(len(head)) if header == "right" else header, "", "application/json")
    with contextlib.suppress(Problem):
        v2.read(body, 10_000, INPUTS)
