"""The line of `holdfast submit --k8s`: what is refused, and what reaches kubectl."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.cli import main
from holdfast.cli.submit_k8s import OWN
from tests.kubernetes.manifests import IMAGE, agent_of, submit, validate
from tests.support.tables import tables

TABLES = tables(__file__)

FAKE = """\
#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    json.dump([sys.argv[1:], sys.stdin.read()], file)
    file.write("\\n")
if os.environ.get("KUBECTL_FAILS"):
    print('Error from server (AlreadyExists): jobs.batch "train" already exists', file=sys.stderr)
    sys.exit(1)
"""

NOT_UTF_8 = ("--image x --nodes 2 train.py \udcff", "HF101: '\\udcff': not UTF-8, which manifests must be")
BAD = TABLES["refused_lines"]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that notes its line and what is piped to it; the file of notes."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    fake = folder / "kubectl"
    fake.write_text(FAKE.format(python=sys.executable, record=str(record)))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return record


@pytest.mark.parametrize(("line", "said"), [*BAD, NOT_UTF_8])
def test_bad_lines_give_one_message_and_no_manifest(line: str, said: str) -> None:
    code, out, err = submit(*shlex.split(line))
    assert (code, out) == (2, "")
    assert said in err
    assert "hush" not in err
    assert err.startswith("holdfast: ")
    assert len(err.splitlines()) <= 2


def test_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train.py"], ["--kubernetes", "--nodes", "2", "train.py"]):
        assert main(["submit", *words]) == 2
        assert "HF101: the first word says where to: holdfast submit --slurm" in capsys.readouterr().err
    assert main(["submit", "--help"]) == 0
    assert "--k8s" in capsys.readouterr().out


def test_help_lists_every_option() -> None:
    code, out, _ = submit("--help")
    assert code == 0
    unwrapped = " ".join(out.split())
    for option in OWN:
        assert f"  {option.name} {option.metavar}".rstrip() in out
        assert option.help in unwrapped


def test_variables_of_this_machine_mean_nothing_to_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    before = submit(*IMAGE, "--nodes", "2", "train.py")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    monkeypatch.setenv("HOLDFAST_TOKEN", "hush")
    monkeypatch.setenv("HOLDFAST_DRAIN_TIMEOUT", "no number")
    assert submit(*IMAGE, "--nodes", "2", "train.py") == before


def test_what_looks_like_a_secret_is_noticed() -> None:
    code, out, err = submit(*IMAGE, "--nodes", "2", "--env", "HF_TOKEN=x", "--env", "TOKENIZERS_PARALLELISM=0", "t.py")
    assert code == 0
    assert "name: HF_TOKEN" in out
    assert err == "holdfast: --env HF_TOKEN=... is readable in the manifest; use --env-from secret/NAME\n"


def test_apply_pipes_everything_to_kubectl_and_nothing_on_its_line(kubectl: Path) -> None:
    for _ in range(2):
        code, out, err = submit(*IMAGE, "--nodes", "2", "--namespace", "team", "--apply", "train.py")
        assert (code, out) == (0, "")
        assert "kubectl logs -n team -l app.kubernetes.io/instance=train" in err
        assert "kubectl delete -n team job,service,secret -l app.kubernetes.io/instance=train" in err
    tokens = set()
    for note in map(json.loads, kubectl.read_text().splitlines()):
        argv, piped = note
        assert argv == ["create", "--request-timeout=60s", "-f", "-"]
        secret, service, job = yaml.safe_load_all(piped)
        for manifest in (secret, service, job):
            validate(manifest, "1.31")
        assert [each["kind"] for each in (secret, service, job)] == ["Secret", "Service", "Job"]
        assert secret["immutable"] is True
        token = secret["stringData"]["token"]
        assert len(token) == 64
        assert piped.count(token) == 1
        assert token not in err
        variables = {each["name"]: each.get("valueFrom") for each in agent_of([job])["env"]}
        assert variables["HOLDFAST_TOKEN"]["secretKeyRef"]["name"] == secret["metadata"]["name"] == "train-token"
        tokens.add(token)
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (("--trainjob",), "trainjob,trainingruntime,secret"),
        (("--jobset",), "jobset,secret"),
        (
            ("--jobset", "--restart-agent", "a:1", "--namespace", "team"),
            "jobset,rolebinding,role,serviceaccount,secret",
        ),
    ],
)
def test_what_was_created_can_be_removed_by_one_line(kubectl: Path, words: tuple[str, ...], kinds: str) -> None:
    code, _, err = submit(*IMAGE, "--nodes", "2", *words, "--apply", "train.py")
    assert code == 0
    assert f" {kinds} -l app.kubernetes.io/instance=train" in err
    (note,) = map(json.loads, kubectl.read_text().splitlines())
    created = [manifest["kind"].lower() for manifest in yaml.safe_load_all(note[1])]
    assert sorted(created) == sorted(kinds.split(",")), "the line names all kinds that were created, and no other"


def test_a_secret_that_is_there_is_not_made_again(kubectl: Path) -> None:
    assert submit(*IMAGE, "--nodes", "2", "--apply", "--token-secret", "mine", "train.py")[0] == 0
    assert "kind: Secret" not in json.loads(kubectl.read_text())[1]


def test_what_kubectl_refuses_is_said_with_its_own_words(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECTL_FAILS", "1")
    assert main(["submit", "--k8s", *IMAGE, "--nodes", "2", "--apply", "train.py"]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert "already exists" in first
    assert second == "holdfast: HF143: kubectl create ended with exit code 1; its message is above"
    assert kubectl.exists()


def test_a_kubectl_that_does_not_run(kubectl: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "kubectl"
    for text, said in (("garbage", "does not run: Exec format error"), ("#!/bin/sh\nkill -9 $$", "ended by signal 9")):
        program.write_text(text)
        code, out, err = submit(*IMAGE, "--nodes", "2", "--apply", "train.py")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_no_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = submit(*IMAGE, "--nodes", "2", "--apply", "train.py")
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: HF117: kubectl is not on PATH")
    assert submit(*IMAGE, "--nodes", "2", "train.py")[0] == 0
