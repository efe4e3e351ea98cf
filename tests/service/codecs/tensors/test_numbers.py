"""Long arrays of numbers, against the standard library's JSON."""

import json

import numpy as np
import pytest

from service.codecs.tensors.numbers import Document
from service.problems import Problem


def test_long_arrays_are_read_as_a_json_parser_reads_them():
    values = np.random.default_rng(0).normal(size=(3, 50, 41)).astype(np.float32) * 1e3
    for indent in (None, 1):
        text = bytearray(json.dumps({"a": values.tolist(), "b": [1, 2], "c": "[1,2" * 3000}, indent=indent), "ascii")
        document = Document(text, len(text))
        assert not isinstance(document.value["a"], list)
        assert document.value["b"] == [1, 2]
        assert document.value["c"] == "[1,2" * 3000
        assert np.array_equal(document.numbers(document.value["a"], values.size, "FP32", "a"), values.ravel())
        with pytest.raises(Problem, match="needs 6151 values"):
            document.numbers(document.value["a"], values.size + 1, "FP32", "a")
        with pytest.raises(Problem, match="has more"):
            document.numbers(document.value["a"], values.size - 1, "FP32", "a")


@pytest.mark.parametrize("spoiled", ["1 2", "1,,2", "[1]2", "--1", "1e", "[]", "01"])
def test_long_arrays_that_are_no_numbers(spoiled):
    text = bytearray(b'{"a":[' + b"1," * 4000 + spoiled.encode() + b"]}")
    document = Document(text, len(text))
    with pytest.raises(Problem):
        document.numbers(document.value["a"], 4001, "FP32", "a")


@pytest.mark.parametrize(("datatype", "largest"), [("FP16", 65504.0), ("FP32", float(np.finfo(np.float32).max))])
@pytest.mark.parametrize("count", [1, 4000])
def test_numbers_of_more_than_the_datatype_are_refused(datatype, largest, count):
    def read(last):
        text = bytearray(b'{"a":[' + b"1," * count + last.encode() + b"]}")
        document = Document(text, len(text))
        return document.numbers(document.value["a"], count + 1, datatype, "a")[-1]

    assert read(repr(largest)) == largest
    for beyond in (repr(-2 * largest), str(2 * int(largest))):
        with pytest.raises(Problem, match=f"^a: its data has values that {datatype} cannot hold$"):
            read(beyond)
