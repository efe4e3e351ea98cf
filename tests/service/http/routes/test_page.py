"""The files of the page and of the reference, as they are sent."""

import gzip
import re

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from fxcore import photos
from service import page


def test_every_file_is_sent_as_it_is(client):
    for path, file in page.PATHS.items():
        response = client.get(path)
        assert response.status_code == 200
        assert response.content == file.read_bytes()  # whatever its encoding
        assert response.headers["content-type"].startswith(
            {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}.get(
                file.suffix, "image/jpeg"
            )
        )
    assert client.get("/redoc").content == client.get("/docs").content
    for photo in photos.files():
        assert client.get(f"/page/{photo.name}").content == photo.read_bytes()


def test_browsers_keep_files_until_they_change(client):
    response = client.get("/page/main.js")
    tag = response.headers["etag"]
    assert response.headers["cache-control"] == "no-cache"
    for known in (tag, f'"other", {tag}', "*"):
        again = client.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get("/page/api.js").headers["etag"] != tag


@pytest.mark.parametrize(
    ("accepted", "zipped"), [("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("identity", False)]
)
def test_files_are_compressed_for_those_who_take_that(client, accepted, zipped):
    response = client.get("/page/style.css", headers={"accept-encoding": accepted})
    assert (response.headers.get("content-encoding") == "gzip") == zipped
    assert "accept-encoding" in response.headers["vary"].lower()
    assert "content-encoding" not in client.get("/page/chelsea.jpg").headers


def test_there_is_nothing_else(client):
    for path in ("/page/", "/page/none.js", "/page/__init__.py", "/page/..%2Fapp.py", "/page/%2e%2e/app.py"):
        assert client.get(path).status_code == 404, path


def test_no_file_of_ours_names_another_host():
    for path, file in page.PATHS.items():
        if file.parent == page.PATHS["/"].parent:
            named = re.findall(r"https?://[^\s\"'`)]+", file.read_text())
            assert [url for url in named if url != "http://www.w3.org/2000/svg"] == [], path


def test_the_shell_is_small():
    own = [path for path, file in page.PATHS.items() if file.parent == page.PATHS["/"].parent and "docs" not in path]
    sent = sum(len(gzip.compress(page.PATHS[path].read_bytes())) for path in own)
    assert sent < 110_000


def test_an_application_that_is_mounted_answers_as_at_the_root(client):
    """Errors have the shapes of their routes, and the page its own policy."""
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/below", app=client.app)]))
    mounted = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    for method, path in (
        ("GET", "/"),
        ("GET", "/healthz"),
        ("GET", "/nothing"),
        ("POST", "/v2/models/nothing/infer"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/models/nothing/features"),
    ):
        expected = client.run(client.http.request(method, path))
        found = client.run(mounted.request(method, f"/below{path}"))
        assert found.status_code == expected.status_code
        policy = "content-security-policy"
        assert found.headers[policy] == expected.headers[policy]
        if found.status_code >= 400:
            assert found.json().keys() == expected.json().keys()
