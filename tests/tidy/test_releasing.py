"""A release is refused while something would be published wrongly; what can be said without building it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from holdfast.version import __version__
from tools.dist import check_compiler, link_to_repository
from tools.release import NAMES_VERSION, reasons, released_on
from tools.stability import LABELS, Call, broken, labels, public_names, recorded, stable_calls

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the files that name the version, committed."""
    # Of a hook or of `git rebase --exec` around this run: they name another repository, and count more than -C.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in NAMES_VERSION:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    return tmp_path


def test_all_files_name_the_version_of_the_package(checkout: Path) -> None:
    assert list(reasons(checkout)) == []


@pytest.mark.parametrize("name", NAMES_VERSION)
def test_a_file_that_names_another_version_refuses_the_release(name: str, checkout: Path) -> None:
    text = (checkout / name).read_text()
    (checkout / name).write_text(text.replace(__version__, "9.9.9"))
    committed, version = reasons(checkout)
    assert committed.startswith("not committed")
    assert version.startswith(f"{name} names version 9.9.9")


def test_a_tag_that_exists_refuses_the_release(checkout: Path) -> None:
    subprocess.run(["git", "-C", checkout, "tag", f"v{__version__}"], check=True)
    (reason,) = reasons(checkout)
    assert reason == f"the tag v{__version__} exists: this version is released"


def test_a_date_that_stands_in_one_file_only_refuses_the_release(checkout: Path) -> None:
    changelog, citation = checkout / "CHANGELOG.md", checkout / "CITATION.cff"
    heading = re.compile(rf"^## {re.escape(__version__)} .*$", re.MULTILINE)
    citation.write_text(re.sub(r"(?m)^date-released: .*\n", "", citation.read_text()))
    changelog.write_text(heading.sub(f"## {__version__} (not released)", changelog.read_text()))
    assert released_on(checkout) == ""
    changelog.write_text(heading.sub(f"## {__version__} (2027-01-02)", changelog.read_text()))
    assert released_on(checkout) == "2027-01-02"
    assert list(reasons(checkout))[1:] == ["CHANGELOG.md has the date 2027-01-02 and CITATION.cff none"]
    with citation.open("a") as file:
        file.write("date-released: 2027-01-02\n")
    assert len(list(reasons(checkout))) == 1  # not committed


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("aarch64", "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross, or leave aarch64 out"),
        ("riscv64", "no wheels are built for riscv64; there are x86_64, aarch64"),
    ],
)
def test_a_compiler_without_a_c_library_is_named_before_anything_is_built(
    machine: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is an optional part of the wheel: without this the build of a wheel without it succeeds."""
    half = tmp_path / "aarch64-linux-gnu-gcc"
    half.write_text("#!/bin/sh\ncat > /dev/null; echo 'pthread.h: No such file or directory' >&2; exit 1\n")
    half.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match=said):
        check_compiler(machine)


@pytest.mark.parametrize(
    ("repository", "line"),
    [
        (
            "https://host/o/holdfast",
            "See [the rules](https://host/o/holdfast/blob/c0ffee/docs/a.md#b), [torch](https://pytorch.org).",
        ),
        ("", "See the rules, [torch](https://pytorch.org)."),
    ],
)
def test_the_page_of_a_package_has_no_link_that_leads_nowhere(tmp_path: Path, repository: str, line: str) -> None:
    (tmp_path / "README.md").write_text("See [the rules](docs/a.md#b), [torch](https://pytorch.org).\npip install .\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "holdfast"\n')
    link_to_repository(tmp_path, repository, "c0ffee")
    assert (tmp_path / "README.md").read_text() == f"{line}\npip install holdfast\n"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project.get("urls", {}).get("Repository", "") == repository


def test_every_public_python_name_has_a_label() -> None:
    assert labels().keys() == public_names()
    assert set(labels().values()) <= LABELS


def test_stable_names_are_called_as_before() -> None:
    now = stable_calls()
    assert list(broken(recorded(), now)) == []
    assert set(now) - set(recorded()) == set(), "python -m tools.stability records what is new"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (["a"], ["a", "b=1"], []),
        (["a"], ["a=1", "*", "b=1"], []),
        (["a", "*", "b=1"], ["a", "b=1", "c=2"], []),
        (["*args", "a=1"], ["*args", "a=1", "**rest"], []),
        (["a"], ["a", "b"], ["f: argument b is new and has no default"]),
        (["a=1"], ["a=2"], ["f: argument 1 was a=1"]),
        (["a=1", "b=1"], ["b=1", "a=1"], ["f: argument 1 was a=1", "f: argument 2 was b=1"]),
        (["a=1"], ["*", "a=1"], ["f: argument 1 was a=1"]),
        (["*", "a=1"], ["*"], ["f: argument a=1 is gone, or has another default"]),
        (["a", "**rest"], ["a"], ["f: argument **rest is gone, or has another default"]),
        (None, [], ["f is an attribute no longer"]),
        ([], None, ["f is called no longer"]),
    ],
)
def test_a_change_that_breaks_a_program_is_found(before: Call, now: Call, said: list[str]) -> None:
    assert list(broken({"f": before}, {"f": now})) == said


def test_a_stable_name_that_is_gone_is_found() -> None:
    now = stable_calls()
    del now["holdfast.worker.beat"]
    assert list(broken(recorded(), now)) == ["holdfast.worker.beat is gone"]
