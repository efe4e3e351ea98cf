from tests.wire import refused


def test_health_and_readiness(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"ready": True, "reason": "ready"}


def test_not_ready_says_why(make_client):
    client = make_client(preload=["resnet18:no-such-node"])
    response = client.get("/readyz")
    while "no-such-node" not in response.json().get("reason", "failed: no-such-node"):
        response = client.get("/readyz")
    refused(response, "not-ready", status=503)
    assert int(response.headers["retry-after"]) >= 1


def test_a_lost_device_fails_the_liveness_probes(make_client):
    """This application is not in the main thread, so it does not end its process."""
    client = make_client()
    client.app.state.fxserve.engine._worker.lost = "the device worker died of a CUDA error"
    refused(client.get("/healthz"), "not-ready", status=503)
    response = client.get("/v2/health/live")
    error = "the service is not ready: the device worker died of a CUDA error"
    assert (response.status_code, response.json()) == (503, {"error": error})


def test_metrics_by_route_template(client):
    client.get("/v1/models/alexnet/nodes")
    client.get("/v1/models/unheard-of/nodes")
    client.get("/nowhere")
    client.run(client.http.request("BREW", "/nowhere"))
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for method, route, status in (
        ("GET", "/v1/models/{model}/nodes", 200),
        ("GET", "/v1/models/{model}/nodes", 404),
        ("GET", "unmatched", 404),
        ("other", "unmatched", 404),
    ):
        assert f'fxserve_requests_total{{method="{method}",route="{route}",status="{status}"}}' in response.text
    assert (
        'fxserve_request_duration_seconds_bucket{le="0.001",method="GET",route="/v1/models/{model}/nodes"}'
        in response.text
    )
    assert "unheard-of" not in response.text


def test_two_services_do_not_share_metrics(client, make_client):
    client.get("/healthz")
    assert 'route="/healthz"' not in make_client().get("/metrics").text
