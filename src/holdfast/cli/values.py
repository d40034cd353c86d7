"""Texts of single options to values: node ranges, stream choices, rank lists, signals; and values back to words, for
the line of another node.

Raises ValueError with the problem in words: the caller knows which option it was. Starts nothing.
"""

from __future__ import annotations

import shlex
import signal
import socket
from typing import TYPE_CHECKING

from holdfast.cli.grammar import ABOUT_US
from holdfast.cli.option_table import FLAG, HOSTS, LIST, Option
from holdfast.protocol.options import Endpoint, Std, StreamChoice
from holdfast.text import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.options import RunOptions


LOOPBACK = "127.0.0.1"
PORT_MAX = 65535
UNCATCHABLE = ("SIGKILL", "SIGSTOP")
ONLY_HERE = frozenset({*ABOUT_US, "plan", "config", "no_config"})
STARTED_BY_OTHERS = ("SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST")
"""Variables that are set where no person starts the other nodes."""


def node_range(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`.

    >>> node_range("2"), node_range("1:4")
    ((2, 2), (1, 4))
    """
    parts = text.split(":")
    if len(parts) > 2:
        raise ValueError("must be N or MIN:MAX")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError("must be a number N or a range MIN:MAX") from None
    least, most = numbers[0], numbers[-1]
    if least < 1:
        raise ValueError("a job needs at least 1 node")
    if least > most:
        raise ValueError(f"the minimum {least} is above the maximum {most}")
    return least, most


def stream_choice(text: str) -> StreamChoice:
    """`-r`/`-t`: one digit for all local ranks, or `RANK:DIGIT,...`; ranks not named get none.

    >>> stream_choice("0:3,12:1").for_rank(12)
    <Std.OUT: 1>
    """
    if is_stream(text):
        return StreamChoice(every=Std(int(text)))
    by_rank: dict[int, Std] = {}
    for item in text.split(","):
        rank, _, stream = item.partition(":")
        if not is_number(rank) or not is_stream(stream):
            raise ValueError("must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or RANK:N,RANK:N")
        by_rank[int(rank)] = Std(int(stream))
    return StreamChoice(by_local_rank=by_rank)


def is_stream(text: str) -> bool:
    return text in ("0", "1", "2", "3")


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def rank_list(text: str) -> frozenset[int] | None:
    """`0,1`; None (all ranks) when empty.

    >>> sorted(rank_list("2,0"))
    [0, 2]
    """
    if not text:
        return None
    try:
        return frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError("must be local ranks separated by commas, as in 0,1,2") from None


def serving_place(text: str) -> Endpoint:
    """`[HOST:]PORT`; without a host the loopback interface, port 0 is any free one.

    >>> str(serving_place("9400")), str(serving_place("0.0.0.0:9400")), str(serving_place("[::1]:9400"))
    ('127.0.0.1:9400', '0.0.0.0:9400', '[::1]:9400')
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host = LOOPBACK
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("write an IPv6 address in brackets: [address]:port")
    if not is_number(port) or int(port) > PORT_MAX or not host:
        raise ValueError(f"{text!r}: must be PORT or HOST:PORT, a port is a number from 0 to {PORT_MAX}")
    return Endpoint(host=host, port=int(port))


def signal_numbers(text: str) -> tuple[tuple[int, ...], list[str]]:
    """Signals named in a comma list, in order, and the names that are none.

    >>> signal_numbers("SIGTERM,SIGFOO")
    ((15,), ['SIGFOO'])
    """
    numbers: list[int] = []
    unknown: list[str] = []
    for name in (item.strip() for item in text.split(",")):
        if name in UNCATCHABLE:
            raise ValueError(f"{name} cannot be handled by any process")
        if name in signal.Signals.__members__:
            numbers.append(int(signal.Signals[name]))
        elif name:
            unknown.append(name)
    return tuple(dict.fromkeys(numbers)), unknown


def absent_ranks(ranks: set[int] | frozenset[int], nproc: int) -> list[int]:
    """Those that this node does not have."""
    return sorted(rank for rank in ranks if not 0 <= rank < nproc)


def words_elsewhere(parsed: Parsed, table: Sequence[Option], settled: Mapping[str, str | None]) -> list[str]:
    """The line of another agent: what was given, however it was, and what is settled (None: left out)."""
    words = []
    for option in table:
        if option.dest in settled or option.group == HOSTS or option.dest in ONLY_HERE:
            continue
        if parsed.given(option.dest):
            words += words_of(option, getattr(parsed.values, option.dest))
    for dest, text in settled.items():
        name = "--" + dest.replace("_", "-")
        if text is not None:
            words.append(f"{name}={text}" if text else name)
    return [*words, "--", parsed.values.training_script, *parsed.values.training_script_args]


def words_of(option: Option, value: object) -> list[str]:
    if option.kind == FLAG:
        return [option.name] if value else []
    if option.kind == LIST:
        assert isinstance(value, (list, tuple))
        return [f"{option.name}=" + ",".join(str(item).replace(",", ",,") for item in value)]
    return [] if value is None else [f"{option.name}={value}"]


def line_of_others(
    parsed: Parsed, command: str, table: Sequence[Option], options: RunOptions, environ: Mapping[str, str]
) -> str:
    """What a person has to type on each other node; empty where there is none, or something else starts them."""
    job = options.job
    if options.standalone or job.max_nodes == 1 or any(name in environ for name in STARTED_BY_OTHERS):
        return ""
    settled: dict[str, str | None] = {"node_rank": None, "local_addr": None}
    place, own = options.endpoint, socket.gethostname()
    is_static = job.fixed_ranks and not parsed.given("rdzv_endpoint")
    if options.etcd is None and options.third_party is None and is_loopback(place.host):
        settled |= {"master_addr": own} if is_static else {"rdzv_endpoint": f"{own}:{place.port}"}
    if job.fixed_ranks:
        settled["node_rank"] = str(1 - (options.node_rank or 0)) if job.max_nodes == 2 else "RANK"
    words = words_elsewhere(parsed, table, settled)
    if not parsed.values.training_script.startswith("-"):
        words.remove("--")
    return shlex.join(["holdfast", command, *words])
