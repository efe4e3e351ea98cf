"""The wire format of the Open Inference Protocol: any body is parsed or refused."""

import base64
import contextlib
import copy
import json

import numpy as np
import pytest
from hypothesis import given
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


@pytest.mark.parametrize("shape", [[2], [2, 1], [1, 2], [1, 1, 2]])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_images_in_json_are_flat_or_nested(shape, nested, prefix):
    data = np.array([prefix + base64.b64encode(image).decode() for image in (b"one", b"two")])
    image = {"name": "image", "datatype": "BYTES", "shape": shape}
    image["data"] = (data.reshape(shape) if nested else data).tolist()
    body = json.dumps({"inputs": [image]}).encode()
    request = v2.read(v2.Body(bytearray(body), None, "", "application/json"), 10_000, INPUTS)
    assert request.images == [b"one", b"two"]


def test_a_grid_of_images_is_refused():
    image = {"name": "image", "datatype": "BYTES", "shape": [2, 2], "data": [["AAAA", "AAAA"], ["AAAA", "AAAA"]]}
    body = json.dumps({"inputs": [image]}).encode()
    with pytest.raises(Problem, match=r"encoded images must have \[n\]"):
        v2.read(v2.Body(bytearray(body), None, "", "application/json"), 10_000, INPUTS)


ODD = [
    None,
    True,
    -1,
    0,
    3,
    1.5,
    2**70,
    "",
    "x",
    "FP32",
    "BYTES",
    "AAAA",
    [],
    [1],
    [[1, 2], [3]],
    ["AAAA"],
    {},
    {"x": 1},
]
PLACES = [
    ("inputs",),
    ("outputs",),
    ("parameters",),
    ("id",),
    ("inputs", 0),
    ("outputs", 0),
    ("outputs", 0, "parameters"),
]
FIELDS = ("name", "shape", "datatype", "parameters", "data")
DEEPER = [("inputs", 0, "shape", 0), ("inputs", 0, "parameters", "binary_data_size")]
SPOILED = st.sampled_from([*PLACES, *[("inputs", 0, field) for field in FIELDS], *DEEPER])


@given(
    st.lists(st.tuples(SPOILED, st.sampled_from(ODD)), max_size=3),
    st.binary(max_size=40),
    st.sampled_from([None, "0", "5", "right", "-1", "x", "100000"]),
)
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


def test_as_many_images_as_in_other_forms():
    for count, said in ((1024, None), (1025, "has 1025 images; send at most 1024 at a time")):
        image = {"name": "image", "datatype": "BYTES", "shape": [count], "data": ["AAAA"] * count}
        body = v2.Body(bytearray(json.dumps({"inputs": [image]}).encode()), None, "", "application/json")
        if said is None:
            assert len(v2.read(body, 10_000_000, INPUTS).images) == count
        else:
            with pytest.raises(Problem, match=said):
                v2.read(body, 10_000_000, INPUTS)
