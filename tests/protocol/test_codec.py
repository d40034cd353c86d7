from __future__ import annotations

import contextlib
import itertools
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.charter import Charter, CharterPosition, Polled, Renew
from holdfast.protocol.codec import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PREAMBLE_BYTES,
    STORE_MAGIC,
    TEXTLESS,
    FrameReader,
    decode,
    decode_from_agent,
    decode_from_coordinator,
    describe_stranger,
    encode,
    encode_extended,
    frame,
    preamble,
    read_preamble,
    send_samples,
)
from holdfast.protocol.errors import ProtocolError
from holdfast.protocol.messages import (
    AgentMessage,
    Ask,
    Assign,
    CanGoOn,
    CannotRegroup,
    CoordinatorMessage,
    Finish,
    FromAgent,
    FromCoordinator,
    Join,
    Joined,
    Leave,
    Notice,
    Ping,
    Pong,
    Prepared,
    Progress,
    Refuse,
    Regroup,
    Replace,
    ReplacementFailed,
    ReplacementReady,
    ReportCharter,
    Start,
    Stop,
    Stopped,
    StopReason,
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import TEXT_BYTES_MAX, Failure, Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import RANKS_MAX, WORKERS_PER_NODE_MAX, NodeSpec
from holdfast.protocol.rank_progress import FRAMES_MAX, Collective, Frame, RankProgress, RankSample, Stage

text = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)
number = st.integers(0, 2**53)
port = st.integers(1, 65535)
local_rank = st.integers(0, WORKERS_PER_NODE_MAX - 1)
local_ranks = st.lists(local_rank, max_size=4).map(tuple)
rank = st.integers(0, RANKS_MAX)
failures = st.builds(
    Failure,
    rank=rank,
    local_rank=local_rank,
    host=text,
    pid=number,
    exit_code=st.integers(-64, 255),
    message=text,
    traceback=text,
    lived_s=st.floats(0, 1e9),
)
nodes = st.builds(
    NodeSpec,
    member=text,
    host=text,
    nproc=local_rank,
    role=text,
    node_rank=st.none() | rank,
    local_addr=st.none() | text,
)
outcomes = st.builds(
    Outcome,
    kind=st.sampled_from(OutcomeKind),
    exit_code=st.integers(0, 255),
    message=text,
    verdict=st.none() | st.builds(Verdict, code=text, cause=text, culprit=st.none() | failures),
)
progress = st.builds(
    RankProgress,
    local_rank=local_rank,
    stage=st.sampled_from(Stage),
    steps=number,
    age_s=st.floats(0, 1e9),
    own_s=st.floats(0, 1e9),
)
samples = st.builds(
    RankSample,
    local_rank=local_rank,
    pid=number,
    state=st.sampled_from(["R", "S", ""]),
    cpu_s=st.floats(0, 1e9),
    frames=st.lists(st.builds(Frame, file=text, line=rank, function=text), max_size=3).map(tuple),
    note=text,
)
from_agent = st.one_of(
    st.builds(Join, node=nodes, last_generation=number),
    st.builds(Prepared, generation=number, store_port=st.none() | port),
    st.builds(WorkerDone, generation=number, local_rank=local_rank, left=st.none() | failures),
    st.builds(WorkersFailed, generation=number, failures=st.lists(failures, max_size=3).map(tuple)),
    st.builds(Stopped, generation=number),
    st.builds(StoreLost, generation=number),
    st.builds(Leave, reason=text),
    st.builds(Progress, generation=number, ranks=st.lists(progress, max_size=3).map(tuple)),
    st.builds(CanGoOn, generation=number, local_ranks=local_ranks),
    st.builds(ReplacementReady, generation=number, local_ranks=local_ranks),
    st.builds(ReplacementFailed, generation=number, failures=failures.map(lambda failure: (failure,))),
    st.builds(CannotRegroup, generation=number, text=text),
    st.builds(Ping, number=number),
)
assigns = st.builds(
    Assign,
    generation=number,
    restart_count=rank,
    group_rank=rank,
    group_world_size=rank,
    rank_base=rank,
    world_size=rank,
    role_rank_base=rank,
    role_world_size=rank,
    hosts_store=st.booleans(),
    local_ranks=st.none() | local_ranks,
)
from_coordinator = st.one_of(
    st.builds(Joined, lease_s=st.floats(0, 1e6), fence_s=st.floats(0.1, 1e6), ping_interval_s=st.floats(0.1, 1e6)),
    st.builds(Waiting, text=text),
    assigns,
    st.builds(
        Start,
        generation=number,
        master_addr=text,
        master_port=port,
    ),
    st.builds(Regroup, assign=assigns, safe_point=number, text=text),
    st.builds(Replace, generation=number, local_ranks=local_ranks),
    st.builds(Stop, generation=number, reason=st.sampled_from(StopReason), text=text),
    st.builds(Notice, text=text),
    st.builds(Finish, outcome=outcomes),
    st.builds(Pong, number=number),
    st.builds(Refuse, code=text, text=text),
)


@given(from_agent)
def test_agent_messages_come_back(message: FromAgent) -> None:
    assert decode_from_agent(encode(message)) == message


@given(from_coordinator)
def test_coordinator_messages_come_back(message: FromCoordinator) -> None:
    assert decode_from_coordinator(encode(message)) == message


@given(from_agent)
def test_a_message_is_good_in_one_direction_only(message: FromAgent) -> None:
    with pytest.raises(ProtocolError):
        decode_from_coordinator(encode(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode_any in (decode_from_agent, decode_from_coordinator):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode_any(data), (AgentMessage, CoordinatorMessage))


@given(from_agent, st.integers(0, 10_000), st.integers(1, 255))
def test_an_altered_message_is_a_message_or_a_protocol_error(message: FromAgent, place: int, change: int) -> None:
    data = bytearray(encode(message))
    data[place % len(data)] ^= change
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_from_agent(bytes(data)), AgentMessage)


@pytest.mark.parametrize(
    "message",
    [
        ["join", {"member": "a#1", "host": "a", "nproc": 10**9}],
        ["join", {"member": "a#1", "host": "a", "nproc": 1, "node_rank": -1}],
        ["join", {"member": "a#1", "host": "a", "nproc": 1}, 2**64 - 1],
        ["join", {"member": "a#1", "host": "a", "nproc": 1}, 0, float("nan")],
        ["join", {"member": "a#1", "host": "a", "nproc": 1}, 0, -1.0],
        ["join", {"member": "a#1", "host": "a", "nproc": 1}, 7, 0.0, [2**63, 0, 1, 0]],
        ["join", {"member": "a#1", "host": "a", "nproc": 1, "versions": dict.fromkeys(map(str, range(999)), "1")}],
        ["prepared", 1, 0],
        ["prepared", 1, 70_000],
        ["done", 1, 2**62],
        ["held", 1, 2**64 - 1],
        ["progress", 1, [[0, "stepping", 2**64 - 1]]],
        ["progress", 1, [[0, "stepping", 1, float("nan")]]],
        ["progress", 1, [[0, "stepping", 1, 0.0, float("inf")]]],
        ["progress", 1, [[0, "starting"]] * 100_000],
        ["ping", 2**64 - 1],
        ["failed", 1, [{"rank": -1, "local_rank": 0, "host": "a", "pid": 1, "exit_code": 1}]],
        ["failed", 1, [{"rank": 0, "local_rank": 0, "host": "a", "pid": 1, "exit_code": 1, "timestamp": 2**63}]],
        ["looked", 1, 1, [[0, 1, "S", float("nan")]]],
    ],
)
def test_a_number_that_no_honest_peer_sends_is_no_message(message: list[object]) -> None:
    with pytest.raises(ProtocolError):
        decode_from_agent(msgspec.msgpack.encode(message))


EVIL = "n1\x1b[2J\x1b]0;title\x07\nholdfast: job done\r\u202e"


def test_a_peers_words_are_clean_when_they_come_in() -> None:
    node = NodeSpec(member=EVIL, host=EVIL, nproc=1, role=EVIL, local_addr=EVIL, versions={EVIL: EVIL})
    failure = Failure(
        rank=0, local_rank=0, host=EVIL, pid=1, exit_code=1, message=EVIL, traceback=f"a\n  {EVIL}", facts={"x": EVIL}
    )
    for message in (
        Join(node),
        Leave(EVIL),
        Ask(1, "kill", EVIL),
        WorkersFailed(1, (failure,)),
    ):
        shown = repr(decode_from_agent(encode(message)))
        assert "\\x1b" not in shown
        assert "title" not in shown
        assert "\\r" not in shown
        assert "202e" not in shown
    joined = decode_from_agent(encode(Join(node)))
    assert isinstance(joined, Join)
    assert joined.node.host == "n1 holdfast: job done"
    long = decode_from_agent(encode(Join(NodeSpec(member="a" * 10_000, host="b" * 10_000, nproc=1))))
    assert isinstance(long, Join)
    assert len(long.node.host) == 255
    for word in (Notice(EVIL), Finish(Outcome(kind=OutcomeKind.FAILED, exit_code=1, message=EVIL)), Refuse("x", EVIL)):
        assert "\\x1b" not in repr(decode_from_coordinator(encode(word)))


def test_the_words_of_a_sample_are_clean_when_they_come_in() -> None:
    sample = RankSample(0, 1, EVIL, 0.0, (Frame(EVIL, 1, EVIL),), EVIL)
    shown = repr(decode(msgspec.msgpack.Decoder(Sampled), encode_extended(Sampled((sample,))), "an extension"))
    assert "title" not in shown
    assert "\\x1b" not in shown


def test_a_traceback_and_the_last_output_keep_their_lines() -> None:
    failure = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, traceback="Traceback:\n  \x1b[31mx\x1b[0m\n")
    failure = msgspec.structs.replace(failure, stderr_tail="a\nb", stdout_tail="c\nd")
    message = decode_from_agent(encode(WorkersFailed(1, (failure,))))
    assert isinstance(message, WorkersFailed)
    assert message.failures[0].traceback == "Traceback:\n  x\n"
    assert (message.failures[0].stderr_tail, message.failures[0].stdout_tail) == ("a\nb", "c\nd")


class OpenedError(Exception):
    """Raised by a pickle that was opened."""


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (_spring, ())


def _spring() -> None:
    raise OpenedError


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Trap()),
        msgspec.msgpack.encode(["join"]),
        msgspec.msgpack.encode(["unknown", 1]),
        msgspec.msgpack.encode({"type": "ping", "number": 1}),
        msgspec.msgpack.encode(["ping", "1"]),
        msgspec.msgpack.encode(["ping", 1]) + b"\x00",
        b"\x91" * 100_000,
        b"\x92\xa4ping\xdf\xff\xff\xff\xff",
        b"",
    ],
)
def test_bad_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_agent(data)


def test_later_versions_may_add_fields_at_the_end() -> None:
    assert decode_from_agent(msgspec.msgpack.encode(["ping", 7, "new"])) == Ping(number=7)


def failure(rank: int, words: str) -> Failure:
    return Failure(
        rank=rank,
        local_rank=rank,
        host="h",
        pid=1,
        exit_code=1,
        message="ValueError: m",
        traceback=words,
        stderr_tail=words,
        stdout_tail=words,
    )


def test_a_whole_rack_of_failures_still_fits_into_a_frame() -> None:
    message = WorkersFailed(
        generation=1, failures=tuple(failure(rank, "x" * TEXT_BYTES_MAX + "end") for rank in range(256))
    )
    data = encode(message)
    assert len(data) <= MESSAGE_BYTES_MAX
    decoded = decode_from_agent(data)
    assert isinstance(decoded, WorkersFailed)
    assert [each.rank for each in decoded.failures] == list(range(256))
    assert all(each.traceback.endswith("end") and each.message == "ValueError: m" for each in decoded.failures)


def test_the_culprit_keeps_its_words() -> None:
    culprit = failure(3, "y" * TEXT_BYTES_MAX)
    crowd = tuple(failure(rank, "x" * TEXT_BYTES_MAX) for rank in range(10_000))
    verdict = Verdict(code="HF200", cause="c", culprit=culprit, collateral=crowd)
    data = encode(Finish(Outcome(kind=OutcomeKind.FAILED, exit_code=1, verdict=verdict)))
    assert len(data) <= MESSAGE_BYTES_MAX
    decoded = decode_from_coordinator(data)
    assert isinstance(decoded, Finish)
    assert decoded.outcome.verdict is not None
    assert decoded.outcome.verdict.culprit == culprit


def lost_job(ranks: int, failure: Failure) -> Outcome:
    """All ranks failed alike, with all that a rank may report."""
    crowd = tuple(msgspec.structs.replace(failure, rank=rank) for rank in range(1, ranks))
    verdict = Verdict(code="HF220", cause="c", culprit=failure, collateral=crowd)
    return Outcome(kind=OutcomeKind.FAILED, exit_code=1, verdict=verdict)


def detailed() -> Failure:
    collective = Collective(
        group="tensor", number=1, operation="all_reduce", tensors="[4096, 8192] bfloat16", done=False
    )
    details = dict.fromkeys(map(str, range(16)), "bfloat16[4096, 8192]")
    return msgspec.structs.replace(
        failure(0, "x" * 8000), collectives=(collective,) * 16, tensors=details, facts=details, stdout_tail="y" * 8000
    )


@pytest.mark.parametrize("ranks", [100, 4000])
def test_an_outcome_fits_into_a_frame_whatever_carries_it(ranks: int) -> None:
    """A charter that does not would end the coordinator, and with it the verdict."""
    outcome = lost_job(ranks, detailed())
    charter = Charter(CharterPosition(1, 1), (), outcome=outcome)
    carriers = [
        Finish(outcome),
        Renew(1, 1, charter),
        Polled(1, granted=False, charter=charter),
        ReportCharter(charter, 1, 0.0),
    ]
    for carrier in carriers:
        data = encode(carrier)
        assert len(data) <= MESSAGE_BYTES_MAX
        text = msgspec.json.encode(msgspec.msgpack.decode(data)).decode()
        assert text.count("ValueError: m") == ranks
        assert text.count("y" * 8000) >= 1, "the cause keeps its words"


class Sampled(msgspec.Struct):
    samples: tuple[RankSample, ...]


def test_the_stacks_of_very_many_workers_lose_their_outer_frames() -> None:
    frames = tuple(Frame(f"/{'long/' * 40}{depth}\udce9.py", depth, "f") for depth in range(FRAMES_MAX))
    samples = tuple(RankSample(rank, rank, "S", 1.0, frames) for rank in range(2000))
    sent: list[bytes] = []
    send_samples(lambda message: sent.append(encode_extended(message)), Sampled, samples)
    decoded = msgspec.msgpack.decode(sent[0], type=Sampled).samples
    assert [each.local_rank for each in decoded] == list(range(2000))
    assert all(0 < len(each.frames) < FRAMES_MAX and each.frames[0].file.endswith("/0?.py") for each in decoded)


def test_words_that_are_no_text_still_travel() -> None:
    decoded = decode_from_agent(encode(WorkersFailed(generation=1, failures=(failure(0, "caf\udce9"),))))
    assert isinstance(decoded, WorkersFailed)
    assert decoded.failures[0].traceback == "caf?"


def test_what_cannot_be_cut_is_refused_here() -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        encode(Leave(reason="x" * MESSAGE_BYTES_MAX))


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at these places (taken modulo its length)."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def test_the_preamble_is_fixed_for_all_versions() -> None:
    assert preamble(1) == b"HOLDFAST\x00\x01"
    assert len(preamble()) == PREAMBLE_BYTES


@given(st.integers(0, 65535), st.binary(max_size=8))
def test_preamble_is_read_back(version: int, rest: bytes) -> None:
    assert read_preamble(preamble(version) + rest) == version


@given(st.integers(0, PREAMBLE_BYTES - 1))
def test_a_part_of_a_preamble_waits(length: int) -> None:
    assert read_preamble(preamble()[:length]) is None


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", STORE_MAGIC, b"X", b"HOLDFASX", b"HOLX"])
def test_a_stranger_is_known_by_its_first_wrong_byte(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="not the holdfast protocol"):
        read_preamble(first)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (b"GET / HTTP/1.1", "an HTTP request"),
        (b"HTTP/1.1 400 Bad", "an HTTP answer"),
        (b"\x16\x03\x01\x02\x00", "a TLS client"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (STORE_MAGIC + b"\r*", "a torch TCPStore client"),
        (b"\xff\n", "it begins with b'\\xff\\n'"),
    ],
)
def test_strangers_are_named(first: bytes, name: str) -> None:
    assert describe_stranger(first) == name


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 3000), max_size=20))
def test_frames_come_back_whatever_the_chunks(payloads: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader(HELLO_BYTES_MAX)
    found = [payload for chunk in chunks(b"".join(map(frame, payloads)), cuts) for payload in reader.feed(chunk)]
    assert found == payloads
    assert not reader.torn


@given(st.lists(st.binary(max_size=30), max_size=8), st.lists(st.integers(0, 300), max_size=20))
def test_a_chunk_that_is_one_frame_needs_no_buffer(payloads: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader(HELLO_BYTES_MAX)
    found: list[bytes] = []
    for chunk in chunks(b"".join(map(frame, payloads)), cuts):
        only = reader.only(chunk)
        found += reader.feed(chunk) if only is None else [only]
    assert found == payloads
    assert reader.only(frame(b"abc")) == b"abc"
    assert reader.only(frame(bytes(HELLO_BYTES_MAX + 1))) is None
    assert not reader.torn


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=10))
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(100)
    try:
        for chunk in chunks(data, cuts):
            assert all(len(payload) <= 100 for payload in reader.feed(chunk))
    except ProtocolError:
        pass


def test_an_oversized_frame_is_refused_before_it_is_there() -> None:
    reader = FrameReader(HELLO_BYTES_MAX)
    with pytest.raises(ProtocolError, match="over the limit"):
        reader.feed((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))


def test_the_limit_itself_is_allowed() -> None:
    assert FrameReader(10).feed(frame(b"0123456789")) == [b"0123456789"]


def test_the_limit_can_be_raised_between_two_frames_of_one_chunk() -> None:
    reader = FrameReader(4)
    reader.push(frame(b"abc") + frame(b"0123456789"))
    assert reader.pop() == b"abc"
    reader.limit_bytes_max = 10
    assert reader.pop() == b"0123456789"
    assert reader.pop() is None


def test_a_half_frame_is_torn() -> None:
    reader = FrameReader(100)
    assert reader.feed(frame(b"abc")[:-1]) == []
    assert reader.torn


def test_nothing_is_sent_that_no_peer_would_accept() -> None:
    with pytest.raises(ProtocolError):
        frame(bytes(FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize("kind", TEXTLESS)
def test_what_is_not_cleaned_has_no_text(kind: type[msgspec.Struct]) -> None:
    assert '"type":"string"' not in msgspec.json.encode(msgspec.json.schema(kind)).decode()
