"""Prefixes, sources of values and variables: where we are better than torchrun on purpose."""

from __future__ import annotations

import shlex

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS, Option
from holdfast.protocol.errors import EnvironmentValueError, UsageError
from tests.support.tables import tables

TABLES = tables(__file__)


@pytest.mark.parametrize(
    ("line", "notices"),
    [
        ("--nnode 2 x.py", ("--nnode taken as --nnodes",)),
        ("--nproc_p=2 --stand x.py", ("--nproc_p taken as --nproc_per_node", "--stand taken as --standalone")),
        ("--nnodes 2 --nproc_per_node=1 x.py --nnode", ()),
        ("--role --nnode=3 x.py", None),
    ],
)
def test_a_prefix_is_said(line: str, notices: tuple[str, ...] | None) -> None:
    if notices is None:
        with pytest.raises(
            UsageError, match=r"--role needs a value; if --nnode=3 is the value, write --role=--nnode=3"
        ):
            parse(shlex.split(line), {}, OPTIONS)
    else:
        assert parse(shlex.split(line), {}, OPTIONS).notices == notices


@pytest.mark.parametrize(("typed", "meant"), TABLES["unknown_options"])
def test_an_unknown_option_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{typed} is not an option; did you mean {meant}\\?"):
        parse([typed, "x.py"], {}, OPTIONS)


@pytest.mark.parametrize("name", TABLES["no_guess"])
def test_nothing_near_is_no_guess(name: str) -> None:
    if name.startswith("-"):
        with pytest.raises(UsageError, match="see holdfast run --help"):
            parse([name, "x.py"], {}, OPTIONS)
    else:
        assert parse([name], {}, OPTIONS).values.training_script == name


def test_a_misspelt_variable_is_said_and_a_strangers_is_not() -> None:
    environ = {"PET_NPROCS_PER_NODE": "2", "PET_NAME": "Rex", "PET_NNODES": "1"}
    notices = parse(["x.py"], environ, OPTIONS).notices
    assert notices == ("PET_NPROCS_PER_NODE is not read; did you mean PET_NPROC_PER_NODE?",)


def test_flag_beats_variable_beats_default() -> None:
    parsed = parse(["--nnodes", "3", "x.py"], {"PET_NNODES": "2", "PET_ROLE": "r"}, OPTIONS)
    assert (parsed.values.nnodes, parsed.sources["nnodes"], parsed.as_written("nnodes")) == ("3", "flag", "--nnodes 3")
    assert (parsed.values.role, parsed.sources["role"], parsed.as_written("role")) == ("r", "PET_ROLE", "PET_ROLE=r")
    assert (parsed.values.tee, parsed.given("tee")) == ("0", False)


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_an_error_shows_no_password(by: str) -> None:
    conf = "user=u,password=hunter2"
    line, environ = (["--rdzv-conf", conf], {}) if by == "flag" else ([], {"PET_RDZV_CONF": conf})
    error = parse([*line, "x.py"], environ, OPTIONS).error("rdzv_conf", UsageError, "is wrong")
    assert "user=u,password=***: is wrong" in str(error)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("0", False), ("2", True), ("true", True), ("Yes", True), ("FALSE", False), ("no", False)],
)
def test_words_for_flags_in_variables(text: str, value: bool) -> None:
    assert parse(["x.py"], {"PET_STANDALONE": text}, OPTIONS).values.standalone is value


@pytest.mark.parametrize(("name", "text", "problem"), TABLES["bad_variables"])
def test_a_bad_variable_is_named_with_its_value(name: str, text: str, problem: str) -> None:
    with pytest.raises(EnvironmentValueError, match=f"^{name}={text}: {problem}"):
        parse(["x.py"], {name: text}, OPTIONS)
    dest = name.split("_", 1)[1].lower()
    option = next(option for option in OPTIONS if option.dest == dest)
    if option.kind != "flag":  # a flag on the line makes the variable irrelevant
        good = option.choices[0] if option.choices else "1"
        assert parse([option.name, good, "x.py"], {name: text}, OPTIONS).given(dest)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.variable], ids=lambda option: option.name)
def test_every_option_reads_its_variable(option: Option) -> None:
    text = option.choices[0] if option.choices else "1"
    parsed = parse(["x.py"], {option.variable: text}, OPTIONS)
    assert parsed.sources[option.dest] == option.variable
    assert parsed.as_written(option.dest).startswith(option.variable + "=")


def test_help_and_version_need_no_script_and_read_no_variable() -> None:
    broken = {"PET_MAX_RESTARTS": "x"}
    assert parse(["--help"], broken, OPTIONS).values.help
    assert parse(["--nnodes", "2", "-h", "--no-such-thing"], broken, OPTIONS).values.help
    assert parse(["--version"], broken, OPTIONS).values.version
    assert not parse(["x.py", "--help"], {}, OPTIONS).values.help


@pytest.mark.parametrize(("variable", "meant"), TABLES["misspelt_variables"])
def test_a_misspelt_variable_is_answered_with_the_nearest_of_either_prefix(variable: str, meant: str) -> None:
    (notice,) = parse(["x.py"], {variable: "1"}, OPTIONS).notices
    assert notice == f"{variable} is not read; did you mean {meant}?"


def test_a_variable_that_is_read_by_another_command_is_no_mistake() -> None:
    names = ("HOLDFAST_TOKEN", "HOLDFAST_RUNTIME_DIR", "HOLDFAST_GUARDS", "HOLDFAST_TEST_ID", "HOLDFAST_STANDBY")
    assert parse(["x.py"], dict.fromkeys(names, "on"), OPTIONS).notices == ()


@pytest.mark.parametrize("option", TABLES["late_options"])
def test_an_option_after_the_script_is_hinted_at_once(option: str) -> None:
    parsed = parse(["x.py", "--lr", "3", option, "4", "--max-restarts", "1"], {}, OPTIONS)
    (notice,) = parsed.notices
    assert notice.startswith(f"{option.partition('=')[0]} comes after x.py, so the script gets it")
    assert parsed.values.training_script_args[2] == option


@pytest.mark.parametrize(
    "option", ["--config", "--env", "--log-dir", "--role", "-m", "-r", "--python", "--seed", "--help", "--version"]
)
def test_what_scripts_call_their_own_options_is_no_mistake(option: str) -> None:
    assert parse(["x.py", option, "4"], {}, OPTIONS).notices == ()


@pytest.mark.parametrize(
    "line", ["--nnodes 2 \\ # two nodes", "\\ # the script\n", "--nnodes 2 \\ x.py", "--nnodes 2 \\ \n x.py"]
)
def test_a_backslash_that_does_not_end_its_line_is_told(line: str) -> None:
    with pytest.raises(UsageError, match="a backslash continues a line only as its last character"):
        parse(shlex.split(line, comments=True), {}, OPTIONS)


@pytest.mark.parametrize("option", ["--use-env", "--use_env"])
def test_use_env_is_what_run_always_does(option: str) -> None:
    with pytest.raises(UsageError, match="which always behaves like this: leave it out"):
        parse([option, "x.py"], {}, OPTIONS)
