"""A built-in backend with a shared value: a row of the table and a class, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.rendezvous import resolve
from holdfast.protocol.options import SharedValueOptions
from holdfast.protocol.policy import Limits
from holdfast.rendezvous.backends import BACKENDS, BY_VALUE
from holdfast.rendezvous.third_party import Backend, Place, SharedValue, load_backend


class OneValue(SharedValue):
    def read(self) -> bytes | None:
        return None

    def swap(self, old: bytes | None, new: bytes) -> bool:
        return old is None


class Meadow(Backend):
    conf_keys = ("corner",)

    def open(self, place: Place) -> SharedValue:
        if not place.endpoint:
            raise ValueError("--rdzv-endpoint must name a meadow")
        return OneValue()


@pytest.fixture(autouse=True)
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setitem(BACKENDS, "meadow", BY_VALUE._replace(shared_value=f"{__name__}:Meadow"))


def test_its_class_is_loaded_by_the_row() -> None:
    assert isinstance(load_backend("meadow"), Meadow)


def test_its_endpoint_and_keys_reach_the_options() -> None:
    line = ["--rdzv-backend=meadow", "--rdzv-endpoint=by the river", "--nnodes=2"]
    conf = "corner=north,lease_ttl=9,join_timeout=7,cornr=1"
    notices: list[str] = []
    made = resolve(
        parse([*line, f"--rdzv-conf={conf}", "train.py"], {}, OPTIONS), {}, patience=Limits(), notices=notices
    )
    assert made.shared_value == SharedValueOptions(endpoint="by the river", conf={"corner": "north"}, lease_ttl_s=9)
    assert made.job.backend == "meadow"
    assert made.limits.join_s == 7
    assert notices == ["--rdzv-conf cornr has no effect with backend meadow; did you mean corner?"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--rdzv-backend=meadow"], "--rdzv-backend meadow: --rdzv-endpoint must name a meadow"),
        (["--rdzv-backend=medow", "--rdzv-endpoint=x"], "did you mean meadow?"),
        (["--rdzv-backend=xyz", "--rdzv-endpoint=x"], "known are .*, meadow"),
    ],
)
def test_what_is_wrong_is_one_line(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes=2", *line, "train.py"]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == 1
