import json
import logging
import subprocess
import sys

import pytest

from service.observability.logs import JsonLines, TextLines, request_id

FORGED = "cat.jpg\n2026-01-01 00:00:00.000 error fxserve forged\x1b[31m\u2028x"


def record(message="extractor %s failed", *args, error=None, **extra):
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    made = logging.LogRecord("fxserve.engine", logging.WARNING, "f.py", 1, message, args, info)
    made.__dict__.update(extra)
    return made


def test_json_lines_hold_everything():
    token = request_id.set("abc-1")
    try:
        line = JsonLines().format(
            record("extractor %s failed", "ü\n", error=ValueError("why\n"), fields={"status": 500})
        )
    finally:
        request_id.reset(token)
    assert "\n" not in line
    document = json.loads(line)
    assert document["message"] == "extractor ü\n failed"
    assert (document["level"], document["logger"]) == ("warning", "fxserve.engine")
    assert (document["request_id"], document["status"]) == ("abc-1", 500)
    assert "ValueError: why" in document["exception"]
    assert document["time"].endswith("+00:00")
    assert "request_id" not in json.loads(JsonLines().format(record("idle")))


def test_json_takes_what_utf_8_cannot_hold():
    assert json.loads(JsonLines().format(record("%s", "\ud800")))["message"] == "\ud800"


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_what_a_client_sends_cannot_forge_a_line(lines):
    text = lines.format(record("%s", FORGED))
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    text = lines.format(record("%s", FORGED, error=ValueError(FORGED)))
    first, *rest = text.splitlines()
    assert "forged" in first
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in text


def test_text_lines_name_their_request():
    token = request_id.set("abc-1")
    try:
        assert " warning fxserve.engine [abc-1] idle" in TextLines().format(record("idle"))
    finally:
        request_id.reset(token)


@pytest.mark.parametrize("id", ["a] 0 error fxserve [b", 'the "first" one', "a\\"])
def test_a_request_id_cannot_look_like_the_rest_of_its_line(id):
    token = request_id.set(id)
    try:
        line = TextLines().format(record("idle"))
        assert json.loads(JsonLines().format(record("idle")))["request_id"] == id
    finally:
        request_id.reset(token)
    before, quoted = line.split(" [", 1)
    assert before.endswith(" warning fxserve.engine")
    found, end = json.JSONDecoder().raw_decode(quoted)
    assert (found, quoted[end:]) == (id, "] idle")


def test_malformed_bodies_fill_no_log():
    """Their clients are told; python-multipart would write a line for each."""
    code = (
        "import logging.config\n"
        "from service.observability.logs import config\n"
        "logging.config.dictConfig(config('text', 'warning'))\n"
        "from python_multipart.multipart import MultipartParser\n"
        "from python_multipart.exceptions import MultipartParseError\n"
        "try: MultipartParser(b'b').write(b'--c')\n"
        "except MultipartParseError: print('refused')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("refused\n", "")
