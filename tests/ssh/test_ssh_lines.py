"""From a command line to what every host is told; nothing is started."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.grammar import parse
from holdfast.cli.hosts import make_spec, read_hosts
from holdfast.cli.option_table import LAUNCH_OPTIONS, OPTIONS
from holdfast.launchers.ssh.hosts import LaunchSpec
from holdfast.launchers.ssh.session import client_line
from holdfast.protocol.errors import ScriptError, UsageError
from tests.support.tables import tables

TABLES = tables(__file__)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    (tmp_path / "train.py").write_text("print()\n")
    return tmp_path


def order(line: str, **environ: str) -> LaunchSpec:
    parsed = parse(shlex.split(line), environ, OPTIONS)
    return make_spec(parsed, "run", read_hosts(parsed), environ)[0]


def words(line: str, number: int = 0, **environ: str) -> list[str]:
    made = order(line, **environ)
    return made.line(made.hosts[number], number, "10.0.0.1:5")


def test_what_each_host_is_told() -> None:
    line = "--hosts a:8,b --rdzv-id x --nproc-per-node 2 --max-restarts 3 -t 3 train.py --lr 3 -- z"
    rest = ["--", "train.py", "--lr", "3", "--", "z"]
    common = ["--nnodes=2:2", "--rdzv-id=x", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:5"]
    assert words(line, 0) == [
        *("run", "--max-restarts=3", "--tee=3", *common, "--node-rank=0", "--nproc-per-node=8", *rest)
    ]
    # What the second is told of itself stands in the middle: it is given by the user and not by us.
    assert words(line, 1)[1:3] == ["--nproc-per-node=2", "--max-restarts=3"]
    assert words(line, 1)[-7:] == ["--node-rank=1", *rest]


def test_variables_become_flags_and_no_host_starts_hosts_of_its_own() -> None:
    environ = {"HOLDFAST_HOSTS": "a,b", "PET_MAX_RESTARTS": "4", "HOLDFAST_GROW": "never", "HOLDFAST_OWN": "1"}
    made = order("train.py", **environ)
    told = made.line(made.hosts[0], 0, "e:1")
    assert "--max-restarts=4" in told
    assert "--grow=never" in told
    assert not any("hosts" in word for word in told)
    assert made.environ.keys() == {"HOLDFAST_OWN", "HOLDFAST_TOKEN"}


def test_what_an_agent_reads_is_what_was_said(folder: Path) -> None:
    (folder / "pkg").mkdir()
    line = "--hosts a --duplicate-stdout-filters x,,y,z --tee 1 --role 'a b' --monitor-interval 1e-3 -m pkg.mod --m 3"
    told = parse(words(line)[1:], {}, OPTIONS).values
    assert told.duplicate_stdout_filters == ["x,y", "z"]
    assert (told.role, told.monitor_interval, told.module) == ("a b", 0.001, True)
    assert (told.training_script, told.training_script_args) == ("pkg.mod", ["--m", "3"])
    assert told.standalone


def test_a_job_of_one_host_meets_nobody() -> None:
    assert "--standalone" in words("--hosts a:2 train.py")
    assert order("--hosts a train.py").alone
    assert not order("--hosts a --rdzv-endpoint h:1 --nnodes 1:1 train.py").alone


def test_the_legacy_command_keeps_its_argument() -> None:
    parsed = parse(shlex.split("--hosts a,b --use-env train.py"), {}, LAUNCH_OPTIONS)
    made, options = make_spec(parsed, "launch", read_hosts(parsed), {})
    told = made.line(made.hosts[0], 0, "e:1")
    assert (told[0], "--use-env" in told) == ("launch", True)
    assert not options.command.local_rank_argument


def test_numbers_of_nodes() -> None:
    assert (order("--hosts a,b,c train.py").min_nodes, order("--hosts a,b,c train.py").max_nodes) == (3, 3)
    ranged = order("--hosts a,b,c --nnodes 2:9 train.py")
    assert (ranged.min_nodes, ranged.max_nodes) == (2, 3)


def test_what_goes_along_of_the_environment() -> None:
    environ = {"NCCL_DEBUG": "1", "HOME": "/h", "PATH": "/b", "MINE": "2", "MINE_TOO": "3", "PYTHONPATH": "p"}
    assert order("--hosts a train.py", **environ).environ.keys() == {"NCCL_DEBUG", "PYTHONPATH", "HOLDFAST_TOKEN"}
    wished = order("--hosts a --env 'MINE*' --env PATH train.py", **environ).environ
    assert wished.keys() == {"NCCL_DEBUG", "PYTHONPATH", "HOLDFAST_TOKEN", "MINE", "MINE_TOO", "PATH"}


def test_every_run_has_a_token_of_its_own_unless_there_is_one() -> None:
    first, second = (order("--hosts a --rdzv-id x train.py") for _ in range(2))
    assert first.environ["HOLDFAST_TOKEN"] != second.environ["HOLDFAST_TOKEN"]
    assert first.lock != second.lock
    given = [order("--hosts a --rdzv-id x train.py", HOLDFAST_TOKEN="mine") for _ in range(2)]
    assert given[0].environ["HOLDFAST_TOKEN"] == "mine"
    assert given[0].lock != given[1].lock  # two jobs of one name leave each other's agents alone
    words_of_all = [*first.line(first.hosts[0], 0, "e:1")]
    assert not any(first.environ["HOLDFAST_TOKEN"] in word for word in words_of_all)


def test_with_a_folder_of_their_own_the_script_need_not_be_here(tmp_path: Path) -> None:
    made = order("--hosts a --cwd /somewhere/else other.py")
    assert (made.expected.cwd, made.expected.path, made.expected.script) == ("/somewhere/else", "other.py", "")
    assert made.line(made.hosts[0], 0, "")[-1] == "other.py"
    here = order(f"--hosts a --cwd {tmp_path} train.py").expected
    assert here.script
    assert here.interpreter == sys.executable


def test_a_program_is_looked_for_where_the_hosts_will_run_it(tmp_path: Path) -> None:
    """And not in this folder or on this PATH, which the hosts may not have."""
    for line in ("--cwd /somewhere/else --no-python ./prog", "--no-python only-there", "--no-python only-there a b"):
        made = order(f"--hosts a {line}")
        assert made.expected.path in ("./prog", "only-there")
    (tmp_path / "prog").write_text("echo hello\n")
    with pytest.raises(ScriptError, match="is not executable"):
        words(f"--hosts a --cwd {tmp_path} --no-python ./prog")
    with pytest.raises(ScriptError, match="does not exist"):
        words("--hosts a --no-python ./nowhere")


@pytest.mark.parametrize("there", ["--cwd /somewhere/else", "--python /other/bin/python"])
def test_a_module_of_another_folder_or_another_python_need_not_be_here(there: str) -> None:
    assert words(f"--hosts a {there} -m nowhere.here")[-2:] == ["--", "nowhere.here"]
    with pytest.raises(ScriptError, match="no module named 'nowhere'"):
        words("--hosts a -m nowhere.here")


def test_what_only_the_hosts_have_need_not_be_here() -> None:
    line = "--hosts a:4000,b --health-command 'dcgmi diag' --notify 'send-mail x' --log-dir /proc/runs train.py"
    parsed = parse(shlex.split(line), {}, OPTIONS)
    made, options = make_spec(parsed, "run", read_hosts(parsed), {"PYTHON_EXEC": "/nowhere/python"})
    told = made.line(made.hosts[0], 0, "e:1")
    assert {"--health-command=dcgmi diag", "--notify=send-mail x", "--log-dir=/proc/runs"} <= set(told)
    assert made.environ["PYTHON_EXEC"] == "/nowhere/python"
    assert not options.notices, "4,000 workers may not be too many there"


def test_another_python_on_the_hosts() -> None:
    made = order("--hosts a,b --python ~/v/bin/python train.py".replace("~", "'~'"), VIRTUAL_ENV="/here")
    assert (made.expected.interpreter, made.expected.python, made.expected.torch) == ("~/v/bin/python", "", "")
    assert "VIRTUAL_ENV" not in made.environ
    assert not any("python" in word for word in made.line(made.hosts[0], 0, "e:1"))
    assert client_line(made.hosts[0], made.expected.interpreter, 9, "x")[-1].startswith("exec ~/v/bin/python -c ")
    assert "exec ~/'a b/python' -c" in client_line(made.hosts[0], "~/a b/python", 9, "x")[-1]


def test_a_hostfile_with_the_mark_of_windows(folder: Path) -> None:
    (folder / "hosts").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb\r\n")
    assert [(each.name, each.slots) for each in order("--hostfile hosts train.py").hosts] == [("a", 2), ("b", None)]


BAD = TABLES["refused_lines"]


@pytest.mark.parametrize(("line", "code", "said"), BAD)
def test_bad_lines(line: str, code: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").write_text("# nobody\n")
    assert main(["run", *shlex.split(line)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"holdfast: {code}: ")
    assert said in told
    assert told.count("\n") == 1


def test_a_plan_starts_nothing_and_tells_no_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "hush")
    texts = []
    for _ in range(2):
        assert main(["run", "--plan", "--hosts", "a:2,b", "train.py"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "hush" not in texts[0]
    assert "a:2, b" in texts[0]
    assert "NCCL_DEBUG" in texts[0]
    assert "holdfast run --nnodes=2:2 --rdzv-id=<random>" in texts[0].replace("'", "")


def test_a_plan_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--hosts a,b --rdzv-backend etcd --rdzv-endpoint e:2379 --rdzv-conf password=hush,user=u"
    assert main(["run", "--plan", *line.split(), "train.py"]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    assert "password=***,user=u" in text


def test_the_ssh_command_may_have_options_of_its_own() -> None:
    made = order("--hosts a,b --ssh 'sh -p 2222 -i \"my key\"' train.py")
    line = client_line(made.hosts[0], "python3", 9, "x", made.ssh)
    assert line[:6] == ["sh", "-p", "2222", "-i", "my key", "-T"]
    assert client_line(made.hosts[0], "python3", 9, "x")[0] == "ssh"
    for bad in ("''", "no-such-ssh", '"ssh \'x"'):
        with pytest.raises(UsageError, match="--ssh"):
            order(f"--hosts a,b --ssh {bad} train.py")
