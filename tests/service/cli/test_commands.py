"""The fxserve command: its help, its version, its errors, and keys."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.core
import typer.main

from service.cli import app
from tests.service.cli.running import fails, fxserve


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)


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
    run = python(script)
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
    run = python(script)
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
    run = python(script)
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1] in ("FULL 0 True", "FULL 1 True")


def test_a_command_that_ends_while_a_thread_computes_returns_its_own_status() -> None:
    """As after an interrupt amid a batch, whose thread cannot be stopped."""
    script = """
import sys, threading, torch
sys.argv = ["fxserve", "nodes", "no_such_model"]
from service.cli import main
values = torch.ones(300, 300)
def compute():
    while True:
        values @ values
threading.Thread(target=compute, name="fxserve-cpu", daemon=True).start()
main()
"""
    run = python(script)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("fxserve: there is no model 'no_such_model'")


@pytest.mark.parametrize("amid_import", [True, False])
def test_an_interrupt_ends_a_command_also_amid_an_import_that_ignores_it(amid_import: bool, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("ignored")
""")
    script = f"""
import os, signal, sys
sys.argv = ["fxserve", "key", "alice"]
sys.path.insert(0, {str(tmp_path)!r})
from service.cli import main
from service.http.access import keys
def make(*arguments):
    if {amid_import}:
        import deaf
    else:
        os.kill(os.getpid(), signal.SIGINT)
keys.make = make
main()
"""
    run = python(script)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_an_interrupt_amid_the_import_of_ray_ends_the_command(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "ray.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError
""")
    run = python(f"""
import sys
sys.argv = "fxserve extract photos --model resnet18 --nodes C4 --out out --ray local".split()
sys.path.insert(0, {str(tmp_path)!r})
from service.cli import main
main()
""")
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_an_interrupt_before_a_command_is_parsed_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(typer.core.TyperGroup, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 130


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


EXTRACT = ("extract", "CAT", "--out", "OUT", "--model", "resnet18", "--nodes", "C4", "--device", "cpu")
RANDOM = (*EXTRACT, "--weights", "random")
"""Of options that are given again, the last one counts."""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nodes", "resnet5"], 1, "there is no model 'resnet5'; did you mean resnet50"),
        (["nodes", "resnet18", "--weights", "V9"], 1, "no weights 'V9'; ask for one of DEFAULT, IMAGENET1K_V1"),
        (["graph", "resnet18", "--height", "64"], 2, "--width must be given together (see fxserve graph --help)"),
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
        ([*RANDOM, "--nodes", "layer9"], 1, "no node 'layer9'; did you mean"),
        ([*RANDOM, "--nodes", "a,,b"], 2, "--nodes: '' is not NODE or NODE:KEY"),
        ([*RANDOM, "--nodes", "C4:a,C4:b"], 2, "'C4' is named twice"),
        ([*RANDOM, "--nodes", "layer1.*,C4:a"], 1, "list of names without keys"),
        ([*RANDOM, "--nodes", "C4:a,C5:a"], 1, "the key 'a' is given twice"),
        ([*RANDOM, "--nodes", "C4:__metadata__"], 2, "no output can have the key"),
        ([*RANDOM, "--nodes", "C4:a\x1bb"], 2, "no output can have the key"),
        ([*RANDOM, "--nodes", "C4:path"], 1, "an output cannot be named 'path'"),
        ([*RANDOM, "--out", "CAT"], 1, "cat.jpg is a file; --out must be a folder"),
        ([*RANDOM, "--image-size", "0"], 2, "--image-size: Input"),
        # the cluster may have the device
        ([*RANDOM, "--device=cuda:77", "--ray=x", "--format=npz"], 2, "--ray writes Parquet"),
        ([*RANDOM, "--pool", "cls"], 1, "pool=cls takes"),
        ([*RANDOM, "--pool", "roi"], 2, "--boxes must be given together"),
        ([*RANDOM, "--boxes", "x.csv"], 2, "--boxes must be given together"),
        ([*RANDOM, "--pool", "points"], 2, "--points must be given together"),
        ([*RANDOM, "--masks", "x.csv"], 2, "--masks must be given together"),
        ([*RANDOM, "--reduce", "mean,var"], 2, "one or more of mean"),
        ([*RANDOM, "--reduce", "mean", "--format", "npz"], 2, "leave out --format npz"),
        ([*RANDOM, "--reduce", "top:2", "--project", "9"], 1, "own"),
        (["merge", "GONE", "--out", "OUT"], 1, "gone.jpg holds no spec.json; name folders created by"),
        ([*RANDOM, "--roi-size", "1"], 2, "--roi-size needs --pool roi"),
        ([*RANDOM, "--seed", "0"], 2, "--seed needs --project"),
        ([*RANDOM, "--preprocess", "none", "--fit", "pad"], 2, "does not resize images; leave out --fit pad"),
        ([*RANDOM, "GONE"], 1, "gone.jpg: No such file"),
        ([*RANDOM, "--server", "ftp://x"], 1, "begin with http"),
        ([*RANDOM, "--server", "http://127.0.0.1:9"], 1, "27.0.0.1:9: POST"),
        (EXTRACT, 1, "resnet18-f37072fd.pth is"),
        # before the weights are looked for
        ([*EXTRACT, "--out", "FOLDER"], 1, "is not empty and holds no spec.json"),
        ([*EXTRACT, "--dtype", "bfloat16", "--format", "parquet"], 1, "--format parquet has no bfloat16"),
        ([*EXTRACT, "--precision", "bfloat16", "--format", "npz"], 1, "--format npz has no bfloat16"),
        (["graph", "resnet18", "--height", "0", "--width", "64"], 2, "should be greater than or equal to 1"),
        ([*RANDOM, "--out", ""], 2, "--out must be a folder or a URL, not ''"),
        ([*RANDOM, "--out", "-"], 2, "--out must be a folder or a URL, not '-'"),
        (["graph", "resnet18", "--out", "OUT.png"], 2, "--out: the suffix .png is none of .txt, .py, .dot"),
        pytest.param([*RANDOM, "--model", "r3d_18", "--nodes", "stem"], 1, "r3d", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else None,
)
def test_errors_are_one_line(arguments: Sequence[str], code: int, said: str, files: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    named = {"CAT": files[0], "GONE": tmp_path / "gone.jpg", "FOLDER": tmp_path}
    filled = [str(named.get(a, a)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    result = fxserve(*filled)
    fails(result, code, "")
    assert said in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_key_prints_the_line_for_the_file_and_the_key_apart() -> None:
    result = fxserve("key", "alice", "--scope", "admin")
    secret = result.stderr.split()[0]
    assert result.stdout == f"alice:admin:{hashlib.sha256(secret.encode()).hexdigest()}\n"
    assert fxserve("key", "alice").stdout.startswith("alice:read:")
    assert fxserve("key", "a:b").exit_code == 2
    assert fxserve("key", "alice", "--scope", "write").exit_code == 2


@pytest.mark.parametrize("command", ["extract --nodes C4 --device cpu --out out", "why"])
def test_the_way_without_weights_is_an_option(command: str, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files[0].parent)
    checkpoints = Path(torch.hub.get_dir(), "checkpoints")
    checkpoints.mkdir(parents=True)
    (checkpoints / "resnet18-f37072fd.pth").write_bytes(b"cut short")
    name, *options = command.split()
    done = fxserve(name, files[0], "--model", "resnet18", *options)
    fails(done, 1, "resnet18-f37072fd.pth in ")
    assert done.stderr.endswith("or use --weights random to try without\n")
