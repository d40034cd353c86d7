"""`--rdzv-backend` of an installed package: what is said of a bad one, and real agents that meet by a good one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from holdfast.rendezvous.backends import BACKENDS
from tests.processes.conftest import Agent, JobFolder, is_alive
from tests.support.limits import limit_s, until

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "shared_directory.py"
LOCAL = ("--local-addr", "127.0.0.1")
LEASE_S = min(60, round(limit_s(1)))  # the longest that there is
SHORT = ("--rdzv-conf", f"lease_ttl={LEASE_S},lease={0.75 * LEASE_S:g},settle={0.5 * LEASE_S:g}")

GOOD = """
from holdfast.rendezvous.third_party import Backend, SharedValue

class Value(SharedValue):
    def read(self): return None
    def swap(self, old, new): return True

class Good(Backend):
    conf_keys = ("zone",)
    def open(self, place):
        if place.conf.get("zone") == "moon":
            raise ValueError(f"there is no zone moon at {place.endpoint}")
        if place.conf.get("zone") == "port":
            place.host_and_port(None)
        return Value()
"""


@pytest.fixture
def share(tmp_path: Path, install) -> Path:
    """The example backend, installed, and its directory."""
    install("shared_directory", EXAMPLE.read_text(), directory="shared_directory:DirectoryBackend")
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


def at(share: Path, *more: str) -> list[str]:
    return ["--rdzv-backend", "directory", "--rdzv-endpoint", str(share), "--rdzv-id", "j/1", *LOCAL, *more]


# --- names and packages -----------------------------------------------------------------------------------------------


BAD = [
    ("import no_such_module", "X", "cannot be loaded: ModuleNotFoundError"),
    ("X = 1 / 0", "X", "ZeroDivisionError: division by zero"),
    ("", "Missing", "Missing"),
    ("class X:\n    def __init__(self): raise RuntimeError('no licence')", "X", "RuntimeError: no licence"),
    ("X = 3", "X", "is a int, not a holdfast.rendezvous.third_party.Backend"),
    ("def X(): return None", "X", "is a NoneType, not a"),
    (GOOD + "class X(Good): conf_keys = 'zone'", "X", "conf_keys must be a collection of names"),
    (GOOD + "class X(Good): conf_keys = ['lease_ttl']", "X", "lease_ttl are reserved for holdfast"),
    (GOOD + "class X(Good):\n    def open(self, place): return 7", "X", "must return a SharedValue, not 7"),
    (GOOD + "class X(Good):\n    def open(self, place): return place.x", "X", "failed: AttributeError"),
    ("from holdfast.rendezvous.third_party import Backend\nclass X(Backend): pass", "X", "abstract"),
]
"""What a package says, the object that it offers, and what is said of it."""

WRONG = [
    (["--rdzv-backend=god"], "did you mean good?"),
    (["--rdzv-backend=xyz"], f"known are {', '.join(BACKENDS)}, good"),
    (["--rdzv-backend=good", "--rdzv-conf=zone=moon", "--rdzv-endpoint=e"], "good: there is no zone moon at e"),
    (["--rdzv-backend=good", "--rdzv-conf=zone=port", "--rdzv-endpoint=host"], "names no port"),
    (["--rdzv-backend=good", "--rdzv-conf=lease_ttl=1"], "lease_ttl=1: a lease"),
    (["--rdzv-backend=good", "--rdzv-conf=join_timeout=x"], "not a whole number"),
]
"""What is typed, and what is said of it."""

EACH = """
import contextlib, io, json, sys
import holdfast.cli
told = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = holdfast.cli.main(["run", *line])
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


def each(lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and complaint of each line; all are run in one process."""
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def test_a_bad_package_is_one_line_and_exit_code_2(install) -> None:
    for number, (source, offer, _) in enumerate(BAD):
        install(f"bad{number}", source, **{f"bad{number}": f"bad{number}:{offer}"})
    told = each([[f"--rdzv-backend=bad{number}", "--rdzv-endpoint=x", "train.py"] for number in range(len(BAD))])
    for number, (code, out, err) in enumerate(told):
        assert code == 2, err
        assert BAD[number][2] in err
        assert "Traceback" not in err
        assert err.count("\n") == 1, err
        assert "HF106" in err or "HF122" in err
        assert f"bad{number}" in err
        assert not out


def test_a_package_may_import_what_the_launcher_leaves_out(install) -> None:
    install("good", f"import ssl, typing_extensions\n{GOOD}", good="good:Good")
    ((code, _, err),) = each([["--rdzv-backend=good", "--rdzv-conf=zone=moon", "--rdzv-endpoint=e", "train.py"]])
    assert (code, "there is no zone moon at e" in err) == (2, True), err


def test_what_was_typed_wrong(install) -> None:
    install("good", GOOD, good="good:Good")
    told = each([[*args, "train.py"] for args, _ in WRONG])
    for (_, words), (code, _, err) in zip(WRONG, told, strict=True):
        assert (code, err.count("\n")) == (2, 1), err
        assert words in err


def test_plan_and_notices(run_cli, install, tmp_path: Path) -> None:
    install("good", GOOD, good="good:Good")
    (tmp_path / "train.py").touch()
    conf = "--rdzv-conf=zone=mars,zon=1,join_timeout=7"
    done = run_cli(["--plan", "--rdzv-backend=good", "--rdzv-endpoint=http://x/y", conf, "train.py"], cwd=tmp_path)
    assert done.code == 0, done
    assert "good at http://x/y, waits 7 s for 1" in done.out
    assert "elected through good" in done.out
    assert "zon has no effect with backend good; did you mean zone?" in done.out
    assert "zone has no effect" not in done.out


def test_plan_loads_the_package_too(run_cli, install) -> None:
    install("bad", "X = 1 / 0", bad="bad:X")
    done = run_cli(["--plan", "--rdzv-backend=bad", "train.py"])
    assert (done.code, done.out) == (2, "")
    assert "ZeroDivisionError" in done.err


def test_nobody_takes_the_name_of_a_built_in_one(run_cli, install, tmp_path: Path) -> None:
    install("thief", "raise SystemExit('loaded')", c10d="thief:X", static="thief:X")
    (tmp_path / "train.py").write_text("print('ran')")
    done = run_cli(
        ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--log-dir=/dev/null", "train.py"], cwd=tmp_path
    )
    assert done.code == 0, done
    assert "ran" in done.out


def test_two_packages_with_one_name(run_cli, install) -> None:
    install("one", GOOD, good="one:Good")
    install("two", GOOD, good="two:Good")
    done = run_cli(["--rdzv-backend=good", "train.py"])
    assert done.code == 2
    assert "one:Good of one and two:Good of two; uninstall one of them" in done.err


def test_installed_packages_are_not_looked_at_without_need(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    program = (
        "import sys, holdfast.cli\n"
        "code = holdfast.cli.main(['run', '--plan', '--rdzv-backend=c10d', '--rdzv-endpoint=h:1', 'train.py'])\n"
        "assert code == 0\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "assert 'holdfast.rendezvous.third_party' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=limit_s(60)
    )
    assert done.returncode == 0, done.stderr


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_two_nodes_meet_in_a_directory(job_folder: JobFolder, share: Path) -> None:
    script = job_folder.script("meet()")
    agents = [job_folder.start(*at(share, "--nnodes=2"), script) for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0]
    assert {(note["rank"], note["world"]) for note in job_folder.trail("up")} == {(0, 2), (1, 2)}
    assert [path.name for path in share.iterdir()] == [".lock"], "a job that is over leaves no value"


def test_when_the_node_in_charge_dies_another_takes_over(job_folder: JobFolder, share: Path) -> None:
    script = job_folder.script("meet()\nwhile WORLD == 2: time.sleep(0.05)")
    agents = [job_folder.start(*at(share, "--nnodes=1:2", *SHORT), script) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    chief, other = agents if agents[0].events("elected") else reversed(agents)
    chief.signal(9)
    job_folder.wait(1, "up", world=1)
    assert other.end() == 0
    job_folder.all_gone()


def test_the_node_in_charge_serves_the_metrics_of_the_job(job_folder: JobFolder, share: Path) -> None:
    script = job_folder.script("meet(); hold()")
    agents = [job_folder.start(*at(share, "--nnodes=1:2", "--metrics=0", *SHORT), script) for _ in range(2)]
    job_folder.wait(2, "up", world=2)
    until(lambda: sorted(nodes_in_metrics(agent) for agent in agents) == [0, 2], lambda: agents[0].text)
    chief, other = agents if agents[0].events("elected") else reversed(agents)
    assert (nodes_in_metrics(chief), nodes_in_metrics(other)) == (2, 0)
    chief.signal(9)
    until(lambda: nodes_in_metrics(other) == 1, lambda: other.text)
    other.signal(15)
    other.end()
    job_folder.all_gone()


def nodes_in_metrics(agent: Agent) -> int:
    """The number of the job's nodes in this agent's metrics; 0: it serves none of the job."""
    (serving,) = until(lambda: agent.events("serving"), lambda: agent.text)
    with urllib.request.urlopen(f"http://{serving['address']}/metrics", timeout=limit_s(20)) as answer:
        text = answer.read().decode()
    return sum(int(float(number)) for number in re.findall(r"^holdfast_job_nodes\{.*\} (\S+)$", text, re.MULTILINE))


def test_a_dead_jobs_value_is_taken_after_a_lease(job_folder: JobFolder, share: Path) -> None:
    script = job_folder.script("note('up')\nwhile ROUND == 0 and 'STAY' in os.environ: time.sleep(0.05)")
    first = job_folder.start(*at(share, *SHORT), script, env={"STAY": "1"})
    job_folder.wait(1, "up")
    first.signal(9)
    until(lambda: not is_alive(first.pid), "the agent is gone")
    job_folder.all_gone()
    assert any(share.glob("j*"))
    code, again = job_folder.run(*at(share, *SHORT), script)
    assert code == 0, again.text
    assert again.events("coordinator.started")[0]["generation"] == 2, "numbers only grow, also over a crash"


def test_a_value_that_is_not_ours(job_folder: JobFolder, share: Path) -> None:
    (share / "job.j%2F1").write_text("somebody's")
    code, agent = job_folder.run(*at(share), job_folder.script("note('up')"))
    assert code == 2
    assert "HF122" in agent.text
    assert 'has a value that holdfast did not write: "somebody\'s"' in agent.text
    assert not job_folder.trail("up")


def test_what_it_meets_by_is_away(job_folder: JobFolder, install) -> None:
    """Said while it is waited for, then one message."""
    away = "class Away(Value):\n    def read(self): raise ConnectionRefusedError(111, 'Connection refused')\n"
    install("away", f"{GOOD}\n{away}\nclass X(Good):\n    def open(self, place): return Away()", away="away:X")
    code, agent = job_folder.run(
        "--rdzv-backend=away", *LOCAL, "--rdzv-conf=join_timeout=1", job_folder.script("note('up')")
    )
    assert code == 2
    assert "HF123" in agent.text
    assert "rendezvous backend away: Connection refused (tried for 1 s)" in agent.text
    assert not job_folder.trail("up")
