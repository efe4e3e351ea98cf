"""Bodies in chunks, and large ones, over a socket."""

import threading
import time

import pytest

from tests.wire import JPEG, NPY, close, read, sent


def test_a_body_in_chunks(server, photos, reference):
    photo = photos["chelsea"]
    url = "/v1/models/resnet18/features?weights=random&nodes=C5"
    response = server.http.post(url, content=iter([photo[:1000], photo[1000:]]), headers={**JPEG, "accept": NPY})
    assert response.headers["x-fxserve-weights"] == "random"
    close(read(response), reference("resnet18", "layer4.1.relu_1", [photo]))


def test_other_requests_are_served_while_a_large_response_is_encoded(server, photos):
    url = "/v1/models/resnet18/features?weights=random&nodes=conv1"
    server.http.post(url, **sent(photos["chelsea"]))
    files = [("file", ("a.jpg", photos["chelsea"], "image/jpeg"))] * 8

    def waits():
        """Seconds that each of those others took, and how many the large answer took."""
        responses, waited, started = [], [], time.perf_counter()
        large = threading.Thread(target=lambda: responses.append(server.http.post(url, files=files)))
        large.start()
        while large.is_alive():
            began = time.perf_counter()
            assert server.http.get("/healthz").status_code == 200
            waited.append(time.perf_counter() - began)
            time.sleep(0.02)
        assert len(responses[0].content) > 50_000_000
        return waited, time.perf_counter() - started

    for _ in range(5):  # a busy machine may stand still for a moment, but not each time
        waited, whole = waits()
        if max(waited) < 0.3 * whole:
            return
    pytest.fail(f"waited for {max(waited):.1f} of {whole:.1f} s")
