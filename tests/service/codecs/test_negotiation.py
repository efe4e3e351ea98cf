import pytest

from service.codecs.negotiation import choose, media_type
from service.problems import Problem

OFFERED = ["application/json", "application/x-safetensors", "image/png"]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("*", "application/json"),
        ("image/png", "image/png"),
        ("Image/PNG", "image/png"),
        ("image/*", "image/png"),
        ("text/html, image/png;q=0.1", "image/png"),
        ("application/json;q=0.2, image/png;q=0.9", "image/png"),
        # The most specific range decides, wherever it stands.
        ("application/json;q=0, */*", "application/x-safetensors"),
        ("*/*;q=0.1, application/x-safetensors", "application/x-safetensors"),
        ("application/*;q=0.5, application/json;q=0.4", "application/x-safetensors"),
        # Browsers.
        ("text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", "application/json"),
        ('application/json;profile="a,b;q=0"', "application/json"),
    ],
)
def test_choose(accept, expected):
    assert choose(accept, OFFERED) == expected


@pytest.mark.parametrize(
    "accept", ["text/html", "image/png;q=0", "application/json;q=x", "garbage", "*/*;q=0", "a/b;q=2", ","]
)
def test_choose_nothing(accept):
    with pytest.raises(Problem) as refusal:
        choose(accept, OFFERED)
    assert refusal.value.slug == "not-acceptable"
    assert refusal.value.extra["available"] == OFFERED


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (None, ("", {})),
        ("image/jpeg", ("image/jpeg", {})),
        ("IMAGE/JPEG ; Charset=utf-8", ("image/jpeg", {"charset": "utf-8"})),
        ('multipart/form-data; boundary="a;b"', ("multipart/form-data", {"boundary": "a;b"})),
        ("multipart/form-data; boundary=AbC", ("multipart/form-data", {"boundary": "AbC"})),
    ],
)
def test_media_type(content_type, expected):
    assert media_type(content_type) == expected
