from __future__ import annotations

import pytest

from holdfast.protocol.errors import RendezvousConfigError
from holdfast.protocol.policy import Limits
from holdfast.rendezvous.backends import BACKENDS, row_of
from holdfast.rendezvous.conf import limits_from_conf, parse_conf, read_conf, unknown_key_notices
from tests.support.tables import tables

TABLES = tables(__file__)

EACH = pytest.mark.parametrize("backend", [*BACKENDS, "of_a_package"])

BASE = Limits()


@pytest.mark.parametrize(("text", "conf"), TABLES["grammar"])
def test_grammar(text: str, conf: dict[str, str]) -> None:
    assert parse_conf(text) == conf


@pytest.mark.parametrize(("text", "words"), TABLES["malformed"])
def test_malformed(text: str, words: str) -> None:
    with pytest.raises(RendezvousConfigError, match=words) as caught:
        parse_conf(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("backend", "text"), TABLES["bad_values"])
def test_bad_values_are_told_with_key_and_value(backend: str, text: str) -> None:
    with pytest.raises(RendezvousConfigError) as caught:
        limits_from_conf(backend, parse_conf(text), BASE)
    assert text in str(caught.value)


def test_a_bad_value_of_a_key_that_does_nothing_is_no_error() -> None:
    assert limits_from_conf("c10d", parse_conf("timeout=abc,use_libuv=x"), BASE) == BASE


@pytest.mark.parametrize(("word", "value"), [("1", True), ("TRUE", True), ("Y", True), ("f", False), ("No", False)])
def test_bools(word: str, value: bool) -> None:
    assert read_conf("c10d", {"is_host": word}) == {"is_host": value}


def test_a_file_store_is_refused_with_advice() -> None:
    with pytest.raises(RendezvousConfigError, match="--rdzv-endpoint"):
        read_conf("c10d", {"store_type": "file"})


def test_values_are_typed() -> None:
    conf = parse_conf("join_timeout=5,lease=2.5,token_file=/t,store_type=tcp,unknown=1")
    assert read_conf("c10d", conf) == {"join_timeout": 5.0, "lease": 2.5, "token_file": "/t", "store_type": "tcp"}


@pytest.mark.parametrize(("backend", "text", "expected"), TABLES["limits"])
def test_limits(backend: str, text: str, expected: dict[str, float]) -> None:
    limits = limits_from_conf(backend, parse_conf(text), BASE)
    changed = {
        name: pytest.approx(getattr(limits, name))
        for name in Limits.__struct_fields__
        if getattr(limits, name) != getattr(BASE, name)
    }
    assert changed == {key: value for key, value in expected.items() if value != getattr(BASE, key)}


@pytest.mark.parametrize("text", ["lease=0.5", "heartbeat_timeout=1", "keep_alive_interval=1,keep_alive_max_attempt=1"])
def test_patience_keeps_its_order(text: str) -> None:
    limits = limits_from_conf("c10d", parse_conf(text), BASE)
    assert limits.ping_interval_s <= limits.lease_s / 6
    assert limits.ping_interval_s * 2 < limits.fence_s < limits.lease_s


@pytest.mark.parametrize(("backend", "key", "nearest"), TABLES["nearest_keys"])
def test_a_key_that_does_nothing_is_told_with_the_nearest(backend: str, key: str, nearest: str) -> None:
    (notice,) = unknown_key_notices(backend, {key: "1"})
    assert key in notice
    assert f"did you mean {nearest}?" in notice


@EACH
def test_the_time_to_wait_for_others_has_two_names_with_every_backend(backend: str) -> None:
    for key in ("timeout", "join_timeout"):
        assert unknown_key_notices(backend, {key: "5"}) == []
        assert limits_from_conf(backend, {key: "5"}, BASE).join_s == 5.0
    (notice,) = unknown_key_notices(backend, {"timeout": "5", "join_timeout": "7"})
    assert "has the same meaning and is used" in notice


@pytest.mark.parametrize(("backend", "key"), [("c10d", "use_libuv"), ("c10d", "close_timeout"), ("static", "zzz")])
def test_a_key_that_is_near_nothing_is_still_told(backend: str, key: str) -> None:
    (notice,) = unknown_key_notices(backend, {key: "1"})
    assert f"{key} has no effect" in notice
    assert "did you mean" not in notice


@EACH
def test_keys_that_work_are_not_told(backend: str) -> None:
    assert unknown_key_notices(backend, dict.fromkeys(row_of(backend).keys, "1")) == []
