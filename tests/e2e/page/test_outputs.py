"""What the page says of a node's output, and the request for it."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from tests.e2e.page.seen import CHELSEA, asked, shown, shown_channels


@pytest.mark.exhaustive
def test_the_copied_request_names_the_file_as_it_was_chosen(open_server, visit, tmp_path):
    name = "IMG 2041 (my cat's).jpg"
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.4")
    shown_channels(page)
    file = tmp_path / name
    file.write_bytes(CHELSEA.read_bytes())
    page.set_input_files("input[type=file]", file)
    shown(page, "features.4", name)
    command = page.locator(".request code").inner_text()
    assert f"@{name}" in shlex.split(command)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    maps = asked(open_server, "squeezenet1_1", "features.4", "DEFAULT")
    found = safetensors.numpy.load_file(tmp_path / "features.4.safetensors")["features.4"]
    np.testing.assert_allclose(found, maps, atol=1e-5)
    page.get_by_role("button", name="Python").click()
    program = page.locator(".request code").inner_text()
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == f"{maps.shape} float32\n"
