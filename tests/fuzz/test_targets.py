"""Each target over its seeds, damaged at random, and over bytes of any kind."""

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.fuzz.targets import TARGETS


@st.composite
def damaged(draw, seeds):
    """A seed of which some bytes were replaced, cut out, put in or repeated."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 8))
        put = draw(st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 4, bytes(8), b"9" * 20, b"[" * 50])))
        data[place : place + length] = put * draw(st.sampled_from([1, 1, 1, 100]))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_any_kind(name):
    target, make_seeds = TARGETS[name]
    seeds = make_seeds()
    for seed in seeds:
        target(seed)

    @hypothesis.settings(max_examples=80, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.one_of(damaged(seeds), damaged(seeds), st.binary(max_size=200)))
    def check(data):
        target(data)

    check()
