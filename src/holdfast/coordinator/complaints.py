"""Reads from the evidence of failed workers whether they may be consequences of another failure, and how long the stop
waits for the report of that one: a stop ends the worker that is to blame before it has reported.

Pure. The patterns are for what torch, Python and scripts say about other ranks. Which worker is to blame is decided
afterwards, by the judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from holdfast.protocol.exit_codes import REQUESTS
from holdfast.protocol.outcome import Failure, is_own_code

REASON_S = 2.0
"""The stop waits at most this long for the report of the rank that closed a connection, or of which the others report:
Python needs a second or two to end, and `finally: destroy_process_group()` comes before the traceback."""
AGREED_S = 0.05
"""The stop waits at most this long after an exception that the script raised itself: if the ranks have agreed to end,
each of them raises within milliseconds. It waits until all have reported, or one reports a lost connection. Each crash
of a job with a process group costs this time, so it must be a small part of a restart."""
SEARCHED_CHARACTERS = 4096
ABORTED = -6
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms for|wait timeout after \d+ms|DistStoreError: Socket Timeout"
    r"|Watchdog caught collective operation timeout|timed out in monitoredBarrier|failed to pass monitoredBarrier"
    r"|NCCL operation timed out|Operation timed out after \d+ ms|Aborting process(?: on rank \d+)? due to timeout"
)
"""Messages of torch when a collective or its store has waited for longer than the group's time-out. The last three are
those of its newer NCCL backend (c10d/nccl2): WorkNCCL::setTerminalStatus, WorkNCCL::checkStatus and
ProcessGroupNCCL::abortProcess."""
CLOSED = re.compile(
    r"^[\w.]*(?:ConnectionResetError|ConnectionAbortedError|BrokenPipeError|EOFError)\b|ncclRemoteError"
    r"|remote process exited|received errors while waiting for send/recv from rank"
    r"|due to error - (?:nccl hit async error|timeout watchdog detected operation error)"
    r"|gloo/transport/[\s\S]*(?:[Cc]onnection (?:closed|reset) by|[Bb]roken pipe)",
    re.MULTILINE,
)
"""Messages of torch and Python when the other side has closed the connection. `due to error - …` is what the watchdog
of nccl2 gives ProcessGroupNCCL::abortProcess as reason."""
NOTICED = re.compile(r"op\.preamble\.length|Detected mismatch between collectives|CollectiveFingerPrint")
"""Messages of checks that find that ranks called different collectives. The rank that runs the check may be right."""
MODELS_DIFFER = re.compile(r"DDP expects same model across all ranks|appears not to match (?:sizes|strides)")
"""Messages of DDP if ranks have different models. Each rank compares itself with another one."""
_MEMBER = r"(?:ranks?|workers?|process(?:es)?|peers?|replicas?|nodes?|hosts?|participants?|members?|trainers?)"
_FAILED = (
    r"(?:fail\w*|error\w*|exception\w*|raised?|abort\w*|crash\w*|died?|dead|broke\w*|stopp?ed|problem|trouble|bad"
    r"|unhealthy|not (?:ok|healthy)|unsuccessful\w*)"
)
_OTHER = (
    r"(?:another|other|some|any|one|an?|remote|a different|at least one|one or more|one of (?:the|our)|sibling|fellow)"
    r" (?:(?:other|remote|of the) )*"
)
RELAYED = re.compile(
    rf"\b{_OTHER}{_MEMBER}\b(?:\(s\))?.{{0,30}}\b{_FAILED}"
    rf"|\b{_FAILED}\b.{{0,30}}\b(?:on|in|at|by|from|of) {_OTHER}{_MEMBER}\b"
    rf"|\bnot (?:all|every) (?:(?:of )?(?:the|our) )?{_MEMBER}\b"
    rf"|\b(?:remote|peers?)[ -](?:side )?{_FAILED}|\b{_FAILED} (?:on|of|in|by|from) (?:the )?(?:peers?|others)\b",
    re.IGNORECASE,
)
"""Texts of scripts whose ranks agree to end: `another rank failed`, `error on some rank`, `not all ranks succeeded`."""
JOINT = re.compile(r"^(?:During handling of the above|The above) exception[^\n]*:$", re.MULTILINE)
ON_PURPOSE = re.compile(r"^ +(?:\S.*[:;] *)?raise\b.*\n(?:[ ^~]+\n)?(?=\S)", re.MULTILINE)
"""The innermost line of a traceback, if it is a `raise`, above the exception."""
LIBRARY_FRAME = re.compile(r"site-packages|dist-packages|/lib/python3")


class Complaint(Enum):
    """What a failure says about other ranks."""

    NONE = "a cause of its own"
    TIMED_OUT = "its wait for others timed out"
    CLOSED = "another rank closed the connection"
    RELAYED = "another rank failed or is wrong"
    ON_PURPOSE = "the script ended it: perhaps all ranks have agreed to end"


def may_be_consequence(failure: Failure) -> bool:
    """Whether the exit status is one of a program that ended itself, or of one that torch's watchdog aborted. The
    evidence of such a worker may name another one as the culprit. Every other status is a cause of its own."""
    asks = failure.exit_code in REQUESTS
    return (is_own_code(failure.exit_code) and not asks) or failure.exit_code == ABORTED


def timed_out(failures: Iterable[Failure]) -> bool:
    """Whether all of these are time-outs of a collective. The missing ranks are then still alive."""
    return all(complaint_of(each) is Complaint.TIMED_OUT for each in failures)


def awaited_s(failures: Sequence[Failure], earlier: Sequence[Failure]) -> float:
    """Time for which the stop waits for other reports after these failures (s); 0: one of them is a cause.

    `earlier`: failures that were reported before these.
    """
    new = {complaint_of(each) for each in failures}
    old = {complaint_of(each) for each in earlier} or new
    if Complaint.NONE in new:
        return 0.0
    if Complaint.ON_PURPOSE in new | old:  # together with any other complaint it is the cause of that
        return AGREED_S if new | old == {Complaint.ON_PURPOSE} else 0.0
    return REASON_S


def complaint_of(failure: Failure) -> Complaint:
    """What the evidence of this failure says. Of a chain of exceptions, the root counts."""
    if failure.after_stop or not may_be_consequence(failure):
        return Complaint.NONE
    root, last = _root_and_last(failure)
    # The message is that of the last exception: a script that wraps what a collective raises puts its own words there
    # (test_the_root_of_a_chain_counts).
    text = f"{failure.message[:SEARCHED_CHARACTERS]}\n{root}"
    # torch's watchdog writes to stderr and aborts the process: then there is no exception.
    if TIMED_OUT.search(f"{text}\n{failure.stderr_tail[-SEARCHED_CHARACTERS:]}"):
        return Complaint.TIMED_OUT
    if NOTICED.search(f"{text}\n{failure.stderr_tail[-SEARCHED_CHARACTERS:]}"):
        return Complaint.RELAYED
    if MODELS_DIFFER.search(text):
        return Complaint.RELAYED
    if failure.exit_code > 0 and CLOSED.search(text):
        return Complaint.CLOSED
    if failure.exit_code > 0 and RELAYED.search(failure.message.partition("\n")[0] or last):
        return Complaint.RELAYED
    # Ranks agree by a collective: without a process group there is nothing to wait for.
    if failure.exit_code <= 0 or not failure.in_group:
        return Complaint.NONE
    # It called sys.exit without an exception. Where no output is kept, nothing was read, and the lack of words says
    # nothing.
    silent = not failure.message and bool(failure.stderr_file)
    return Complaint.ON_PURPOSE if silent or _is_raised(root) else Complaint.NONE


def _root_and_last(failure: Failure) -> tuple[str, str]:
    """The traceback of the root exception, and the last line of stderr."""
    found = JOINT.search(failure.traceback)
    root = failure.traceback[: found.start()] if found else failure.traceback
    lines = failure.stderr_tail.rstrip().splitlines()
    return root[-SEARCHED_CHARACTERS:], lines[-1] if lines else ""


def _is_raised(root: str) -> bool:
    """Whether the innermost frame is of the script, and its line a `raise`."""
    frame = root.rfind('  File "')
    innermost = root[max(0, frame) :]
    return not LIBRARY_FRAME.search(innermost.partition("\n")[0]) and bool(ON_PURPOSE.search(innermost))
