from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.codec import PROTOCOL_VERSION, decode_from_agent, decode_from_coordinator, frame, preamble
from holdfast.protocol.errors import AuthenticationError, HoldfastError, ProtocolError, RefusedError
from holdfast.protocol.messages import FromAgent, FromCoordinator, Ping, Pong, Waiting
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.seal import MAC_BYTES, Seal
from holdfast.protocol.session import (
    NONCE_BYTES,
    Accepted,
    Challenge,
    ClientHandshake,
    ServerHandshake,
    Session,
    read_refusal,
    write_refusal,
)

JOB = JobSpec(run_id="run-a", min_nodes=2, max_nodes=4, backend="c10d")
NODE = NodeSpec(member="node7#1", host="node7", nproc=2)
AGENT_NONCE, COORDINATOR_NONCE = b"a" * NONCE_BYTES, b"c" * NONCE_BYTES
TOKEN = b"correct horse"


class Pair:
    """Both ends of a connection, joined by hand, so that a test can sit in between."""

    def __init__(
        self,
        client_token: bytes | None,
        server_token: bytes | None,
        client_job: JobSpec = JOB,
        server_job: JobSpec = JOB,
    ) -> None:
        self.client_side = ClientHandshake(client_job, NODE, client_token, AGENT_NONCE)
        self.server_side = ServerHandshake(server_job, server_token, COORDINATOR_NONCE)
        self.client: Session[FromCoordinator] = Session(self.client_side, decode_from_coordinator)
        self.server: Session[FromAgent] = Session(self.server_side, decode_from_agent)

    def run(self, *, size: int = 1 << 20) -> Pair:
        """Carries bytes in both directions until neither has more to say."""
        up, down = self.client.opening(), self.server.opening()
        while up or down:
            up, down = carry(self.client, down, size), carry(self.server, up, size)
        return self


def carry(to: Session[FromAgent] | Session[FromCoordinator], data: bytes, size: int) -> bytes:
    return b"".join(to.feed(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_both_sides_agree(token: bytes | None, size: int) -> None:
    pair = Pair(token, token).run(size=size)
    assert pair.client.established
    assert pair.server.established
    assert pair.server_side.hello is not None
    assert (pair.server_side.hello.member, pair.server_side.hello.host) == ("node7#1", "node7")
    pair.server.feed(pair.client.pack(Ping(number=1)) + pair.client.pack(Ping(number=2)))
    pair.client.feed(pair.server.pack(Pong(number=1)))
    assert pair.server.take() == [Ping(number=1), Ping(number=2)]
    assert pair.client.take() == [Pong(number=1)]
    assert pair.server.take() == []


@pytest.mark.parametrize("token", [None, TOKEN])
def test_one_whole_message_takes_the_short_way(token: bytes | None) -> None:
    pair = Pair(token, token)
    assert pair.server.only(pair.client.opening()) is None, "the handshake does not"
    pair.run()
    one, two, three = (pair.client.pack(Ping(number=number)) for number in (1, 2, 3))
    assert pair.server.only(one) == Ping(number=1)
    assert pair.server.only(two + three) is None
    pair.server.feed(two + three[:5])
    assert pair.server.only(three[5:]) is None, "it is the end of a message that was begun"
    pair.server.feed(three[5:])
    assert pair.server.take() == [Ping(number=2), Ping(number=3)]
    assert pair.server.error is None


def test_a_large_message_right_behind_the_acceptance_is_not_lost() -> None:
    pair = Pair(TOKEN, TOKEN)
    down = pair.server.feed(pair.client.opening())
    last = pair.server.feed(pair.client.feed(down))
    text = "x" * 1_000_000
    pair.client.feed(last + pair.server.pack(Waiting(text=text)))
    assert pair.client.error is None
    assert pair.client.take() == [Waiting(text=text)]


OTHER_JOBS = [
    (JobSpec(run_id="run-b", min_nodes=2, max_nodes=4, backend="c10d"), ["'run-a'", "'run-b'"]),
    (JobSpec(run_id="run-a", min_nodes=1, max_nodes=4, backend="c10d"), ["--nnodes 2:4", "--nnodes 1:4"]),
    (JobSpec(run_id="run-a", min_nodes=4, max_nodes=4, backend="c10d"), ["--nnodes 2:4", "--nnodes 4"]),
    (JobSpec(run_id="run-a", min_nodes=2, max_nodes=4, backend="static"), ["'c10d'", "'static'"]),
    (JobSpec(run_id="run-a", min_nodes=2, max_nodes=4, backend="c10d", fixed_ranks=True), ["fixed ranks"]),
]


@pytest.mark.parametrize(("job", "words"), OTHER_JOBS)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_another_configuration_is_refused_with_both_values(job: JobSpec, words: list[str], token: bytes | None) -> None:
    assert_refused(Pair(token, token, client_job=job).run(), words)


@pytest.mark.parametrize(
    ("client_token", "server_token", "words"),
    [
        (None, TOKEN, ["coordinator has a job token", "'node7' has none"]),
        (TOKEN, None, ["'node7' has a job token", "coordinator has none"]),
        (b"wrong horse", TOKEN, ["'node7'", "coordinator", "differ"]),
    ],
)
def test_another_token_is_refused_and_never_shown(
    client_token: bytes | None, server_token: bytes | None, words: list[str]
) -> None:
    pair = Pair(client_token, server_token).run()
    assert_refused(pair, words)
    assert "horse" not in f"{pair.client.error} {pair.server.error}"


@pytest.mark.parametrize("stranger", [None, b"wrong horse"])
def test_who_does_not_know_the_token_learns_nothing_of_the_job(stranger: bytes | None) -> None:
    other = JobSpec(run_id="theirs", min_nodes=77, max_nodes=88, backend="static")
    pair = Pair(stranger, TOKEN, client_job=other).run()
    told = str(pair.client.error)
    assert pair.client.error is not None
    assert "token" in told
    assert not any(word in told for word in (JOB.run_id, str(JOB.max_nodes), JOB.backend)), told


def assert_refused(pair: Pair, words: Iterable[str]) -> None:
    assert isinstance(pair.client.error, RefusedError)
    assert isinstance(pair.server.error, (RefusedError, AuthenticationError))
    assert not pair.client.established
    assert not pair.server.established
    for word in words:
        assert word in str(pair.client.error)
        assert word in str(pair.server.error)
    assert "\n" not in str(pair.server.error)


def test_another_version_is_refused_by_the_coordinator() -> None:
    pair = Pair(None, None)
    answer = pair.server.feed(preamble(PROTOCOL_VERSION + 8))
    assert f"version {PROTOCOL_VERSION} " in str(pair.server.error)
    assert f"version {PROTOCOL_VERSION + 8}" in str(pair.server.error)
    assert answer.startswith(preamble())
    refusal = read_refusal(answer[len(preamble()) + 4 :])
    assert refusal is not None
    assert refusal == ("HF111", str(pair.server.error))


def test_another_version_is_refused_by_the_agent() -> None:
    pair = Pair(None, None)
    pair.client.feed(preamble(PROTOCOL_VERSION + 8))
    assert isinstance(pair.client.error, RefusedError)
    assert f"version {PROTOCOL_VERSION + 8}" in str(pair.client.error)
    assert f"version {PROTOCOL_VERSION}" in str(pair.client.error)


def test_a_coordinator_that_cannot_prove_the_token_is_refused() -> None:
    client = ClientHandshake(JOB, NODE, TOKEN, AGENT_NONCE)
    answer = client.receive(msgspec.msgpack.encode(Challenge(COORDINATOR_NONCE, b"0" * 32)))
    assert isinstance(client.error, RefusedError)
    assert [read_refusal(each) is not None for each in answer] == [True]  # and no proof of ours


def test_a_coordinator_that_skips_the_token_is_refused() -> None:
    client = ClientHandshake(JOB, NODE, TOKEN, AGENT_NONCE)
    assert client.receive(msgspec.msgpack.encode(Accepted(PROTOCOL_VERSION))) == []
    assert isinstance(client.error, RefusedError)
    assert not client.done


def test_an_agent_that_only_repeats_the_coordinators_proof_is_refused() -> None:
    client = ClientHandshake(JOB, NODE, TOKEN, AGENT_NONCE)
    server = ServerHandshake(JOB, TOKEN, COORDINATOR_NONCE)
    challenge = msgspec.msgpack.decode(server.receive(client.opening()[0])[0], type=Challenge)
    server.receive(msgspec.msgpack.encode(["proof", challenge.proof]))
    assert isinstance(server.error, AuthenticationError)


def test_an_old_conversation_cannot_be_repeated() -> None:
    client = ClientHandshake(JOB, NODE, TOKEN, AGENT_NONCE)
    server = ServerHandshake(JOB, TOKEN, COORDINATOR_NONCE)
    hello = client.opening()[0]
    proof = client.receive(server.receive(hello)[0])[0]
    again = ServerHandshake(JOB, TOKEN, b"d" * NONCE_BYTES)
    again.receive(hello)
    again.receive(proof)
    assert isinstance(again.error, AuthenticationError)


def test_what_a_peer_says_cannot_upset_a_terminal() -> None:
    code, text = read_refusal(write_refusal("HF111", "red \x1b[31m\nline")) or ("", "")
    assert (code, text) == ("HF111", "red  line")
    evil = JobSpec(run_id="x\x1b[31m\n" + "y" * 1000, min_nodes=2, max_nodes=4, backend="c10d")
    pair = Pair(None, None, client_job=evil).run()
    assert "\x1b" not in str(pair.server.error)
    assert len(str(pair.server.error)) < 300


def test_a_run_id_that_is_no_text_still_matches_itself() -> None:
    job = JobSpec(run_id="caf\udce9", min_nodes=1, max_nodes=1, backend="c10d")
    assert Pair(None, None, client_job=job, server_job=job).run().server.established


def test_nothing_is_said_before_the_agent_has_spoken() -> None:
    assert Pair(None, None).server.opening() == b""


@given(st.binary(max_size=300), st.booleans(), st.booleans(), st.integers(1, 50))
def test_any_bytes_end_in_an_error_or_in_waiting(data: bytes, greeted: bool, secret: bool, size: int) -> None:
    token = TOKEN if secret else None
    pair = Pair(token, token)
    for side in (pair.client, pair.server):
        carry(side, (preamble() if greeted else b"") + data, size)
        assert side.error is None or isinstance(side.error, (ProtocolError, RefusedError))
        assert not side.established


@given(st.binary(max_size=300))
def test_any_payload_after_the_hello_ends_in_an_error(payload: bytes) -> None:
    pair = Pair(TOKEN, TOKEN)
    pair.server.feed(pair.client.opening())
    pair.server.feed(frame(payload))
    assert isinstance(pair.server.error, (ProtocolError, AuthenticationError))
    assert not pair.server.established


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_in_the_handshake_never_lets_anybody_in(place: int, bit: int) -> None:
    """Under a token: whatever is altered in whatever the agent sends, the coordinator does not accept it."""
    pair = Pair(TOKEN, TOKEN)
    hello = pair.client.opening()
    proof = pair.client.feed(pair.server.feed(hello))
    whole = bytearray(hello + proof)
    whole[place % len(whole)] ^= 1 << bit
    victim = Pair(TOKEN, TOKEN).server
    victim.feed(bytes(whole))
    assert not victim.established
    victim_error: HoldfastError | None = victim.error  # None: a longer frame is awaited, and the time limit ends it
    assert victim_error is None or isinstance(victim_error, (ProtocolError, AuthenticationError, RefusedError))


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_under_a_token_never_becomes_a_message(place: int, bit: int) -> None:
    pair = Pair(TOKEN, TOKEN).run()
    data = bytearray(pair.client.pack(Ping(number=77)))
    data[place % len(data)] ^= 1 << bit
    assert pair.server.only(bytes(data)) is None
    pair.server.feed(bytes(data) + pair.client.pack(Ping(number=78)))
    assert pair.server.take() == []
    if pair.server.error is not None:
        assert isinstance(pair.server.error, (ProtocolError, AuthenticationError))
    else:
        assert pair.server.torn  # the length grew: more bytes are awaited, and will not open


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 1, 0], [0, 2]])
def test_sealed_frames_open_once_and_in_order(order: list[int]) -> None:
    agent, coordinator = Seal(TOKEN, "agent", b"said"), Seal(TOKEN, "coordinator", b"said")
    sealed = [agent.seal(b"%d" % number) for number in range(3)]
    for number in order[:-1]:
        coordinator.open(sealed[number])
    with pytest.raises(AuthenticationError):
        coordinator.open(sealed[order[-1]])


@pytest.mark.parametrize("data", [b"", b"short", bytes(MAC_BYTES)])
def test_what_is_not_sealed_does_not_open(data: bytes) -> None:
    with pytest.raises(AuthenticationError):
        Seal(TOKEN, "agent", b"said").open(data)


def test_a_frame_cannot_be_turned_around() -> None:
    agent = Seal(TOKEN, "agent", b"said")
    with pytest.raises(AuthenticationError):
        agent.open(agent.seal(b"mine"))
