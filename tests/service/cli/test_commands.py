"""The fxserve command: what it prints, what it writes, how it fails, and how it serves."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
import uvicorn
from torchvision.models import list_models
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import get_model, model_graph
from fxcore.rendering.render import render
from service.cli import app
from service.http.server import supervisor
from service.http.server.run import run_workers
from service.settings import SHARED_WEIGHTS, Settings
from tests.service.cli.running import fxserve, rows
from tests.small_disk import small_disk


def test_help_comes_without_importing_anything_heavy() -> None:
    script = """
import sys
sys.argv = ["fxserve", "--help"]
from service.cli import main
try:
    main()
finally:
    print("HEAVY", sorted({"torch", "torchvision", "numpy", "fastapi", "uvicorn", "fxcore"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0
    assert "HEAVY []" in run.stdout
    for command in ("serve", "models", "nodes", "graph", "extract", "why", "key"):
        assert command in run.stdout


def test_usage_errors_of_extract_come_before_torch_is_imported() -> None:
    script = """
import sys
sys.argv = "fxserve extract photos --model resnet18 --nodes C4 --out out --ray local --server http://x".split()
from service.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stdout) == (2, "False\n")
    assert "--ray and --server cannot be combined" in run.stderr


@pytest.mark.exhaustive
def test_torch_is_imported_with_few_full_collections() -> None:
    """Each looks at the million objects that are torch and torchvision; as Python does it by default there are six."""
    script = """
import gc, sys
sys.argv = ["fxserve", "nodes", "alexnet"]
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "start" and info["generation"] == 2 else None)
from service.cli import main
try:
    main()
finally:
    print("FULL", len(full), "torchvision" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0
    count, imported = run.stdout.splitlines()[-1].removeprefix("FULL ").split()
    assert imported == "True"
    assert int(count) <= 1


def test_the_command_alone_prints_its_help() -> None:
    alone = fxserve()
    assert alone.exit_code == 0
    assert alone.stdout.strip() == fxserve("--help").stdout.strip()
    assert "extract" in alone.stdout


def test_version_names_the_libraries_that_decide_the_values() -> None:
    expected = f"fxserve {version('fxserve')} (torch {version('torch')}, torchvision {version('torchvision')})\n"
    assert fxserve("--version").stdout == expected


@pytest.mark.parametrize("command", ["serve", "models", "nodes", "graph", "extract", "merge", "key"])
def test_every_example_in_a_help_is_a_command_that_can_be_typed(command: str) -> None:
    group: Any = typer.main.get_command(app)
    text = group.commands[command].help
    examples = re.findall(rf"^fxserve {command}.*$", text, re.MULTILINE)
    assert examples
    for example in examples:
        group.commands[command].make_context(command, shlex.split(example)[2:])
    assert all(example.split(" --")[0] in fxserve(command, "--help").stdout for example in examples)


def test_the_help_names_what_extract_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = fxserve("extract", "--help").stdout
    assert "parquet and zarr need fxserve[offline]." in shown
    assert "file:NAME in FXSERVE_WEIGHTS_DIR." in shown


def test_models_lists_what_torchvision_lists() -> None:
    result = fxserve("models", "--source", "torchvision")
    assert [row[0] for row in rows(result.stdout, "model")] == list_models()
    resnet50 = next(row for row in rows(result.stdout, "model") if row[0] == "resnet50")
    assert resnet50 == ["resnet50", "classification", "IMAGENET1K_V2", "IMAGENET1K_V1", "25.6 M", "no"]


def test_models_can_be_filtered() -> None:
    found = rows(fxserve("models", "--task", "segmentation", "-q", "ResNet").stdout, "model")
    assert [row[0] for row in found] == ["deeplabv3_resnet101", "deeplabv3_resnet50", "fcn_resnet101", "fcn_resnet50"]
    assert {row[1] for row in found} == {"segmentation"}


def test_models_sees_weights_on_disk() -> None:
    file = get_model("squeezenet1_1").weights_info("DEFAULT").file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"weights")
    assert rows(fxserve("models", "-q", "squeezenet1_1").stdout, "model")[0][-1] == "yes"


def test_nodes_shows_levels_first_and_then_each_node() -> None:
    result = fxserve("nodes", "resnet50")
    assert rows(result.stdout, "level") == [
        [name, level.node, str(level.channels), str(level.stride)]
        for name, level in model_graph("resnet50").levels.items()
    ]
    assert result.stdout.index("C5") < result.stdout.index("layout")
    listed = rows(result.stdout, "node")
    train, eval_ = get_graph_node_names(get_model("resnet50").build_weightless())
    assert [row[0] for row in listed] == eval_
    assert ["layer4.2.relu_2", "Nx2048x7x7", "NCHW", "layer4.2.relu"] in listed
    assert fxserve("nodes", "resnet50", "--train").stdout.split() == train


def test_nodes_shows_which_cannot_be_asked_for() -> None:
    result = fxserve("nodes", "vit_b_16")
    assert "level" not in result.stdout
    listed = rows(result.stdout, "node")
    assert ["encoder.layers.encoder_layer_0.ln", "Nx197x768", "tokens", "encoder.layers.encoder_layer_0.ln_1"] in listed
    assert ["encoder.dim", "-", "-", "dim"] in listed


def test_nodes_lists_untraceable_modules() -> None:
    result = fxserve("nodes", "fasterrcnn_resnet50_fpn")
    assert [row[0] for row in rows(result.stdout, "level")][-2:] == ["P5", "P6"]
    assert "closed: roi_heads: " in result.stdout


@pytest.mark.exhaustive
def test_nodes_of_weights_with_another_structure() -> None:
    assert "cat" in fxserve("nodes", "googlenet").stdout.split()  # its default weights come without auxiliary heads
    assert "cat" not in fxserve("nodes", "googlenet", "--weights", "random").stdout.split()
    result = fxserve("nodes", "vit_h_14", "--weights", "IMAGENET1K_SWAG_E2E_V1")
    assert "Nx3x518x518" in result.stdout


def test_a_pipe_gets_whole_lines_whatever_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stdout = fxserve("nodes", "vit_b_16").stdout
    assert re.search(r"^encoder\.layers\.encoder_layer_11\.self_attention +- ", stdout, re.MULTILINE)
    assert all(line == line.rstrip() for line in stdout.splitlines())


@pytest.mark.parametrize("format", ["table", "code", "dot", "svg", "mermaid"])
def test_graph_prints_each_format(format: str) -> None:
    assert fxserve("graph", "resnet18", "--format", format).stdout == render(model_graph("resnet18"), format)  # type: ignore[arg-type]


def test_graph_as_json_for_a_size() -> None:
    result = fxserve("graph", "resnet18", "--format", "json", "--height", 64, "--width", 96)
    document = json.loads(result.stdout)
    assert document["input_shape"] == [None, 3, 64, 96]
    assert next(n["shape"] for n in document["nodes"] if n["name"] == "layer4.1.relu_1") == [None, 512, 2, 3]


def test_graph_writes_the_format_of_the_suffix(tmp_path: Path) -> None:
    for suffix, start in ((".svg", "<svg"), (".dot", "digraph"), (".json", "{"), (".mmd", "flowchart"), (".py", "def")):
        out = tmp_path / f"graph{suffix}"
        result = fxserve("graph", "resnet18", "--out", out)
        assert result.stdout == f"wrote {out}\n"
        assert out.read_text().startswith(start)
    fxserve("graph", "resnet18", "--out", out, "--format", "dot")
    assert out.read_text().startswith("digraph")


@pytest.mark.parametrize("format", ["dot", "svg", "mermaid"])
def test_graph_draws_modules_of_a_depth_as_one_box(format: str, tmp_path: Path) -> None:
    graph = model_graph("resnet18")
    expected = render(graph, format, 1)  # type: ignore[arg-type]
    assert len(expected) < len(render(graph, format)) / 3  # type: ignore[arg-type]
    assert fxserve("graph", "resnet18", "--format", format, "--depth", 1).stdout == expected
    out = tmp_path / "graph.svg"
    fxserve("graph", "resnet18", "--out", out, "--depth", 2)
    assert out.read_text() == render(graph, "svg", 2)


RANDOM = ("--model", "resnet18", "--weights", "random", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nodes", "resnet5"], 1, "there is no model 'resnet5'; did you mean resnet50"),
        (["nodes", "resnet18", "--weights", "V9"], 1, "no weights 'V9'; ask for one of DEFAULT, IMAGENET1K_V1"),
        (
            ["graph", "resnet18", "--height", "64"],
            2,
            "--height and --width must be given together (see fxserve graph --help)",
        ),
        (["graph", "vit_b_16", "--height", "100", "--width", "100"], 1, "cannot take an input of 100 x 100"),
        (["graph", "resnet18", "--format", "pdf"], 2, "'pdf' is not one of 'json', 'table'"),
        (["graph", "resnet18", "--out", "no/such/folder.svg"], 1, "no/such/folder.svg: No such file or directory"),
        (["graph", "resnet18", "--depth", "1"], 2, "--depth is for drawings (dot, svg, mermaid, layout)"),
        (["graph", "resnet18", "--format", "svg", "--depth", "0"], 2, "Invalid value for '--depth'"),
        (["grph"], 2, "No such command 'grph'. Did you mean 'graph'"),
        (["--verbose"], 2, "No such option: --verbose"),
        (["models", "--task", "poetry"], 2, "Invalid value for '--task': 'poetry' is not one of 'classification'"),
        (["serve", "--port", "70000"], 2, "port: Input should be less than or equal to 65535 (it is 70000)"),
        (["serve", "--device", "toaster"], 2, "device 'toaster' is not supported; use auto, cpu, cuda or cuda:N"),
        (["serve", "--device", "meta"], 2, "device 'meta' is not supported"),
        (["serve", "--device", "cuda:77"], 2, "device 'cuda:77' is not available"),
        (["extract", "CAT", *RANDOM, "--nodes", "layer9", "--out", "OUT"], 1, "no node 'layer9'; did you mean"),
        (["extract", "CAT", *RANDOM, "--nodes", "a,,b", "--out", "OUT"], 2, "--nodes: '' is not NODE or NODE:KEY"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4:a,C4:b", "--out", "OUT"], 2, "'C4' is named twice"),
        (["extract", "CAT", *RANDOM, "--nodes", "layer1.*,C4:a", "--out", "OUT"], 1, "list of names without keys"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4:a,C5:a", "--out", "OUT"], 1, "the key 'a' is given twice"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4:__metadata__", "--out", "OUT"], 2, "no output can have the key"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4:a\x1bb", "--out", "OUT"], 2, "no output can have the key"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4:path", "--out", "OUT"], 1, "an output cannot be named 'path'"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--out", "CAT"], 1, "cat.jpg is a file; --out must be a folder"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--image-size", "0", "--out", "OUT"], 2, "--image-size: Input"),
        (  # the cluster may have the device
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--device=cuda:77", "--ray=x", "--format=npz", "--out", "OUT"],
            2,
            "--ray writes Parquet",
        ),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--pool", "cls", "--out", "OUT"], 1, "pool=cls takes"),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--pool", "roi", "--out", "OUT"],
            2,
            "--boxes must be given together",
        ),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--boxes", "x.csv", "--out", "OUT"],
            2,
            "--boxes must be given together",
        ),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--pool", "points", "--out", "OUT"],
            2,
            "--points must be given together",
        ),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--masks", "x.csv", "--out", "OUT"],
            2,
            "--masks must be given together",
        ),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--reduce", "mean,var", "--out", "OUT"],
            2,
            "one or more of mean",
        ),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--reduce", "mean", "--format", "npz", "--out", "OUT"],
            2,
            "leave out --format npz",
        ),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--reduce", "top:2", "--project", "9", "--out", "OUT"], 1, "own"),
        (["merge", "GONE", "--out", "OUT"], 1, "gone.jpg holds no spec.json; name folders created by"),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--roi-size", "1", "--out", "OUT"],
            2,
            "--roi-size needs --pool roi",
        ),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--seed", "0", "--out", "OUT"], 2, "--seed needs --project"),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--preprocess", "none", "--fit", "pad", "--out", "OUT"],
            2,
            "does not resize images; leave out --fit pad",
        ),
        (["extract", "CAT", "GONE", *RANDOM, "--nodes", "C4", "--out", "OUT"], 1, "gone.jpg: No such file"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--server", "ftp://x", "--out", "OUT"], 1, "begin with http"),
        (
            ["extract", "CAT", *RANDOM, "--nodes", "C4", "--server", "http://127.0.0.1:9", "--out", "OUT"],
            1,
            "27.0.0.1:9: POST",
        ),
        (["extract", "CAT", "--model", "resnet18", "--nodes", "C4", "--out", "OUT"], 1, "resnet18-f37072fd.pth is"),
        *(  # before the weights are looked for
            (["extract", "CAT", "--model", "resnet18", "--nodes", "C4", *options], 1, said)
            for options, said in (
                (["--out", "FOLDER"], "is not empty and holds no spec.json"),
                (["--dtype", "bfloat16", "--format", "parquet", "--out", "OUT"], "--format parquet has no bfloat16"),
                (["--precision", "bfloat16", "--format", "npz", "--out", "OUT"], "--format npz has no bfloat16"),
            )
        ),
        (["graph", "resnet18", "--height", "0", "--width", "64"], 2, "should be greater than or equal to 1"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--out", ""], 2, "--out must be a folder or a URL, not ''"),
        (["extract", "CAT", *RANDOM, "--nodes", "C4", "--out", "-"], 2, "--out must be a folder or a URL, not '-'"),
        (["graph", "resnet18", "--out", "OUT.png"], 2, "--out: the suffix .png is none of .txt, .py, .dot"),
        pytest.param(
            ["extract", "CAT", "--model", "r3d_18", "--weights", "random", "--nodes", "stem", "--out", "OUT"],
            1,
            "r3d",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else None,
)
def test_errors_are_one_line(arguments: list[str], code: int, said: str, files: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    named = {"CAT": files[0], "GONE": tmp_path / "gone.jpg", "FOLDER": tmp_path}
    filled = [str(named.get(a, a)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    result = fxserve(*filled)
    assert result.exit_code == code
    assert result.stderr.startswith("fxserve: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_serve_runs_until_sigterm() -> None:
    environment = {**os.environ, "FXSERVE_MODELS": "resnet18", "FXSERVE_PORT": "1"}
    command = [sys.executable, "-c", "from service.cli import main; main()", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            match = re.fullmatch(
                r"fxserve on (http://127\.0\.0\.1:\d+) \(cpu\): open it in a browser; reference at (\S+), .*\n",
                line,
            )
            assert match is not None, line
            with urllib.request.urlopen(f"{match[1]}/v1/models", timeout=60) as response:
                assert [m["name"] for m in json.load(response)["models"]] == ["resnet18"]
            with urllib.request.urlopen(match[2], timeout=60) as response:
                assert response.status == 200
            server.send_signal(signal.SIGTERM)
            rest, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert (server.returncode, rest, errors) == (0, "", "")


@pytest.fixture
def signals() -> Iterator[None]:
    """Serving in this process sets handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        result = fxserve("graph", "alexnet", "--out", disk.path / "graph.json")
    assert (result.exit_code, result.stderr) == (1, "fxserve: No space left on device\n")


@pytest.mark.usefixtures("signals")
def test_serve_reports_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = fxserve("serve", "--device", "cpu", "--port", taken.getsockname()[1])
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "address already in use" in result.stderr


def test_the_socket_of_several_processes_closes_with_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit takes seconds. Connections accepted meanwhile would be reset."""
    listening: list[socket.socket] = []
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: listening.extend(self.sockets))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv(SHARED_WEIGHTS, "")  # so that it is taken back
    run_workers(Settings(workers=2, port=0, extractors=str(tmp_path)), "cuda")
    assert [each.fileno() for each in listening] == [-1]


@pytest.mark.exhaustive
def test_spawned_processes_say_that_they_live_before_they_import_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that cannot say so is replaced by one that cannot, either: on a busy machine, without end."""
    given: list[uvicorn.Config] = []
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: given.append(self.config))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv(SHARED_WEIGHTS, "")  # so that it is taken back
    run_workers(Settings(workers=2, port=0, extractors=str(tmp_path)), "cuda")
    assert given[0].timeout_worker_healthcheck >= 120
    script = """
import pickle, sys
config = pickle.load(sys.stdin.buffer)
config.configure_logging()
print("torch" in sys.modules, end=" ")
config.load()
print("torch" in sys.modules)
"""
    config = pickle.dumps(given[0])
    child = subprocess.run([sys.executable, "-c", script], input=config, capture_output=True, timeout=120)
    assert child.stdout.decode() == "False True\n", child.stderr


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("workers", [1, 2])
def test_serve_refuses_an_unreadable_key_file(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("nonsense\n")
    monkeypatch.setenv("FXSERVE_API_KEYS_FILE", str(keys))
    done = fxserve("serve", "--port", 18437, "--device", "cpu", "--workers", workers)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"fxserve: {keys}, line 1: not NAME:read:SHA256")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("signals")
def test_serve_warns_of_unknown_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of those that Kubernetes sets, nor of the key that clients send."""
    others = {"FXSERVE_SERVICE_HOST": "10.0.0.1", "FXSERVE_PORT_80_TCP_PORT": "80", "FXSERVE_API_KEY": "k"}
    misspelt = {"FXSERVE_PROT": "9", "FXSERVE_API_KEY_FILE": "keys.txt"}
    missing = {"FXSERVE_API_KEYS_FILE": str(tmp_path / "none")}  # so that it ends before it serves
    for name, value in (others | misspelt | missing).items():
        monkeypatch.setenv(name, value)
    assert fxserve("serve", "--device", "cpu").stderr.splitlines()[:-1] == [
        "fxserve: unknown variable FXSERVE_API_KEY_FILE; did you mean FXSERVE_API_KEYS_FILE?",
        "fxserve: unknown variable FXSERVE_PROT; did you mean FXSERVE_PORT?",
    ]


@pytest.mark.usefixtures("signals")
def test_serve_warns_of_limits_above_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_API_KEYS_FILE", str(tmp_path / "none"))  # so that it ends before it serves
    monkeypatch.setenv("FXSERVE_MAX_INFLIGHT_BYTES", "1")
    monkeypatch.setenv("FXSERVE_MEMORY_BUDGET", str(2**50))
    [warning, _] = fxserve("serve", "--device", "cpu").stderr.splitlines()
    allowed = "FXSERVE_MEMORY_BUDGET and FXSERVE_MAX_INFLIGHT_BYTES allow 1048576.0 GiB"
    assert re.fullmatch(rf"fxserve: {allowed}, but only [\d.]+ GiB are available", warning)


@pytest.mark.usefixtures("signals")
def test_serve_reports_missing_tracing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "service.observability.trac"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setenv("FXSERVE_TRACING", "true")
    done = fxserve("serve", "--port", 18437, "--device", "cpu", "--workers", 2)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("fxserve: FXSERVE_TRACING needs the extra otel: pip install 'fxserve[otel]'")
    assert done.stderr.count("\n") == 1


def test_key_prints_the_line_for_the_file_and_the_key_apart() -> None:
    result = fxserve("key", "alice", "--scope", "admin")
    secret = result.stderr.split()[0]
    assert result.stdout == f"alice:admin:{hashlib.sha256(secret.encode()).hexdigest()}\n"
    assert fxserve("key", "alice").stdout.startswith("alice:read:")
    assert fxserve("key", "a:b").exit_code == 2
    assert fxserve("key", "alice", "--scope", "write").exit_code == 2


def test_check_says_what_will_be_used_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXSERVE_DEVICE", "cpu")
    monkeypatch.setenv("FXSERVE_COMPUTE_THREADS", "3")
    monkeypatch.setenv("FXSERVE_CACHE_DIR", str(tmp_path / "kept"))
    done = fxserve("check")
    assert done.exit_code == 0, done.output
    told = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert told["device"].split()[1:3] == ["cpu", "FXSERVE_DEVICE=cpu;"]
    assert "3 compute" in told["threads"]
    assert "serves first" in told["backend eager"]
    assert "CUDA graphs need a CUDA device" in told["backend cudagraphs"]
    assert f"{tmp_path / 'kept'}" in told["compiled models"]
    assert "writable" in told["compiled models"]
    assert version("torch") in told["versions"]


def test_check_fails_where_the_settings_cannot_be_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXSERVE_WEIGHTS_DIR", str(tmp_path / "missing"))
    done = fxserve("check")
    assert done.exit_code == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("own weights")]
    assert line.endswith("problem")
    monkeypatch.setenv("FXSERVE_DEVICE", "cuda:99")
    done = fxserve("check")
    assert done.exit_code == 1
    assert "cuda:99" in done.stdout
