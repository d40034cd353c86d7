"""The lease in etcd on a store in memory: nobody writes with an old version, and a lost answer costs nothing."""

from __future__ import annotations

from holdfast.protocol.errors import EtcdUnreachableError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.elections import Leader, Memory
from holdfast.rendezvous.etcd import EtcdApi, EtcdLeaderLease, leader_key, memory_key

OPTIONS = EtcdOptions(api="v3", endpoints=(Endpoint(host="e", port=1),))
LEADER, MEMORY = leader_key(OPTIONS, "job"), memory_key(OPTIONS, "job")


class Etcd:
    """A Store of which every refresh is a change, as with API v2. `lose_answers`: changes whose answer is lost."""

    notice = ""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.version = 0
        self.lose_answers = 0

    def read(self, key: str) -> tuple[bytes, int] | None:
        return self.values.get(key)

    def write(self, key: str, value: bytes, ttl_s: int, version: int) -> int | None:
        if self.values.get(key, (b"", 0))[1] != version:
            return None
        self.version += 1
        self.values[key] = (value, self.version)
        if self.lose_answers:
            self.lose_answers -= 1
            raise EtcdUnreachableError("no answer")
        return self.version

    def refresh(self, key: str, ttl_s: int, version: int) -> int | None:
        return self.write(key, self.values.get(key, (b"", 0))[0], ttl_s, version) if key in self.values else None

    def delete(self, key: str, version: int) -> None:
        if self.values.get(key, (b"", 0))[1] == version:
            del self.values[key]

    def close(self) -> None:
        """Nothing is open."""


def take(etcd: Etcd, name: str) -> EtcdLeaderLease | None:
    return EtcdApi(etcd, OPTIONS, "job").take(Leader(run_id="job", address="10.0.0.1", port=7, identity=name))


def memory(generation: int) -> Memory:
    return Memory(run_id="job", generation=generation, workers_may_live_s=1.5)


def unanswered(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except EtcdUnreachableError:
        return
    raise AssertionError("it was answered")


def test_the_next_leader_gets_what_the_previous_one_wrote_down() -> None:
    etcd = Etcd()
    first = take(etcd, "a")
    assert first is not None
    assert first.previous_leader is None
    assert take(etcd, "b") is None
    assert first.remember(memory(3))
    del etcd.values[LEADER]  # its time is over
    second = take(etcd, "b")
    assert second is not None
    assert second.previous_leader == memory(3)


def test_a_leader_that_lost_the_key_writes_nothing_more() -> None:
    etcd = Etcd()
    first = take(etcd, "a")
    assert first is not None
    assert first.remember(memory(3))
    del etcd.values[LEADER]
    assert take(etcd, "b") is not None
    before = dict(etcd.values)
    assert not first.remember(memory(4))
    assert not first.renew()
    first.resign(None)
    assert etcd.values == before


def test_a_change_whose_answer_was_lost_does_not_end_the_lease() -> None:
    etcd = Etcd()
    leader = take(etcd, "a")
    assert leader is not None
    etcd.lose_answers = 1
    unanswered(lambda: leader.remember(memory(1)))
    assert leader.remember(memory(2))
    etcd.lose_answers = 1
    unanswered(leader.renew)
    assert leader.renew()
    leader.resign(None)
    assert etcd.values == {}


def test_a_key_that_ran_out_is_not_renewed() -> None:
    etcd = Etcd()
    leader = take(etcd, "a")
    assert leader is not None
    del etcd.values[LEADER]
    assert not leader.renew()


def test_what_another_node_writes_meanwhile_is_read_again() -> None:
    """A leader that is late writes between our look at the memory and our own write."""

    class Late(Etcd):
        late = False

        def read(self, key: str) -> tuple[bytes, int] | None:
            found = super().read(key)
            if key == MEMORY and self.late:
                self.late = False
                self.write(
                    key, b'{"run_id":"job","generation":9,"workers_may_live_s":0.0}', 1, found[1] if found else 0
                )
            return found

    etcd = Late()
    first = take(etcd, "a")
    assert first is not None
    del etcd.values[LEADER]
    etcd.late = True
    second = take(etcd, "b")
    assert second is not None
    assert second.previous_leader is not None
    assert second.previous_leader.generation == 9
