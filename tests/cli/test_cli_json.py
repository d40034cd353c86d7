"""Every command has --json, and a schema; what those without a test file of their own print is held against it here. (Others: `checked` in
their tests.) The schema of holdfast.toml is held against the reader of that file."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from holdfast.cli import COMMANDS, JSON_SCHEMA, config, main
from holdfast.cli.config_command import schema
from holdfast.cli.option_table import LAUNCH_OPTIONS
from tests.support.documents import checked
from tests.support.limits import limit_s
from tools import json_schemas

ROOT = Path(__file__).parent.parent.parent


def printed(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> Any:
    assert main([command, *words, "--json"]) == 0
    return checked(command, capsys.readouterr().out)


# --- the schemas ------------------------------------------------------------------------------------------------------


def test_some_test_holds_the_output_of_each_command_against_its_schema() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").glob("*/**/test_*.py")]
    reads = re.compile(r'\b(?:checked|told|printed|holdfast|line_of)\((?:capsys, )?"(\w+)"')
    named = {"launch"}  # as `run`, in the test below
    named |= {name for text in texts for name in reads.findall(text)}
    assert sorted(set(COMMANDS) - named) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_schema_refuses_another_version_and_a_document_without_its_fields(command: str) -> None:
    valid = Draft202012Validator(json_schemas.document(command))
    error = {"code": "HF101", "message": "no", "exit_code": 2}
    assert valid.is_valid({"schema": JSON_SCHEMA, "error": error})
    assert not valid.is_valid({"schema": JSON_SCHEMA + 1, "error": error})
    assert not valid.is_valid({"error": error})
    assert not valid.is_valid({"schema": JSON_SCHEMA})
    assert valid.is_valid({"schema": JSON_SCHEMA, "error": {**error, "new": 1}}), "fields may be added"


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_that_print_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed(capsys, "token")["token"]) == 64
    assert "holdfast" in printed(capsys, "completion", "bash")["script"]
    path = printed(capsys, "shim", str(tmp_path))["path"]
    assert os.access(path, os.X_OK)
    assert set(printed(capsys, "env", "--short")["sections"]["versions"]) >= {"holdfast", "commit", "Python", "kernel"}


@pytest.mark.parametrize("command", ["run", "launch"])
def test_a_plan(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    line = "--plan --json --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a:1 --metrics 0 train.py"
    assert main([command, *line.split()]) == 0
    plan = checked(command, capsys.readouterr().out)
    assert plan["watched"].startswith("metrics at ")
    assert plan["workers"][0]["environment"]["LOCAL_RANK"] == "0"


def line_of(command: str, *words: str) -> Iterator[Any]:
    """The first line of a command that goes on until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", command, *words, "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield {**checked(command, process.stdout.readline()), "started": process.pid}
        process.send_signal(signal.SIGINT)
        assert process.wait(limit_s(30)) in (0, 130)
    finally:
        process.kill()
        process.communicate()


def test_commands_that_serve_print_where() -> None:
    for witness in line_of("witness", "--bind", "127.0.0.1:0"):
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", witness["endpoint"])
        assert witness["pid"] == witness["started"]
    for page in line_of("dashboard", "--no-open"):
        assert page["link"].startswith("http://127.0.0.1:")


def test_an_error_before_the_script_is_json_and_a_word_of_the_script_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["submit", "--slurm", "--json", "--ntasks", "4", "train.py"]) == 2
    assert checked("submit", capsys.readouterr().out)["error"]["code"] == "HF101"
    assert main(["submit", "--slurm", "--dry-run", "train.py", "--json"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")


def test_submit_prints_the_script_the_manifests_and_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["submit", "--slurm", "--dry-run", "--json", "train.py"]) == 0
    assert checked("submit", capsys.readouterr().out)["script"].startswith("#!/bin/bash")

    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 4711\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert main(["submit", "--slurm", "--json", "train.py"]) == 0
    sent = checked("submit", capsys.readouterr().out)
    assert sent == {"job": "4711", "chain": [], "script_file": str(tmp_path / "train.sbatch")}

    kubectl = sbatch.with_name("kubectl")
    kubectl.write_text("#!/bin/sh\ncat > /dev/null\necho job.batch/train created\n")
    kubectl.chmod(0o755)
    for words, created in (([], False), (["--apply"], True)):
        assert main(["submit", "--k8s", "--image", "i", "--nodes", "2", "--json", *words, "train.py"]) == 0
        job = checked("submit", capsys.readouterr().out)
        assert (job["name"], job["created"], [each["kind"] for each in job["manifests"]]) == (
            "train",
            created,
            ["Service", "Job"],
        )


# --- holdfast.toml ----------------------------------------------------------------------------------------------------

SAMPLES = (
    True,
    3,
    -1,
    2.5,
    "",
    "text",
    "3",
    ["a", "b"],
    ["a", 2],
    [2.5],
    [],
    {"a": 1},
    {"a": "b"},
    {"a": [1]},
    {"a": {}},
)
"""Values of each kind that TOML has, but for dates, which JSON has not."""


def is_read(dest: str, value: object) -> bool:
    option = config.OPTIONS_BY_KEY[dest.replace("_", "-")]
    try:
        config.value_of(option, value, "/")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "option", [each for each in LAUNCH_OPTIONS if each.dest not in config.LINE_ONLY], ids=lambda each: each.dest
)
def test_the_schema_of_the_file_takes_what_its_reader_takes(option: Any) -> None:
    valid = Draft202012Validator(schema())
    samples: Sequence[object] = (*SAMPLES, *option.choices)
    for key, value in itertools.product({option.dest, option.name[2:]}, samples):
        assert valid.is_valid({key: value}) == is_read(option.dest, value), f"{key} = {value!r}"


def test_the_schema_of_the_file_refuses_other_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    valid = Draft202012Validator(json.loads(capsys.readouterr().out))
    for key in (*config.LINE_ONLY, "no-such-option", "tool"):
        assert not valid.is_valid({key: "x"}), key
