"""Where bodies are parsed."""

from __future__ import annotations

import pytest

from service.codecs.requests import bodies


@pytest.mark.parametrize(("megabytes", "small"), [(0.5, True), (2, False)])
def test_a_large_image_is_joined_off_the_event_loop(megabytes: float, small: bool) -> None:
    chunks = [bytes([number]) * 65536 for number in range(int(megabytes * 16))]
    assert bodies.is_small("image/jpeg", chunks) == small
    assert bodies.parse(chunks, "image/jpeg", "x").inputs == [b"".join(chunks)]
