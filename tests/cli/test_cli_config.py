"""holdfast.toml and [tool.holdfast]: which file counts, what its values mean, what wins, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import config, main
from holdfast.cli.config import FILE_BYTES_MAX, LINE_ONLY, OPTIONS_BY_KEY, read_file, settings
from holdfast.cli.grammar import FROM_DEFAULT, FROM_FLAG, Parsed, parse
from holdfast.cli.option_table import LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.protocol.errors import ConfigFileError, HoldfastError, UsageError
from tests.support.documents import checked
from tests.support.limits import limit_s
from tests.support.second_user import OTHER_UID, needs_root


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository; the working folder is a folder in it."""
    work = tmp_path / "repository" / "a" / "b"
    work.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (work / "train.py").touch()
    monkeypatch.chdir(work)
    for name in [name for name in os.environ if name.startswith(("PET_", "HOLDFAST_")) and name != "HOLDFAST_TEST_ID"]:
        monkeypatch.delenv(name)
    return tmp_path / "repository"


def parsed(*line: str, environ: dict[str, str] | None = None) -> Parsed:
    return parse([*line, "train.py"], environ or {}, OPTIONS, configure=config.configure)


def own(text: str, folder: Path | None = None) -> Path:
    path = (folder or Path.cwd()) / "holdfast.toml"
    path.write_text(text)
    return path


# --- which file -------------------------------------------------------------------------------------------------------


def test_without_a_file_all_is_as_ever() -> None:
    assert parsed() == parse(["train.py"], {}, OPTIONS)


def test_the_nearest_file_up_to_the_repositorys_root(site: Path) -> None:
    own("max-restarts = 9", site.parent)
    assert parsed().values.max_restarts == 0, "beyond the root"
    (site / "pyproject.toml").write_text("[tool.holdfast]\nmax-restarts = 1\n")
    assert parsed().values.max_restarts == 1
    (site / "a" / "pyproject.toml").write_text("[tool.black]\nmax-restarts = 2\n[project]\nname = 'holdfast'\n")
    assert parsed().values.max_restarts == 1, "not about us"
    own("max-restarts = 3", site / "a")
    assert parsed().values.max_restarts == 3
    Path("pyproject.toml").write_text("[tool.holdfast]\nmax-restarts = 4\n")
    got = parsed()
    assert (got.values.max_restarts, got.sources["max_restarts"]) == (4, "pyproject.toml:2")
    own("max-restarts = 5")
    assert parsed().values.max_restarts == 5, "our own file comes first in a folder"
    own("")
    assert parsed().values.max_restarts == 0, "an empty one ends the search"


@pytest.mark.parametrize(
    "text",
    [
        "[tool.holdfast]\ngrow = 'now'",
        "[ tool . 'holdfast' ]\ngrow = 'now'",
        "[tool]\nholdfast.grow = 'now'",
        "tool.holdfast = {grow = 'now'}",
        "[tool]\nholdfast = {grow = 'now'}",
    ],
)
def test_every_spelling_of_the_table(text: str) -> None:
    Path("pyproject.toml").write_text(text)
    assert parsed().values.grow == "now"


def test_what_others_put_where_everybody_may_write_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    shared.chmod(0o1777)
    own("max-restarts = 6", shared)
    monkeypatch.chdir(shared / "mine")
    assert parsed().values.max_restarts == 0
    monkeypatch.chdir(shared)
    assert parsed().values.max_restarts == 6, "one's own, in the working folder"
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(os, "stat", stat_of_another(os.stat))
    assert parsed().values.max_restarts == 0


# --- whose it is ------------------------------------------------------------------------------------------------------

COMMANDS = {
    "notify": "notify = 'touch /tmp/x'",
    "ssh": "ssh = 'sh -c true'",
    "python": "python = '/opt/other/python'",
    "host-discovery": "host-discovery = '/opt/other/hosts'",
    "preload": "preload = 'antigravity'",
    "hosts": "hosts = 'elsewhere'",
    "hostfile": "hostfile = 'hosts'",
    "cwd": "cwd = '/opt/other'",
    "env": "env = 'SECRET_*'",
    "no-python": "no-python = true",
    "rdzv-endpoint": "rdzv-endpoint = 'elsewhere:29400'",
    "master-addr": "master-addr = 'elsewhere'",
    "otel": "otel = 'http://elsewhere:4318'",
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"drain-timeout = 1{'0' * 400}", "too large a number"),
        (f"max-restarts = 1{'0' * 30}", "too large a number"),
        (f"max-restarts = 1{'0' * 5000}", "is not TOML: Exceeds the limit"),
        (f"hosts = {'[' * 3000}{']' * 3000}", "is not TOML: it is nested too deeply"),
    ],
)
def test_numbers_and_nesting_without_an_end_are_refused(text: str, said: str) -> None:
    own(text)
    with pytest.raises(ConfigFileError, match=said):
        parsed()


@needs_root
@pytest.mark.parametrize("key", COMMANDS)
def test_a_found_file_of_another_user_runs_nothing(key: str) -> None:
    file = own(COMMANDS[key])
    os.chown(file, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigFileError) as raised:
        parsed()
    assert str(raised.value) == (
        f"holdfast.toml:1: {key} decides what runs, and its owner, {config.user_name(OTHER_UID)}, can change this file; "
        "--config holdfast.toml uses it, --no-config does not"
    )
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert parsed("--no-config").values
    assert parsed("--config", "holdfast.toml").sources[key.replace("-", "_")] == "holdfast.toml:1", "it was named"


@needs_root
def test_a_found_pyproject_and_a_file_further_up_are_judged_alike(site: Path) -> None:
    (site / "pyproject.toml").write_text("[tool.holdfast]\nnotify = 'touch x'\n")
    assert parsed().values.notify
    os.chown(site / "pyproject.toml", OTHER_UID, 0)
    with pytest.raises(ConfigFileError, match="decides what runs"):
        parsed()


@needs_root
def test_a_file_of_another_user_that_runs_nothing_is_used() -> None:
    """As in the folder of a project that one person looks after."""
    os.chown(own("nnodes = 4\npreload = 'auto'\nno-python = false"), OTHER_UID, OTHER_UID)
    assert parsed().values.nnodes == "4"


@pytest.mark.parametrize(
    ("mode", "group", "refused"),
    [(0o644, 0, ""), (0o666, 0, "every user"), (0o664, 12345, "group 12345"), (0o664, os.getegid(), "")],
)
@needs_root
def test_a_found_file_that_others_can_write_runs_nothing(mode: int, group: int, refused: str) -> None:
    """A group that has only this user is no other: many systems give everybody such a group, and a umask of 002."""
    file = own("notify = 'touch x'")
    file.chmod(mode)
    os.chown(file, -1, group)
    if not refused:
        assert parsed().values.notify
        return
    with pytest.raises(ConfigFileError, match=f"{refused} can change this file"):
        parsed()


@needs_root
def test_root_by_sudo_uses_the_files_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(own("notify = 'touch x'"), OTHER_UID, OTHER_UID)
    monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
    assert parsed().values.notify


@needs_root
def test_the_owner_is_that_of_the_bytes_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user puts their file in the place of ours after a look at it."""
    file = own("notify = 'touch x'")
    (theirs := file.with_name("theirs")).write_text("notify = 'rm x'")
    os.chown(theirs, OTHER_UID, OTHER_UID)
    looks = config.is_world_writable

    def exchange(folder: str) -> bool:
        if theirs.exists():
            theirs.rename(file)
        return looks(folder)

    monkeypatch.setattr(config, "is_world_writable", exchange)
    with pytest.raises(ConfigFileError, match="decides what runs"):
        parsed()


def test_every_option_with_a_command_is_known_to_run_something() -> None:
    commands = {option.dest for option in OPTIONS if {"COMMAND", "PROGRAM", "PATH", "MODULE"} & set(words_of(option))}
    assert commands == {"notify", "health_command", "host_discovery", "ssh", "python", "preload"}
    assert commands <= config.DECIDE_WHAT_RUNS <= {option.dest for option in OPTIONS}


def words_of(option: Option) -> list[str]:
    return re.findall(r"[A-Z]+", option.metavar)


def stat_of_another(real: Any) -> Any:
    """os.stat for which files belong to user 4343."""

    def look(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        fields = list(real(path, *args, **kwargs))
        fields[4] = 4343
        return os.stat_result(fields)

    return look


def test_a_file_that_is_named_and_none_at_all(site: Path) -> None:
    own("max-restarts = 1")
    named = site / "other.toml"
    named.write_text("max-restarts = 2")
    project = site / "pyproject.toml"
    project.write_text("[tool.holdfast]\nmax-restarts = 3")
    assert parsed("--config", str(named)).sources["max_restarts"] == f"{named}:1"
    assert parsed("--config", str(project)).values.max_restarts == 3
    assert parsed(environ={"HOLDFAST_CONFIG": str(named)}).values.max_restarts == 2
    assert parsed("--no-config").values.max_restarts == 0
    assert parsed(environ={"HOLDFAST_NO_CONFIG": "1"}).values.max_restarts == 0
    with pytest.raises(UsageError, match="exclude each other"):
        parsed("--config", str(named), "--no-config")
    assert parsed("--no-config", environ={"HOLDFAST_CONFIG": str(named)}).values.max_restarts == 0
    assert parsed("--config", str(named), environ={"HOLDFAST_NO_CONFIG": "1"}).values.max_restarts == 2
    with pytest.raises(ConfigFileError, match=r"nowhere.toml: No such file"):
        parsed("--config", "nowhere.toml")
    project.write_text("[project]\nname = 'x'")
    with pytest.raises(ConfigFileError, match=r"has no table \[tool.holdfast\]"):
        parsed("--config", str(project))


# --- the user's file --------------------------------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "holdfast"
    folder.mkdir(parents=True)
    return folder


def test_the_order_is_line_variable_project_user(user: Path) -> None:
    path = own("max-restarts = 1\nhang-timeout = 1\nmin-ranks = 1\nrole = 'user'", user)
    assert parsed().sources["role"] == f"{path}:4"
    own("max-restarts = 2\nhang-timeout = 2\nmin-ranks = 2")
    found = parsed("--max-restarts", "4", environ={"HOLDFAST_HANG_TIMEOUT": "3"})
    values = found.values
    assert (values.max_restarts, values.hang_timeout, values.min_ranks, values.role) == (4, 3.0, 2, "user")
    assert found.sources["min_ranks"] == "holdfast.toml:3"


def test_a_named_file_stands_for_the_projects_and_no_config_reads_neither(user: Path, site: Path) -> None:
    own("role = 'user'\nmax-restarts = 1", user)
    own("max-restarts = 2")
    named = site / "other.toml"
    named.write_text("min-ranks = 3")
    found = parsed("--config", str(named)).values
    assert (found.role, found.max_restarts, found.min_ranks) == ("user", 1, 3)
    assert parsed("--no-config") == parse(["--no-config", "train.py"], {}, OPTIONS)


def test_where_the_users_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home/.config", "elsewhere"):
        (tmp_path / name / "holdfast").mkdir(parents=True)
        own(f"role = {name[:4]!r}", tmp_path / name / "holdfast")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    assert parsed().values.role == "else"
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert parsed().values.role == "home"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert parsed().values.role == "home"
    monkeypatch.chdir(tmp_path / "home" / ".config" / "holdfast")  # it is the nearest file, too: it is read once
    assert parsed().sources["role"] == "holdfast.toml:1"


@needs_root
def test_a_users_file_that_others_can_change_runs_nothing(user: Path) -> None:
    path = own("notify = 'sh -c true'", user)
    os.chown(path, OTHER_UID, -1)
    with pytest.raises(ConfigFileError, match="notify decides what runs"):
        parsed()


def test_show_tells_files_values_and_sources(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own("role = 'mine'\nrdzv-conf = 'password=secret'", user)
    path.chmod(0o600)
    own("max-restarts = 2")
    assert main(["config", "show", "--nnodes", "1:2", "train.py", "--role", "the script's"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"configuration files: holdfast.toml, then {path}\n")
    assert "secret" not in text
    assert main(["config", "show", "--json", "--nnodes", "1:2"]) == 0
    told = checked("config", capsys.readouterr().out)
    assert told["files"] == [str(Path.cwd() / "holdfast.toml"), str(path)]
    rows = {each["name"]: (each["value"], each["source"]) for each in told["options"]}
    assert rows["--nnodes"] == ("1:2", "command line")
    assert rows["--max-restarts"] == ("2", "holdfast.toml:1")
    assert rows["--role"] == ("mine", f"{path}:1")
    assert rows["--grow"] == ("drain", "default")


@pytest.mark.parametrize(
    ("line", "said"), [("", "write one of show, schema"), ("path", "write one of"), ("schema x", "takes no x")]
)
def test_other_words_of_config_are_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_help_and_version_read_no_file() -> None:
    own("no such = toml = at all")
    assert main(["run", "--help"]) == main(["run", "--version"]) == 0


def test_a_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert parsed().values.max_restarts == 0


LOADED = """
import sys
from holdfast.cli import config
config.configure({"config": "", "no_config": False}, {})
print(*sys.modules)
"""


@pytest.mark.usefixtures("unmeasured")
def test_where_there_is_no_file_of_ours_none_is_parsed(site: Path) -> None:
    (site / "pyproject.toml").write_text("[project]\nname = 'holdfast'\n[tool.black]\n")

    def loaded() -> set[str]:
        done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert "tomllib" not in loaded()
    own("")
    assert "tomllib" in loaded()


# --- what values mean -------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, str, object]] = [
    ("nnodes = 4", "nnodes", "4"),
    ('nnodes = "2:4"', "nnodes", "2:4"),
    ('nproc-per-node = "gpu"', "nproc_per_node", "gpu"),
    ("nproc_per_node = 8", "nproc_per_node", "8"),
    ("max-restarts = 3", "max_restarts", 3),
    ("drain-timeout = 90", "drain_timeout", 90.0),
    ("monitor-interval = 0.5", "monitor_interval", 0.5),
    ("standalone = true", "standalone", True),
    ("module = false", "module", False),
    ('"grow" = "now"', "grow", "now"),
    ('preload = ["torch", "numpy"]', "preload", "torch,numpy"),
    ('preload = "none"', "preload", "none"),
    ("local-ranks-filter = [0, 1]", "local_ranks_filter", "0,1"),
    ('signals-to-handle = ["SIGTERM"]', "signals_to_handle", "SIGTERM"),
    ('duplicate-stdout-filters = ["loss", "a,b"]', "duplicate_stdout_filters", ["loss", "a,b"]),
    ('duplicate-stderr-filters = "a,b"', "duplicate_stderr_filters", ["a", "b"]),
    ('rdzv-conf = "join_timeout=5,lease=9"', "rdzv_conf", "join_timeout=5,lease=9"),
    ('[rdzv-conf]\njoin_timeout = 5\nlease = 9.5\nis_host = true\ntoken_file = "t"', "rdzv_conf", None),
    ("rdzv-id = 7", "rdzv_id", "7"),
    ("metrics = 9400", "metrics", "9400"),
    ('log-dir = "/dev/null"', "log_dir", "/dev/null"),
]


@pytest.mark.parametrize(("text", "dest", "value"), VALUES)
def test_a_value_of_toml_is_the_flags(text: str, dest: str, value: object) -> None:
    own(text)
    got = parsed()
    if value is None:
        value = "join_timeout=5,lease=9.5,is_host=true,token_file=t"
    assert getattr(got.values, dest) == value
    assert type(getattr(got.values, dest)) is type(value)
    assert got.sources[dest] == "holdfast.toml:1"
    assert got.given(dest)
    assert [name for name, source in got.sources.items() if source != FROM_DEFAULT] == [dest]


def test_every_option_of_a_run_is_a_key() -> None:
    assert {option.dest for option in LAUNCH_OPTIONS} - {option.dest for option in OPTIONS_BY_KEY.values()} == LINE_ONLY


def test_folders_are_meant_from_where_the_file_is(site: Path) -> None:
    own('log-dir = "runs"', site)
    assert parsed().values.log_dir == str(site / "runs")
    own('log-dir = "~/runs"', site)
    assert parsed().values.log_dir == os.path.expanduser("~/runs"), "no shell has seen it"


def test_the_order_default_file_variable_command_line() -> None:
    assert parsed().sources["max_restarts"] == FROM_DEFAULT
    own("# ours\n\nmax-restarts = 1\nstandalone = true\n")
    assert (parsed().values.max_restarts, parsed().sources["max_restarts"]) == (1, "holdfast.toml:3")
    environ = {"PET_MAX_RESTARTS": "2", "PET_STANDALONE": "0"}
    assert (parsed(environ=environ).values.max_restarts, parsed(environ=environ).values.standalone) == (2, False)
    assert parsed(environ=environ).sources["max_restarts"] == "PET_MAX_RESTARTS"
    got = parsed("--max-restarts", "3", environ=environ)
    assert (got.values.max_restarts, got.sources["max_restarts"]) == (3, FROM_FLAG)


def test_the_plan_tells_every_value_and_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own('nproc-per-node = 2\nhang-timeout = 60\nlog-dir = "/dev/null"\n[rdzv-conf]\npassword = "hush"').chmod(0o600)
    monkeypatch.setenv("PET_ROLE", "trainer")
    monkeypatch.setenv("HOLDFAST_GROW", "now")
    assert main(["run", "--plan", "--max-restarts", "3", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "workers here  2" in out
    assert "hush" not in out
    rows = {row.split()[0]: row.split(maxsplit=2)[1:] for row in out.splitlines() if row.startswith("  --")}
    assert rows["--nproc-per-node"] == ["2", "holdfast.toml:1"]
    assert rows["--hang-timeout"] == ["60.0", "holdfast.toml:2"]
    assert rows["--rdzv-conf"] == ["password=***", "holdfast.toml:4"]
    assert rows["--role"] == ["trainer", "PET_ROLE"]
    assert rows["--grow"] == ["now", "HOLDFAST_GROW"]
    assert rows["--max-restarts"] == ["3", "command line"]
    assert "--preload" not in rows, "it has its default"


# --- what is refused --------------------------------------------------------------------------------------------------

BAD = [
    ("nnods = 4", "holdfast.toml:1: nnods is not an option; did you mean nnodes?"),
    ("\nzzz = 4", "holdfast.toml:2: zzz is not an option; keys are the long names in holdfast run --help"),
    ("[run]\nnnodes = 4", "holdfast.toml:1: options need no table [run]: remove this heading, keep the lines below"),
    ("role = 'a'\n[tool.holdfast]\nnnodes = 4", "holdfast.toml:1: options need no table [tool.holdfast]: remove"),
    ("nproc-per-node = 1\nnproc_per_node = 2", "holdfast.toml:2: nproc_per_node is given twice"),
    ("plan = true", "holdfast.toml:1: plan belongs on the command line"),
    ("no_config = true", "holdfast.toml:1: no_config belongs on the command line"),
    ("max-restarts = 'three'", "holdfast.toml:1: max-restarts: must be a whole number, and is a text, 'three'"),
    ("max-restarts = 1.5", "must be a whole number, and is a number, 1.5"),
    ("max-restarts = true", "must be a whole number, and is true or false, true"),
    ("standalone = 1", "standalone: must be true or false, and is a whole number, 1"),
    ("drain-timeout = '60'", "drain-timeout: must be a number, and is a text, '60'"),
    ("nnodes = 1.5", "nnodes: must be a text or a number, and is a number, 1.5"),
    ("role = 5", "role: must be a text, and is a whole number, 5"),
    ("role = ['a']", "role: must be a text, and is a list, ['a']"),
    ("preload = [1.5]", "preload: must be a text or a list of texts, and is a list, [1.5]"),
    ("log-dir = 2001-01-01", "log-dir: must be a text, and is a date or time"),
    ('role = "a\\u0000"', "role: must not contain NUL"),
    pytest.param(f"role = '{'x' * FILE_BYTES_MAX}'", "holdfast.toml: larger than 1048576 bytes", id="large"),
    ("grow = 'later'", "grow: 'later' must be one of now, drain, never"),
    ("[rdzv-conf]\na = 'b,c'", "rdzv-conf: a must not contain a comma"),
    ("[rdzv-conf]\na = []", "rdzv-conf: a must be a text, a number, true or false, and is a list, []"),
    ("nnodes = ]", "holdfast.toml is not TOML: Invalid value (at line 1, column 10)"),
    ("max-restarts = -1", "holdfast.toml:1: max-restarts = -1: must be 0 or more"),
    ("nnodes = '4:2'", 'holdfast.toml:1: nnodes = "4:2": the minimum 4 is above the maximum 2'),
    ("rdzv-backend = 'c20d'", 'holdfast.toml:1: rdzv-backend = "c20d": '),
    ("rdzv-backend = 'c10d'\nrdzv-endpoint = 'h:x'", 'holdfast.toml:2: rdzv-endpoint = "h:x": '),
    ("rdzv-backend = 'c10d'\n[rdzv-conf]\nlease = 'x'", 'holdfast.toml:2: rdzv-conf = "lease=x": '),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_what_is_wrong_is_said_with_file_and_key(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    own(text)
    assert main(["run", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("holdfast: HF144: ")
    assert said in err


def test_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("holdfast.toml").write_bytes(b"role = '\xff'")
    assert main(["run", "train.py"]) == 2
    assert "holdfast.toml: not UTF-8 at byte 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ['rdzv-conf = "user=me, password = hush"', '[rdzv-conf]\npassword = "hush"', 'rdzv-endpoint = "http://me:hush@h"'],
)
def test_a_password_is_for_its_owner_alone(text: str) -> None:
    path = own(text)
    for mode in (0o644, 0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigFileError, match="others can read it; chmod 600") as caught:
            parsed()
        assert "hush" not in str(caught.value)
    path.chmod(0o600)
    assert parsed().given("rdzv_conf") or parsed().given("rdzv_endpoint")


def test_a_token_file_may_be_named_anywhere_and_an_open_one_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    token = Path("token")
    token.write_text("hush")
    own('[rdzv-conf]\ntoken_file = "token"').chmod(0o644)
    said = "token_file=token: every user of this machine can read it"
    token.chmod(0o640)
    assert main(["run", "--plan", "train.py"]) == 0
    assert said not in capsys.readouterr().out
    token.chmod(0o644)
    assert main(["run", "--plan", "train.py"]) == 0
    assert said in capsys.readouterr().out


def test_lines_are_found_in_every_shape_of_file(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\nmax-restarts = 0\n[tool.holdfast]\n# max-restarts = 1\n"grow" = "now"\n'
        'role = """\nmax-restarts = 5\n"""\nmax-restarts = 2\nrdzv-conf.lease = 3\n[tool.other]\nstandby = "on"\n'
    )
    places = {dest: setting.source.rpartition(":")[2] for dest, setting in settings(read_file(str(path))).items()}
    assert places["grow"] == "5"
    assert places["rdzv_conf"] == "10"


def test_a_real_run_with_a_file(site: Path) -> None:
    """Also of launch and doctor, and not of a file beyond --no-config."""
    Path("train.py").write_text("import os; print('workers', os.environ['WORLD_SIZE'])")
    own('nproc-per-node = 2\nlog-dir = "runs"', site)

    def out(*line: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *line], capture_output=True, text=True, timeout=limit_s(60)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = out("run", "train.py")
    assert "workers 2 (×2)" in said or said.count("workers 2\n") == 2  # shown once if they came within log_fold.FOLD_S
    assert out("run", "--no-config", "--log-dir", "runs", "train.py").count("workers 1") == 1
    assert out("launch", "--plan", "train.py").count("workers here  2") == 1
    assert (site / "runs").is_dir()


def test_errors_are_the_callers() -> None:
    assert issubclass(ConfigFileError, HoldfastError)
    assert ConfigFileError.exit_code == 2
