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

BAD = [
    ("--nodes 4 train.py", "HF101: --image is missing"),
    ("--image x train.py", "HF103: --nodes is missing"),
    ("--image x --nodes 0 train.py", "HF103: --nodes 0: a job needs at least 1 node"),
    ("--image x --nodes 8:4 train.py", "HF103: --nodes 8:4: the minimum 8 is above the maximum 4"),
    ("--image x --nodes four train.py", "HF103: --nodes four: must be a number N or a range MIN:MAX"),
    ("--image x --nodes 99999 train.py", "HF103: --nodes 99999: more than 10000 pods"),
    ("--image x --nodes 2 --nnodes 2 train.py", "HF103: --nodes 2 and --nnodes 2 say the same"),
    ("--image x --nodes 2", "HF101: no training script given"),
    ("--image 'a b' --nodes 2 train.py", "HF101: --image a b: is no image"),
    ("--image x --nodes 2 --name Llama train.py", "HF101: --name Llama: must be lower-case letters"),
    ("--image x --nodes 2 --name 7b train.py", "HF101: --name 7b: must be lower-case letters"),
    ("--image x --nodes 2 --name a_b train.py", "HF101: --name a_b: must be"),
    ("--image x --nodes 2 --name a- train.py", "HF101: --name a-: must be"),
    (f"--image x --nodes 2 --name {'a' * 56} train.py", "56 letters; with what the pods' names add, 55 are the most"),
    (f"--image x --nodes 100 --jobset --name {'a' * 50} train.py", "47 are the most"),
    ("--image x --nodes 2 --namespace Team train.py", "HF101: --namespace Team: must be"),
    ("--image x --nodes 2 --gpus -1 train.py", "HF101: --gpus -1: must be 0 or more"),
    ("--image x --nodes 2 --gpus all train.py", "HF101: --gpus all: not a whole number"),
    ("--image x --nodes 2 --gpu-resource gpu train.py", "HF101: --gpu-resource gpu: must be DOMAIN/NAME"),
    ("--image x --nodes 2 --cpus 0 train.py", "HF101: --cpus 0: must be a number of CPUs"),
    ("--image x --nodes 2 --cpus 4Gi train.py", "HF101: --cpus 4Gi: must be a number of CPUs"),
    ("--image x --nodes 2 --memory 64 train.py", "HF101: --memory 64: means 64 bytes; write the unit, as in 64Gi"),
    ("--image x --nodes 2 --memory 64GB train.py", "HF101: --memory 64GB: must be a size"),
    ("--image x --nodes 2 --shm 0Gi train.py", "HF101: --shm 0Gi: must be more than nothing"),
    ("--image x --nodes 2 --volume data train.py", "HF101: --volume data: must be SOURCE:/PATH"),
    ("--image x --nodes 2 --volume data:mnt train.py", "HF101: --volume data:mnt: must be SOURCE:/PATH"),
    ("--image x --nodes 2 --volume nfs/a:/mnt train.py", "HF101: --volume nfs/a:/mnt: 'nfs/a' must be CLAIM"),
    ("--image x --nodes 2 --env A train.py", "HF101: --env A: has no value; write A=VALUE, or --env-from"),
    ("--image x --nodes 2 --env A=1 --env 2=3 train.py", "HF101: --env 2=3: must be NAME=VALUE"),
    ("--image x --nodes 2 --env HOLDFAST_TOKEN=hush train.py", "HF143: --env HOLDFAST_TOKEN=...: would be"),
    ("--image x --nodes 2 --env-from wandb train.py", "HF101: --env-from wandb: must be secret/NAME"),
    ("--image x --nodes 2 --run-as root train.py", "HF101: --run-as root: must be UID"),
    ("--image x --nodes 2 --run-as 0 train.py", "HF101: --run-as 0: must be UID or UID:GID, numbers, and not root"),
    ("--image x --nodes 2 --label a train.py", "HF101: --label a: must be KEY=VALUE"),
    ("--image x --nodes 2 --label a=b/c train.py", "HF101: --label a=b/c: 'b/c' must be"),
    ("--image x --nodes 2 --retries -1 train.py", "HF101: --retries -1: must be 0 or more"),
    ("--image x --nodes 2 --cwd here train.py", "HF101: --cwd here: must be a whole path"),
    ("--image x --nodes 2 --standalone train.py", "HF101: --standalone: not for --k8s"),
    ("--image x --nodes 2 --node-rank 1 train.py", "HF101: --node-rank 1: not for --k8s"),
    ("--image x --nodes 2 --rdzv-backend etcd train.py", "HF101: --rdzv-backend and --rdzv-endpoint: leave both"),
    ("--image x --nodes 2 --rdzv-conf password=hush train.py", "HF143: --rdzv-conf password=...: would be"),
    ("--image x --nodes 2 --health 0.0.0.0:80 train.py", "HF105: --health 0.0.0.0:80: in a pod it is a port"),
    ("--image x --nodes 2 --metrics x train.py", "HF101: --metrics x:"),
    ("--image x --nodes 2 --drain-timeout 0 train.py", "HF101: --drain-timeout 0.0: must be a positive"),
    ("--image x --nodes 2 --max-restarts two train.py", "HF101: --max-restarts two: not a whole number"),
    ("--image x --nodes 2 --token-secret a --no-token train.py", "HF101: --no-token and --token-secret exclude"),
    ("--image x --nodes 2 --apply --dry-run train.py", "HF101: --apply and --dry-run exclude each other"),
    ("--image x --nodes 2 --replicas 3 train.py", "HF101: --replicas is no option"),
    ("--image Foo --nodes 2 train.py", "HF101: --image Foo: is no image"),
    ("--image a:b:c --nodes 2 train.py", "HF101: --image a:b:c: is no image"),
    ("--image x --nodes 2 --cpus 0.0005 train.py", "HF101: --cpus 0.0005: CPUs are counted in thousandths"),
    ("--image x --nodes 2 --volume d:/dev/shm/ train.py", "HF101: --volume d:/dev/shm: that place is the pods' own"),
    ("--image x --nodes 2 --volume d:/a --volume e:/a/ train.py", "HF101: --volume e:/a: that place is that of d"),
    ("--image x --nodes 2 --volume /a/../b:/c train.py", "a path must not go back by .."),
    ("--image x --nodes 2 --volume d:/ train.py", "would hide everything that is in the image"),
    ("--image x --nodes 2 --env POD_IP=::1 train.py", "HF101: --env POD_IP=...: Kubernetes tells this one"),
    ("--image x --nodes 2 --label app.kubernetes.io/instance=y train.py", "by this one the pods find each other"),
    ("--image x --nodes 2 --health 29400 train.py", "HF105: --health 29400: that port is where the pods meet"),
    ("--image x --nodes 2 --metrics 29400 train.py", "HF105: --metrics 29400: that port is where the pods meet"),
    ("--image x --nodes 2 --retries 9999999999 train.py", "HF101: --retries 9999999999: must be 2147483647 or less"),
    ("--image x --nodes 2 --drain-timeout 1e300 train.py", "longer than Kubernetes can wait"),
    ("--image x --nodes 2 --nproc-per-node 0 train.py", "--nproc-per-node 0: the number of workers must be at least 1"),
    ("--image x --nodes 2 --nproc-per-node cuda train.py", "did you mean gpu?"),
    ("--image x --nodes 2 --tee 9 train.py", "--tee 9: must be 0 (none)"),
    ("--image x --nodes 2 --no-python -m train.py", "HF101: --no-python and --module exclude each other"),
    ("--image x --nodes 2 --preempt-signal SIGTERM train.py", "has a meaning of its own"),
    ("--image x --nodes 2 ''", "HF102: the training script's name is empty"),
    ("--image x --nodes 2 train.py \udcff", "HF101: '\\udcff': not UTF-8, which manifests must be"),
    ("--imag x --nodes 2 --namespce y train.py", "HF101: --namespce is no option; did you mean --namespace?"),
]


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


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_lines_give_one_message_and_no_manifest(line: str, said: str) -> None:
    code, out, err = submit(*shlex.split(line))
    assert (code, out) == (2, "")
    assert said in err
    assert "hush" not in err
    assert err.startswith("holdfast: ")
    assert len(err.splitlines()) <= 2


def test_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train.py"]) == 2
    assert "HF101" in capsys.readouterr().err
    assert main(["submit", "--help"]) == 0
    assert "--k8s" in capsys.readouterr().out


def test_help_lists_every_option() -> None:
    code, out, _ = submit("--help")
    assert code == 0
    for option in OWN:
        assert f"  {option.name} {option.metavar}".rstrip() in out
        assert option.help in out


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
    assert (
        err
        == "holdfast: --env HF_TOKEN=... is in the manifest for everybody to read; --env-from secret/NAME does not\n"
    )


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
    assert second == "holdfast: HF143: kubectl create ended with exit code 1; what it says is above"
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
