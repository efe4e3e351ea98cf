"""Parsing of long arrays of numbers in JSON, in steps.

A JSON parser holds the GIL and creates an object for every number: an image as JSON blocks everything else for tens of
milliseconds and takes eight times its size in memory. Long arrays are therefore cut out of the text first, and read
piece by piece into their tensor. ijson, which reads number by number, takes about twice as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from service.codecs.tensors.datatypes import NUMPY_DTYPES
from service.problems import BadTensor, InvalidRequest, Problem

_MARK = "\0numbers"
_LONG = 4096
_STEP = 32 * 1024
_MAX_VALUES = 100_000
_OTHER = re.compile(rb"[^-+.0-9eE,\s\[\]]")
_AS_SPACE = bytes.maketrans(b"[]", b"  ")


class Document:
    """A parsed JSON text whose long arrays of numbers are still text.

    Args:
        body: bytes that begin with the text, in UTF-8.
        length: length of the text.

    Attributes:
        value: the parsed text. Long arrays are placeholders, which :meth:`numbers` reads.

    Raises:
        Problem: 422: it is not JSON, or has more than 100,000 values outside of its long arrays.
    """

    def __init__(self, body: bytearray, length: int) -> None:
        self._body = body
        self._cut: list[tuple[int, int]] = []
        rest = b"".join(self._without_long_arrays(body, length))
        # Each of these begins a value, which takes far more memory than its text.
        if sum(rest.count(sign) for sign in (b",", b"[", b"{")) > _MAX_VALUES:
            raise _too_many_values()
        try:
            self.value: Any = orjson.loads(rest)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"the body is not JSON: {error.msg}") from error

    def numbers(self, data: Any, count: int, datatype: str, where: str) -> NDArray[Any]:
        """Return the ``count`` values of a ``data`` field, flat, as the numpy dtype of ``datatype``.

        Raises:
            Problem: 422: a value is not a number of this type, or there are too many or too few.
        """
        dtype = NUMPY_DTYPES[datatype]
        index = data.get(_MARK) if isinstance(data, dict) else None
        if type(index) is not int or index not in range(len(self._cut)):
            values = flat(data)
            if len(values) != count:
                raise _miscounted(where, count, len(values))
            return _converted(values, dtype, datatype, where)
        start, end = self._cut[index]
        if count > end - start:  # a number has at least one character: never allocate by the shape alone
            raise _miscounted(where, count, "fewer")
        array = np.empty(count, dtype)
        filled = 0
        for piece in _pieces(self._body, start, end, where):
            if filled + len(piece) > count:
                raise _miscounted(where, count, "more")
            array[filled : filled + len(piece)] = _converted(piece, dtype, datatype, where)
            filled += len(piece)
        if filled < count:
            raise _miscounted(where, count, filled)
        return array

    def _without_long_arrays(self, body: bytearray, length: int) -> Iterator[memoryview | bytes]:
        view = memoryview(body)
        done = 0
        end = 0
        for _ in range(_MAX_VALUES):
            start = body.find(b"[", end, length)
            if start < 0:
                yield view[done:length]
                return
            end = _end_of_run(body, start, length)
            bracket = body.rfind(b"]", start, end)
            if bracket - start < _LONG:
                continue
            end = bracket + 1
            yield view[done:start]
            # Inside a string this makes the JSON invalid, because the placeholder has quotes.
            yield orjson.dumps({_MARK: len(self._cut)})
            self._cut.append((start, end))
            done = end
        raise _too_many_values()


def _end_of_run(body: bytearray, start: int, length: int) -> int:
    """Return the end of the run of characters that can be part of an array of numbers."""
    while start < length:
        other = _OTHER.search(body, start, min(start + _STEP, length))
        if other is not None:
            return other.start()
        start += _STEP
    return length


def _pieces(body: bytearray, start: int, end: int, where: str) -> Iterator[list[Any]]:
    """Yield the numbers of a long array, some thousands at a time, ignoring their nesting."""
    while start < end:
        comma = body.find(b",", min(start + _STEP, end), end)
        stop = end if comma < 0 else comma
        try:
            yield orjson.loads(b"[" + body[start:stop].translate(_AS_SPACE) + b"]")
        except orjson.JSONDecodeError as error:
            raise BadTensor(f"{where}: its data is not an array of numbers") from error
        start = stop + 1


def flat(data: Any) -> list[Any]:
    """List the elements of nested lists, in order; anything that is not a list is one element."""
    if not isinstance(data, list):
        return [data]
    values: list[Any] = []
    waiting = [iter(data)]
    while waiting:
        for value in waiting[-1]:
            if isinstance(value, list):
                waiting.append(iter(value))
                break
            values.append(value)
        else:
            waiting.pop()
    return values


def _converted(values: list[Any], dtype: np.dtype[Any], datatype: str, where: str) -> NDArray[Any]:
    allowed = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
    if set(map(type, values)) - allowed:
        raise BadTensor(f"{where}: its data is not all {datatype} values")
    try:
        with np.errstate(over="raise"):  # a number beyond the dtype's largest would become infinity
            return np.array(values, dtype)
    except (ArithmeticError, ValueError) as error:
        raise BadTensor(f"{where}: its data has values that {datatype} cannot hold") from error


def _miscounted(where: str, count: int, found: int | str) -> Problem:
    return BadTensor(f"{where}: its shape needs {count} values, but its data has {found}")


def _too_many_values() -> Problem:
    return InvalidRequest(f"the JSON has more than {_MAX_VALUES:,} values besides its arrays of numbers")
