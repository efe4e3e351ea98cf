"""The README's commands run as they stand, and its tables leave nothing out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from service.app import create_app
from service.cli import app as command_line
from service.settings import Settings
from tests.e2e.conftest import Server

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
SERVICE = (ROOT / "service/README.md").read_text()

# Indented lines are commands; a backslash continues them.
COMMANDS = [re.sub(r"\\\n\s+", "", command) for command in re.findall(r"^    (\S(?:.*\\\n)*.*)$", README, re.MULTILINE)]
CURLS = [command for command in COMMANDS if command.startswith("curl")]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
OUTPUTS = [text for language, text in BLOCKS if not language]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, where the photos are and files may be written."""
    if not (folder / "fxcore").exists():
        (folder / "fxcore").symlink_to(ROOT / "fxcore")
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=environment)


def test_the_readme_has_its_commands() -> None:
    assert "python3 -m venv .venv && .venv/bin/pip install '.[openvino,trained]' && .venv/bin/fxserve serve" in COMMANDS
    assert "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest" in COMMANDS
    assert len(CURLS) == 6


@pytest.mark.parametrize("command", CURLS, ids=lambda command: command[-60:])
def test_curl_lines_work_as_they_stand(command: str, server: Server, tmp_path: Path) -> None:
    done = shell(command.replace("http://127.0.0.1:8000", server.url), tmp_path)
    assert done.returncode == 0, done.stderr
    if "-o" not in shlex.split(command):
        if "index(max" in command:
            assert done.stdout == "285\n"
        elif "shape" in command:
            assert done.stdout == "C4 [1, 112, 14, 14]\nC5 [1, 320, 7, 7]\n"
        else:
            assert done.stdout.startswith('{"model":"resnet50"'), done.stdout[:500]
        return
    written = (tmp_path / shlex.split(command)[-1]).read_bytes()
    if "resnet50/features" in command:
        problem = json.loads(written)  # servers in tests have no network
        assert problem["type"] == "/problems/weights-unavailable"
        assert problem["title"] in README
    elif written.startswith(b"<svg"):
        assert b"layer4.2.relu_2" in written
    else:
        assert written.startswith(b"\x89PNG")


def test_the_python_example_prints_what_the_readme_shows(server: Server, tmp_path: Path) -> None:
    (code,) = [text for language, text in BLOCKS if language == "python"]
    script = tmp_path / "example.py"
    script.write_text(code.replace("http://127.0.0.1:8000", server.url))
    done = shell(f"{shlex.quote(sys.executable)} example.py", tmp_path)
    assert done.stdout in OUTPUTS, done.stderr


@pytest.mark.exhaustive
def test_the_extract_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (command,) = [c for c in COMMANDS if "fxserve extract" in c]
    python = f"{shlex.quote(sys.executable)} -c 'from service.cli import main; main()'"
    done = shell(f"PYTHONPATH={ROOT} " + command.replace(".venv/bin/fxserve", python), tmp_path)
    assert done.stdout in OUTPUTS, done.stderr


def test_every_setting_is_in_the_table() -> None:
    listed = re.findall(r"^\| `FXSERVE_(\w+)` \|", SERVICE, re.MULTILINE)
    assert listed == [name.upper() for name in Settings.model_fields]


def test_settings_read_alike_on_both_pages() -> None:
    rows = re.findall(r"^\| `FXSERVE_\w+` \|.*$", README, re.MULTILINE)
    assert len(rows) == 10
    assert set(rows) <= set(SERVICE.splitlines())


@pytest.mark.parametrize("page", ["README.md", "service/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_endpoint_is_in_the_table() -> None:
    table = README.split("## Endpoints")[1].split("## Settings")[0]
    table = table.replace("`, `…/", "`, `/v1/extractors/{extractor}/")
    for path in create_app(Settings(device="cpu")).openapi()["paths"]:
        assert f"{path}`" in table or path.startswith("/v2"), path


def test_every_command_is_mentioned() -> None:
    assert all(f"fxserve {command.callback.__name__}" in README for command in command_line.registered_commands)  # type: ignore[union-attr]
