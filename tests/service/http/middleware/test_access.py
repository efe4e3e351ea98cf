"""Who may do what, on every route there is."""

import re

import pytest

from service import page
from service.http.access.keys import make
from service.http.middleware.access import address
from tests.service.conftest import Client
from tests.wire import JPEG, b64, refused, sent

SPEC = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features"]}
FEATURES = "/v1/models/squeezenet1_1/features?weights=random&nodes=features&pool=avg"

# What changes nothing, beside all GETs; the export is a GET that hands out the weights.
READS = {
    ("post", "/v1/models/{model}/features"),
    ("post", "/v1/extractors/{extractor}/features"),
    ("post", "/v1/extractors/{extractor}/attributions"),
    ("post", "/v1/models/{model}/attributions"),
    ("post", "/v1/embeddings"),
    ("post", "/v2/models/{name}/infer"),
    ("post", "/v2/models/{name}/versions/{version}/infer"),
    ("post", "/v2/repository/index"),
}
EXPORT = "/v1/extractors/{extractor}/export"
OPEN = {"/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}


@pytest.fixture(scope="module")
def secrets():
    return {scope: make(scope, scope) for scope in ("read", "admin")}


@pytest.fixture(scope="module")
def locked(secrets, tmp_path_factory):
    """A service with two keys."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(key.line + "\n" for key, _ in secrets.values()))
    client = Client(
        api_keys_file=file,
        models=("squeezenet1_1", "resnet18", "timm.test_vit3"),
        cors_origins=("https://lab.example",),
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def headers(secrets):
    return {scope: {"authorization": f"Bearer {secret}"} for scope, (_, secret) in secrets.items()}


@pytest.fixture(scope="module")
def operations(locked):
    return [(method, path) for path, methods in locked.app.openapi()["paths"].items() for method in methods]


def ask(client, method, path, headers):
    concrete = re.sub(r"\{\w+\}", "nothing", path)
    return client.run(client.http.request(method, concrete, headers=headers))


def test_without_a_key_only_probes_and_the_reference_are_open(locked, operations):
    for method, path in operations:
        response = ask(locked, method, path, {})
        if path in OPEN:
            assert response.status_code == 200
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == 'Bearer realm="fxserve"'
        if path == "/v1/embeddings":
            assert response.json()["error"]["code"] == "invalid_api_key"
        elif path.startswith("/v2"):
            assert response.json().keys() == {"error"}
        else:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["type"] == "/problems/unauthorized"
    for path in ("/nothing", "/v1/nothing", "/docs/", "http://test//healthz", "/healthz/../v1/models"):
        assert locked.get(path).status_code == 401, path
    assert locked.get("/docs").status_code == 200


def test_the_page_and_what_it_loads_are_open(locked):
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path in page.PATHS:
            response = locked.get(path, headers=headers)
            assert response.status_code == 200, path
            assert "resnet18" not in response.text or path.endswith(".js")
    assert locked.get("/page/nothing.js").status_code == 401


@pytest.mark.parametrize(
    "value",
    ["Bearer ", "Bearer wrong", "Basic YTpi", "bearer", "Bearer {read}x", "Bearer {hash}", "{read}", "Bearer é"],
)
def test_a_wrong_key(locked, secrets, value):
    key, secret = secrets["read"]
    sent = value.replace("{read}", secret).replace("{hash}", key.digest.hex()).encode("latin-1")
    response = locked.get("/v1/models", headers={"authorization": sent})
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer ")


def test_a_key_to_read_changes_nothing(locked, operations, headers):
    for method, path in operations:
        response = ask(locked, method, path, headers["read"])
        reads = method == "get" or (method, path) in READS
        assert (response.status_code == 403) == (not reads or path == EXPORT), (method, path, response.text)
        if response.status_code == 403:
            assert 'error="insufficient_scope", scope="admin"' in response.headers["www-authenticate"]
        assert ask(locked, method, path, headers["admin"]).status_code not in (401, 403)


def test_a_head_needs_the_key_that_its_get_needs(locked, headers):
    export = EXPORT.replace("{extractor}", "nothing")
    for path, key, status in (
        ("/healthz", {}, 200),
        ("/v1/models", {}, 401),
        ("/v1/models", headers["read"], 200),
        (export, headers["read"], 403),
        (export, headers["admin"], 404),
    ):
        assert ask(locked, "head", path, key).status_code == status, path


@pytest.mark.exhaustive
def test_a_key_to_read_builds_nothing_on_its_way(locked, headers, photos):
    read, admin = headers["read"], headers["admin"]
    refused(locked.post(FEATURES, **sent(photos["chelsea"], **read)), "forbidden", status=403)
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [""]}]}
    document |= {"parameters": {"weights": "random"}, "outputs": [{"name": "features"}]}
    embeddings = {"model": "squeezenet1_1@random:features", "input": b64(photos["chelsea"])}
    response = locked.post("/v1/embeddings", json=embeddings, headers=read)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
    infer = "/v2/models/squeezenet1_1/infer"
    response = locked.post(infer, json=document, headers=read)
    assert (response.status_code, response.json().keys()) == (403, {"error"})
    assert locked.get("/v1/extractors", headers=admin).json() == {"extractors": []}

    assert locked.post("/v1/extractors", json=SPEC, headers=admin).status_code == 201
    assert locked.post(FEATURES, **sent(photos["chelsea"], **read)).status_code == 200
    assert "image 0" in locked.post(infer, json=document, headers=read).json()["error"]


@pytest.mark.exhaustive
def test_a_key_to_read_has_the_attributions_that_an_admin_had(locked, headers, photos):
    photo, spec = photos["chelsea"], {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["classifier"]}
    made = locked.post("/v1/extractors", json=spec, headers=headers["admin"]).json()["id"]
    url = f"/v1/extractors/{made}/attributions?of=flatten&at=features.5"
    before = locked.get("/v1/extractors", headers=headers["admin"]).json()
    response = locked.post(url, **sent(photo, **headers["read"]))
    refused(response, "forbidden", "sent once with a key with scope admin", status=403)
    assert locked.get("/v1/extractors", headers=headers["admin"]).json() == before
    for key in ("admin", "read"):
        answer = locked.post(url, **sent(photo, **headers[key]))
        assert (answer.status_code, answer.json()["extractor"]) == (200, made), answer.text


def test_tracing_for_a_key_to_read_is_a_look_up(locked, headers, photos):
    """It waits for no builder, and has no more than the places of look-ups: here they have none."""
    image = b64(photos["chelsea"])
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [image]}]}
    requests = [
        ("/v1/models/resnet18/features?weights=random&nodes=avgpool", {"images": [image]}),
        ("/v1/embeddings", {"model": "resnet18@random:avgpool", "input": image}),
        ("/v2/models/resnet18/infer", document),
        ("/v2/models/resnet18/infer", document | {"outputs": [{"name": "avgpool"}]}),
    ]
    lookups = locked.app.state.fxserve.lookups

    def ask_all():
        locked.app.state.fxserve.own_tensors.clear()
        return [locked.post(path, json=body, headers=headers["read"]).status_code for path, body in requests]

    with locked.builders_busy():
        assert ask_all() == [403] * 4
    places, lookups._admission.max_requests = lookups._admission.max_requests, 0
    try:
        assert ask_all() == [429] * 4
    finally:
        lookups._admission.max_requests = places


def test_models_that_are_not_served_are_refused_on_every_route(locked, operations, headers, photos):
    """FXSERVE_MODELS: whatever takes a model's name says that there is none."""
    for method, path in operations:
        if "{model}" not in path and "{name}" not in path:
            continue
        concrete = path.format(model="alexnet", name="alexnet", version="1", image="0" * 16)
        query = {
            "features": {"nodes": "features", "weights": "random"},
            "attributions": {"of": "classifier", "weights": "random"},
            "statistics": {"node": "features", "channel": 0},
        }.get(path.rpartition("/")[2], {})
        image = photos["chelsea"] if method == "post" and not path.endswith("/load") else b""
        options = {"params": query, "content": image, "headers": headers["admin"] | JPEG}
        response = locked.run(locked.http.request(method, concrete, **options))
        assert response.status_code == 404, (path, response.text)
    for config in ('{"model": "alexnet", "weights": "random"}', '{"model": "alexnet", "return_nodes": ["features"]}'):
        body = {"parameters": {"config": config}}
        response = locked.post("/v2/repository/models/mine/load", json=body, headers=headers["admin"])
        assert response.status_code == 404, response.text
    response = locked.post("/v1/extractors", json=SPEC | {"model": "alexnet"}, headers=headers["admin"])
    assert response.json()["type"] == "/problems/unknown-model"
    for path in ("/v1/models", "/v2/repository/index"):
        response = (locked.post if "v2" in path else locked.get)(path, headers=headers["admin"])
        assert "resnet18" in response.text
        assert "alexnet" not in response.text


def test_web_pages_of_listed_origins_only(locked, client):
    ask = {"origin": "https://lab.example"}
    ask["access-control-request-headers"] = "authorization, content-encoding, inference-header-content-length"
    for method in ("GET", "HEAD", "POST", "DELETE"):
        wanted = ask | {"access-control-request-method": method}
        granted = locked.run(locked.http.options("/v1/models", headers=wanted))
        assert granted.status_code == 200
        assert granted.headers["access-control-allow-origin"] == "https://lab.example"
    shown = locked.get("/v1/models", headers={"origin": "https://lab.example"}).headers["access-control-expose-headers"]
    assert {"Inference-Header-Content-Length", "Content-Disposition"} <= set(shown.split(", "))
    other = locked.run(locked.http.options("/v1/models", headers=wanted | {"origin": "https://other.example"}))
    assert "access-control-allow-origin" not in other.headers
    # Without a setting nobody is let in, not even to read.
    response = client.get("/v1/models", headers={"origin": "https://lab.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_page_of_another_origin_cannot_post_blindly(client, locked, headers):
    form = {"origin": "https://other.example", "content-type": "text/plain"}
    index = "/v2/repository/index"
    for fetched_from in ({}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-origin"}):
        for path in ("/v2/repository/models/squeezenet1_1/unload", "/v1/extractors", index, "/nothing"):
            response = client.post(path, headers=form | fetched_from)
            assert (response.status_code, "FXSERVE_CORS_ORIGINS" in response.text) == (403, True)
        assert client.delete("/v1/extractors/nothing", headers=form | fetched_from).status_code == 403
        assert client.get("/v1/models", headers=form | fetched_from).status_code == 200  # a link may lead here
        listed = {**form, **fetched_from, **headers["read"], "origin": "https://lab.example"}
        assert locked.post(index, headers=listed).status_code == 200
    assert client.post(index, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.post(index, headers={"sec-fetch-site": "none"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("LOCALHOST:8000", "http://localhost:8000", True),
        ("fx.local", "https://fx.local", True),  # a proxy took TLS off
        ("fx.local:443", "https://fx.local", True),
        ("fx.local", "http://fx.local:80", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("localhost:8000", "http://localhost:9000", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("fx.local", "http://fx.local.evil.example", False),
        ("localhost", "null", False),
        ("localhost", "", False),
        ("localhost", "http://", False),
        ("localhost", "file://localhost", False),
        ("localhost", "localhost", False),
        ("localhost", "http://localhost, http://evil.example", False),
    ],
)
def test_a_page_of_this_origin_may_post(client, host, origin, allowed):
    response = client.post("/v2/repository/index", headers={"host": host, "origin": origin})
    assert response.status_code == (200 if allowed else 403)


def test_one_of_two_origins_is_not_this_one(client):
    headers = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://localhost")]
    assert client.post("/v2/repository/index", headers=headers).status_code == 403


FOREIGN = ("evil.example", "evil.example:8000", "evil.example.", "127.0.0.1.evil.example", "local.evil.example", "a.b")


def test_names_that_anybody_could_register_are_refused(client, locked, operations, headers):
    for method, path in [*operations, ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nothing")]:
        response = ask(client, method, path, {"host": "evil.example"})
        assert (response.status_code, "FXSERVE_HOSTS" in response.text) == (421, True), path
    for host in (*FOREIGN, "x" * 300 + ".local"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421, host
        # Nobody can have such a name sent along with a key that only clients know.
        assert locked.get("/v1/models", headers={"host": host, **headers["read"]}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "10.1.2.3", "[::1]", "[::1]:8000", "[2001:db8::1]:80"),
        *("localhost", "localhost:8000", "LocalHost.", "fxserve", "fxserve:8000", "lab.localhost", ""),
        *("gpu1.local", "fx.corp.internal", "fx.default.svc", "fx.default.svc.cluster.local:8000"),
    ],
)
def test_unregistrable_host_names_are_accepted(client, host):
    assert client.get("/healthz", headers={"host": host}).status_code == 200


def test_the_servers_own_host_names_are_accepted(make_client, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Machine.example.org")
    client = make_client(hosts="fx.example.com, *.fx.example.com, fx.example.net.", host="127.0.0.1")
    for host in (
        "machine.example.org",
        "fx.example.com:8000",
        "FX.example.com",
        "a.b.fx.example.com",
        "fx.example.net",
    ):
        assert client.get("/healthz", headers={"host": host}).status_code == 200, host
    for host in ("other.example.org", "evilfx.example.com", "fx.example.com.evil.example"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421, host


def test_nothing_is_redirected(client):
    for path in ("/v1/models/", "/healthz/", "/v2/", "/docs/"):
        response = client.get(path)
        assert response.status_code == 404
        assert "no path here ends in /" in response.text


def test_every_response_has_a_content_security_policy(client):
    for path in ("/v1/models", "/nothing", "/v1/models/squeezenet1_1/graph?format=svg", "/metrics"):
        response = client.get(path)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"].startswith("default-src 'none';")
        assert "script-src" not in response.headers["content-security-policy"]
        assert response.headers["x-frame-options"] == "DENY"


def test_the_pages_run_scripts_of_this_server_only(client):
    for path in page.PATHS:
        response = client.get(path)
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert response.headers["x-frame-options"] == "DENY"
    for path in ("/", "/docs"):
        text = client.get(path).text
        assert not re.search(r"<script>|<style>| style=|\son\w+=", text)


def test_one_client_is_one_network():
    assert address({"client": ("10.0.0.1", 1)}) == "10.0.0.1"
    assert address({"client": ("2001:db8::1", 1)}) == address({"client": ("2001:db8::ffff:2", 9)})
    assert address({"client": ("2001:db8::1", 1)}) != address({"client": ("2001:db8:0:1::1", 1)})
    assert address({"client": ("::ffff:10.0.0.1", 1)}) != address({"client": ("::ffff:10.0.0.2", 1)})
    assert address({"client": None}) == address({}) == ""


@pytest.mark.exhaustive
def test_a_read_key_embeds_by_a_named_extractor_that_attention_pools(locked, headers, photos):
    """It is another node that is computed then, which nobody has made."""
    spec = {"model": "timm.test_vit3", "weights": "random", "return_nodes": ["norm"], "name": "tokens"}
    assert locked.post("/v1/extractors?wait=60", json=spec, headers=headers["admin"]).status_code == 201
    asked = {"model": "tokens", "input": b64(photos["chelsea"])}
    embedded = locked.post("/v1/embeddings", json=asked, headers=headers["read"])
    assert embedded.status_code == 200, embedded.text
    assert len(embedded.json()["data"][0]["embedding"]) == 96
