"""What the page says of a node's output: its shape, its cost, its largest values, and the request for it."""

import base64
import io

import numpy as np
import pytest
import safetensors.numpy
import torchvision

from fxcore import photos
from tests.e2e.page.seen import BLOCK, CHELSEA, TILES, VIT, asked, run_curl, run_python, shown, until

DETECTOR = "fasterrcnn_mobilenet_v3_large_320_fpn"
TIMES = " \N{MULTIPLICATION SIGN} "


@pytest.mark.exhaustive
def test_the_largest_values_of_a_vector_are_in_order_with_bars_from_zero(open_server, visit):
    page = visit(open_server.url).go()
    rows = """async (values) => {
        const { reduce } = await import("/page/reductions.js")
        const { valuesView } = await import("/page/statistics.js")
        const bytes = new TextEncoder().encode(JSON.stringify(
          { v: { dtype: "F32", shape: [1, values.length], data_offsets: [0, 4 * values.length] } }).padEnd(96))
        const buffer = new ArrayBuffer(8 + bytes.length + 4 * values.length)
        new DataView(buffer).setBigUint64(0, BigInt(bytes.length), true)
        new Uint8Array(buffer, 8).set(bytes)
        new Float32Array(buffer, 8 + bytes.length).set(values)
        await reduce("open", { slot: "test", key: "v", layout: null, tokens: null, buffer }, { transfer: [buffer] })
        const view = await valuesView({ slot: "test", shape: [1, values.length] })
        return [...view.querySelectorAll("li")].map((row) => {
          const bar = row.querySelector("rect")
          return [...row.querySelectorAll("span")].map((span) => Number(span.textContent))
            .concat(["x", "width"].map((name) => Number(bar.getAttribute(name))))
        })
    }"""
    # A class's number, its value, where its bar begins and how long it is, of a hundred from -692 to 508.
    assert page.evaluate(rows, [-692, 508, 0, -92]) == [
        [1, 508, pytest.approx(100 * 692 / 1200), pytest.approx(100 * 508 / 1200)],
        [2, 0, pytest.approx(100 * 692 / 1200), 0],
        [3, -92, 50, pytest.approx(100 * 92 / 1200)],
        [0, -692, 0, pytest.approx(100 * 692 / 1200)],
    ]
    page = visit(open_server.url).go("m=resnet18&n=fc")
    page.get_by_text("Largest values").wait_for()
    values = asked(open_server, "resnet18", "fc", "random")[0]
    said = [int(row.split()[0]) for row in page.locator(".bars li").all_inner_texts()]
    assert said == np.argsort(-values, kind="stable")[:12].tolist()


@pytest.mark.exhaustive
def test_values_of_which_none_is_finite_have_no_least_and_no_largest(open_server, visit):
    page = visit(open_server.url).go()
    terms = """async (values) => {
        const { statistics } = await import("/page/maps.js")
        const { statisticsView } = await import("/page/statistics.js")
        const view = statisticsView(statistics(new Float32Array(values)), "All values")
        const shown = [...view.querySelectorAll("dd")].map((term) => term.textContent)
        return [...shown, view.querySelectorAll("svg").length]
    }"""
    assert page.evaluate(terms, [float("nan"), float("inf")]) == ["none", "none", "none", "none", "0.0 %", "2", 0]
    assert page.evaluate(terms, [1, float("inf")])[:2] == ["1", "1"]


@pytest.mark.exhaustive
def test_the_heading_gives_the_shape_of_the_output_and_says_what_flops_are_for(open_server, visit):
    page = visit(open_server.url).go(f"m={DETECTOR}&w=random&n=P5")
    page.wait_for_selector(TILES)
    shape = asked(open_server, DETECTOR, "P5", "random").shape
    facts = page.locator(".features .pane-head .dim").all_inner_texts()
    assert TIMES.join(map(str, shape)) in facts[0]
    detail = open_server.http.get(f"/v1/models/{DETECTOR}").json()
    size = TIMES.join(map(str, detail["inputs"][0]["shape"][1:]))
    assert f"N{TIMES}{size}," in facts[1]


@pytest.mark.exhaustive
def test_tiles_have_the_aspect_of_their_maps(open_server, visit):
    page = visit(open_server.url).go(f"m={DETECTOR}&w=random&n=P5")
    page.wait_for_selector(TILES)
    tall, wide = asked(open_server, DETECTOR, "P5", "random").shape[2:]
    assert tall != wide
    box = page.locator(f"{TILES} canvas").first.bounding_box()
    assert box["width"] / box["height"] == pytest.approx(wide / tall, rel=0.03)


@pytest.mark.exhaustive
def test_flops_that_are_not_counted_are_not_called_zero(open_server, visit):
    page = visit(open_server.url).go("m=vit_b_16&w=random&n=encoder.ln")
    shown(page, "encoder.ln")
    facts = page.locator(".features .pane-head")
    size = torchvision.models.vit_b_16().encoder.ln.weight.numel() * 2
    assert f"FLOPs not counted, {size / 1e3:.2f} k parameters" in facts.inner_text()
    page.get_by_role("button", name="Parts of encoder", exact=True).wait_for()
    page.goto(f"{open_server.url}/#m=resnet18&n=conv1")
    until(page, "document.querySelector('.node')?.textContent === 'conv1'")
    # A convolution's multiply-adds, counted twice.
    assert f"{2 * 64 * 3 * 7 * 7 * 112 * 112 / 1e6:.0f} MFLOPs" in facts.inner_text()
    assert "two FLOPs" in facts.locator("[title]").first.get_attribute("title")


@pytest.mark.exhaustive
def test_the_request_is_changed_and_gives_what_it_says(open_server, visit, tmp_path):
    page = visit(open_server.url).go("m=resnet18&n=C4&v=mean")
    page.locator(".stage").wait_for()
    page.get_by_text("Change what is asked for").click()
    page.get_by_label("Pool", exact=True).select_option("avg")
    page.get_by_label("Type", exact=True).select_option("float16")
    page.locator(".request .pill", has_text="C3").click()
    assert f"C4: 1{TIMES}256; C3: 1{TIMES}128; 768 B" in page.locator(".request").inner_text()
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "resnet18.safetensors")
    for key, size in (("C4", 256), ("C3", 128)):
        means = asked(open_server, "resnet18", key, "random").mean(axis=(2, 3))
        assert found[key].dtype == np.float16
        assert found[key].shape == (1, size)
        np.testing.assert_allclose(found[key], means, rtol=2e-3, atol=1e-3)
    page.get_by_role("button", name="Python").click()
    printed = run_python(page.locator(".request code").inner_text(), tmp_path)
    assert printed == "C4 (1, 256) float16\nC3 (1, 128) float16\n"


@pytest.mark.exhaustive
def test_the_values_of_each_of_two_vectors_are_shown(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=fc&p2=coffee")
    page.get_by_text("Largest values: coffee.jpg, fc").wait_for()
    edit = '[{"node":"layer4","scale":0.5}]'
    photo = base64.b64encode(CHELSEA.read_bytes()).decode()
    body = {"images": [photo], "edits": [{"node": "layer4", "scale": 0.5}]}
    edited = open_server.http.post("/v1/models/resnet18/features?nodes=fc&weights=random", json=body).json()
    other = asked(open_server, "resnet18", "fc", "random", photos.files()[2].read_bytes())[0]
    first = asked(open_server, "resnet18", "fc", "random")[0]

    def check(*values):
        page.wait_for_selector(".bars >> nth=1")
        for bars, wanted in zip(page.locator(".bars").all(), values, strict=True):
            rows = [row.split() for row in bars.locator("li").all_inner_texts()]
            order = np.argsort(-wanted, kind="stable")[:12]
            assert [int(row[0]) for row in rows] == order.tolist()
            assert [float(row[1]) for row in rows] == pytest.approx(wanted[order], rel=1e-3)

    check(first, other)
    page.goto(f"{open_server.url}/#m=resnet18&n=fc&e={edit}")
    page.get_by_text("Largest values: chelsea.jpg, fc, edited").wait_for()
    check(first, np.array(edited["outputs"][0]["data"]))


@pytest.mark.exhaustive
def test_the_request_for_a_pooled_video_gives_the_shape_that_it_says(open_server, visit):
    page = visit(open_server.url).go("m=r3d_18&n=C4&w=random")
    page.get_by_text("Change what is asked for").click()
    page.get_by_label("Pool", exact=True).select_option("avg")
    video = io.BytesIO()
    np.save(video, np.random.default_rng(0).random((1, 3, 16, 112, 112), dtype=np.float32))
    response = open_server.http.post(
        "/v1/models/r3d_18/features?nodes=C4&weights=random&pool=avg",
        content=video.getvalue(),
        headers={"accept": "application/x-safetensors", "content-type": "application/x-npy"},
    )
    pooled = safetensors.numpy.load(response.content)["C4"]
    size = f"{pooled.nbytes / 1000:.3g} kB"
    page.get_by_text(f"For one input: C4: {TIMES.join(map(str, pooled.shape))}; {size}").wait_for()


@pytest.mark.exhaustive
def test_only_what_the_server_gives_is_asked_for(start, visit):
    server = start(models=f"{VIT},resnet18,quantized_resnet18")
    page = visit(server.url).go(f"m={VIT}&w=random&n={BLOCK}&v=mean")
    page.locator(".stage").wait_for()
    page.get_by_text("Change what is asked for").click()
    code = page.locator(".request code")
    page.get_by_label("Arithmetic", exact=True).select_option("float16")
    page.get_by_label("Pool", exact=True).select_option("cls")
    assert "&pool=cls" in code.inner_text()
    assert "&precision=float16" in code.inner_text()
    for model, weights, node in (
        ("resnet18", "random", "C4"),
        ("quantized_resnet18", "IMAGENET1K_FBGEMM_V1", "layer3"),
        (VIT, "random", "head"),
    ):
        page.goto(f"{server.url}/#m={model}&w={weights}&n={node}")
        page.get_by_text(f"For one photo: {node}: 1").wait_for()
        assert page.get_by_label("Pool", exact=True).locator("option[value=cls]").is_disabled()
        assert "pool" not in code.inner_text()
        precisions = server.http.get(f"/v1/models/{model}", params={"weights": weights}).json()["precisions"]
        for option in page.get_by_label("Arithmetic", exact=True).locator("option").all()[1:]:
            precision = precisions[option.get_attribute("value")]
            assert option.is_disabled() == (not precision["backends"])
            assert not option.is_disabled() or option.get_attribute("title") == precision["note"]
        assert ("precision=float16" in code.inner_text()) == bool(precisions["float16"]["backends"])
    assert not server.http.get("/v1/models/quantized_resnet18").json()["precisions"]["float16"]["backends"]
    refused = server.http.post(
        f"/v1/models/{VIT}/features?nodes=head&weights=random&pool=cls",
        content=CHELSEA.read_bytes(),
        headers={"content-type": "image/jpeg"},
    )
    assert refused.status_code == 422
    npy = page.get_by_role("button", name="Download npy")
    assert npy.is_enabled()
    page.get_by_label("Type", exact=True).select_option("bfloat16")  # which npy does not have
    assert npy.is_disabled()
