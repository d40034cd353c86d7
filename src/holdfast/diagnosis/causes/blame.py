"""Finds the failures to blame: by whether each reports a cause of its own or a problem with its peers, and, if all
ranks agreed to end, by what only one of them says.

Pure. A rank that reports broken connections to peers is a victim if any other rank has a cause of its own. Between
equal failures the order of arrival decides. Quoted texts and errors of servers that are not peers are not complaints.

Ranks agree to end if one rank caught an error, the ranks exchanged that by a collective or the store, and then all
raised or left: in any order and often with the same words. The rank to blame is then the one that the words name, or
the one whose evidence has something that no other has: another root of its chain of exceptions, or a traceback or an
error that it wrote to stderr before.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct, structs

from holdfast.coordinator.complaints import RELAYED
from holdfast.diagnosis.causes.exception_text import ExceptionText, unwrapped
from holdfast.protocol.outcome import Failure, is_own_code


class Blame(IntEnum):
    """Blame of a failure; a smaller value is more to blame."""

    OWN = 0
    """The worker has a cause of its own, and failed before any worker was stopped."""
    OWN_LATE = 1
    """The worker has a cause of its own that cannot come from the stop, but its end was reported after complaints of
    others."""
    RELAYED = 2
    """The worker reports that another rank failed: the ranks agreed to end."""
    LOOSE = 3
    """The worker reports a connection or a time-out, perhaps of a training peer."""
    WAITED = 4
    """The worker could not reach its peers, or its wait for them timed out."""
    WAITED_LATE = 5
    """The worker's wait for its peers timed out, but its end was reported after the stop."""
    CUT = 6
    """A peer closed the connection."""
    STOPPED = 7
    """The worker ended because it was stopped: at most a consequence."""


def types_of(names: str) -> frozenset[str]:
    """A set of exception classes from their names, separated by blanks."""
    return frozenset(names.split())


class AnyCase:
    """A pattern that ignores case, three times as fast as re.IGNORECASE, which cannot skip to possible beginnings.

    A lost node causes thousands of failures, and all are read before the job continues.
    """

    def __init__(self, pattern: str) -> None:
        self._small = re.compile(re.sub(r"(?<!\\)[A-Z]", lambda capital: capital[0].lower(), pattern), re.MULTILINE)

    def search(self, text: str) -> re.Match[str] | None:
        return self._small.search(text.lower())


OWN_TROUBLE = AnyCase(
    r"CUDA (?:error|out of memory)|CUDA-capable|unhandled cuda error|Cuda failure|device-side assert|out of memory"
    r"|\bHIP (?:error|out of memory)|CUBLAS_STATUS|CUDNN_STATUS"
    r"|uncorrectable|Xid|fallen off the bus|Duplicate GPU|no socket interface found|Unable to find (?:address"
    r"|interface)"
    r"|Unable to resolve hostname|ifa != nullptr"
    r"|EADDRINUSE|address already in use|No space left|Too many open files|Cannot allocate memory"
    r"|can't start new thread"
    r"|Detected mismatch between collectives|CollectiveFingerPrint|is inconsistent|appears not to match"
    r"|Expected to have finished reduction|invalid usage|Ran out of input|DataLoader (?:worker|timed)",
)
"""Texts that always name a problem of the failed worker itself."""

TRANSPORT = AnyCase(
    r"gloo|\bNCCL|nccl\w+|\bRCCL|\bHCCL|oneCCL|ProcessGroup\w*|process group|TCPStore|HashStore|c10d|WorkNCCL"
    r"|Dist(?:Network|Store|Backend)?Error|monitored ?Barrier|recvValue|sendBytes|\bstore->|rendezvous"
    r"|collective operation|communicator|MASTER_ADDR|holdfast.{0,40}peer|pair\.cc|all_?reduce|all_?gather",
)
"""Libraries and functions by which training peers communicate."""

GENUINE = re.compile(
    r"\w\.(?:cc|cpp|hpp|h):\d|\[\d{1,3}(?:\.\d{1,3}){3}\]:\d+|\[Rank \d+\]|WorkNCCL\(|^Last error:", re.MULTILINE
)
"""The original text of a library, not a quotation of it."""

ENDED = AnyCase(
    r"connection (?:was )?(?:likely )?(?:closed|reset|aborted|lost)|closed (?:by|the connection)|reset by peer"
    r"|broken pipe"
    r"|remote process exited|remote (?:worker|peer)|ncclRemoteError|remote error|caused connection abort|failed to recv"
    r"|got 0 bytes|end ?of ?file|EOFError|peer (?:has )?(?:closed|gone|failed|disconnected)|socket (?:closed|hang ?up)"
    r"|was aborted|been aborted|aborted (?:due|because)|pair closure|sendBytes failed|recvValue failed"
    r"|errors? while waiting for send/recv|NCCL operation failed",
)
"""Texts that say that the other side closed the connection."""

WAITED = AnyCase(
    r"timed? ?-?out|timeout|watchdog caught|failed to pass|failed to connect|could not connect"
    r"|connect(?:ion)? .{0,60}(?:failed|refused)"
    r"|no route to host|network is unreachable|(?:system|internal) error|ncclSystemError|ncclInternalError|heartbeat"
    r"|clients joined|hasn't joined|deadline exceeded|interrupted system call",
)
"""Texts that say that the other side did not connect, or cannot be reached."""

SERVER = re.compile(
    r"/(?:requests|urllib3|httpx|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|wandb|mlflow"
    r"|comet_ml|neptune"
    r"|pymongo|redis|psycopg2?|asyncpg|pymysql|MySQLdb|kafka|paramiko|grpc|google|azure|clearml|datasets)/"
    r"|/urllib/request\.py|/http/client\.py| in do_handshake$"
)
"""Frames of clients: the other side is a server and not a training peer."""
SERVER_TEXT = AnyCase(
    r"\b(?:wandb|mlflow|requests|urllib3?|httpx|botocore|huggingface_hub|aiohttp|pymysql|psycopg2?|pymongo"
    r"|redis)\.\w|s3://|gs://"
    r"|HTTPS?Connection(?:Pool)?|urlopen error|HTTP Error|Max retries exceeded",
)
URL = AnyCase(r"https?://")
"""URLs are ignored in errors of communication libraries, because these name pages of documentation."""

OWN_CHILDREN = re.compile(
    r"/multiprocessing/|/torch/utils/data/|/concurrent/futures/|/subprocess\.py|/asyncio/subprocess"
)
"""Frames of communication with own child processes: the other side is a data-loader worker."""

NAMES_A_WAIT = AnyCase(
    r"timed? ?-?out|timeout|failed to pass|watchdog caught|connect to .{0,80}failed|failed to connect|no route to host"
    r"|refused|unreachable",
)
"""A time-out that also mentions closed connections, because it closed them itself."""

CONTROL_FLOW = types_of(
    "KeyError AttributeError IndexError StopIteration Empty NotImplementedError ImportError TypeError"
)

CONNECTION_TYPES = types_of(
    "BrokenPipeError ConnectionResetError ConnectionAbortedError ConnectionRefusedError EOFError"
)

PLAIN_TYPES = types_of(
    "ValueError KeyError IndexError TypeError AttributeError AssertionError NameError UnboundLocalError ImportError "
    "ModuleNotFoundError SyntaxError IndentationError ZeroDivisionError FloatingPointError OverflowError LookupError "
    "NotImplementedError RecursionError MemoryError UnicodeDecodeError UnicodeEncodeError FileNotFoundError "
    "PermissionError FileExistsError IsADirectoryError NotADirectoryError StopIteration JSONDecodeError"
)
"""Exceptions by which no library reports a lost peer: such texts in them are quotations."""

FROM_THE_STOP = AnyCase(
    r"\bSIG(?:TERM|INT|KILL|HUP)\b|killed by signal: Terminated|signal 15|KeyboardInterrupt|\bshutdown\b"
    r"|interpreter shutdown"
    r"|preempt|received signal|signum|Terminated",
)
"""Texts of a worker that ends because it is stopped."""

NATIVE_ENDS = frozenset({-signal.SIGABRT, -signal.SIGPIPE, -signal.SIGSEGV})
"""Exit codes of a process that a communication library ends after the loss of peers."""
STOP_SIGNALS = frozenset({-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})


def ranked(failures: Sequence[Failure]) -> list[tuple[Blame, Failure]]:
    """All failures, the most to blame first; equal ones in the order of arrival."""
    return sorted(((blame(failure), failure) for failure in failures), key=lambda pair: pair[0])


def first_own(failures: Sequence[Failure]) -> Failure | None:
    """The first failure with a cause of its own. There usually is one, so that later failures need not be read.

    The user's code may raise an error of its own about a peer. Then any other cause comes first, because the victim may
    have been reported before the culprit.
    """
    about_a_peer: Failure | None = None
    for each in failures:
        if each.after_stop or blame(each) is not Blame.OWN:
            continue
        if not _may_be_about_a_peer(each):
            return each
        about_a_peer = about_a_peer or each
    return about_a_peer


def _may_be_about_a_peer(failure: Failure) -> bool:
    parsed = ExceptionText(failure)
    text = unwrapped(parsed.root)
    return bool(parsed.raised and not OWN_TROUBLE.search(text) and (ENDED.search(text) or WAITED.search(text)))


def blame(failure: Failure) -> Blame:
    """The blame of one failure, from its text and its exit code."""
    parsed = ExceptionText(failure)
    if failure.after_stop:
        return _late(failure, parsed)
    return complaint(failure, parsed)


def complaint(failure: Failure, parsed: ExceptionText) -> Blame:
    """The blame from the failure's text alone: OWN, RELAYED, LOOSE, WAITED or CUT."""
    text = unwrapped(parsed.text if _is_control_flow(parsed) else parsed.root)
    # An exception in a thread of C++ aborts the process. Nothing but stderr says then whether a peer was the reason,
    # and without stderr (SIGABRT, SIGPIPE) it may have been one.
    if not text and failure.exit_code in NATIVE_ENDS:
        text = _native_complaint(parsed.stderr)
        if not text:
            return (
                Blame.LOOSE
                if failure.exit_code in (-signal.SIGABRT, -signal.SIGPIPE) and not parsed.stderr
                else Blame.OWN
            )
    if failure.out_of_memory or not failure.started:
        return Blame.OWN
    if relays(failure, parsed):
        return Blame.RELAYED
    # `NCCL error: unhandled cuda error` contains words of both: the problem of the worker itself decides.
    if not text or OWN_TROUBLE.search(text):
        return Blame.OWN

    ended, waited = ENDED.search(text), WAITED.search(text)
    if not (ended or waited or parsed.root_type in CONNECTION_TYPES):
        return Blame.OWN
    if parsed.root_type in PLAIN_TYPES or _is_no_peers(parsed, text):
        return Blame.OWN

    firm = of_peers(parsed, text)
    if parsed.raised:
        # The user's code raised this text. It is a complaint if it is a library's original message, as in
        # `raise RuntimeError(str(error)) from None`, and may only quote one otherwise.
        genuine = parsed.root_type in CONNECTION_TYPES or (firm and GENUINE.search(text))
        return Blame.LOOSE if genuine else Blame.OWN
    if not firm:
        return Blame.LOOSE
    # A rank whose wait timed out closes its connections, so that its text may contain both. It waited.
    return Blame.WAITED if waited and (not ended or NAMES_A_WAIT.search(text)) else Blame.CUT


def relays(failure: Failure, parsed: ExceptionText) -> bool:
    """Whether the script says in its own words that another rank failed, as an exception without another root or as the
    text of sys.exit."""
    if parsed.text:
        return bool(parsed.raised and RELAYED.search(parsed.root.partition("\n")[0]))
    return is_own_code(failure.exit_code) and bool(RELAYED.search(parsed.last_line))


def of_peers(parsed: ExceptionText, text: str) -> bool:
    """Whether text, exception or innermost frames belong to communication with training peers."""
    return bool(
        TRANSPORT.search(text) or TRANSPORT.search(parsed.root_type) or any(map(_is_transport, parsed.frames[-4:]))
    )


def speaks_of_peers(failure: Failure) -> bool:
    """Whether the failure's complaint is about a training peer."""
    parsed = ExceptionText(failure)
    return of_peers(parsed, unwrapped(parsed.root) or _native_complaint(parsed.stderr)) or not parsed.text


def is_complaint(text: str) -> bool:
    """Whether this text alone reports training peers that left or did not connect."""
    return bool(not OWN_TROUBLE.search(text) and TRANSPORT.search(text) and (ENDED.search(text) or WAITED.search(text)))


def _late(failure: Failure, parsed: ExceptionText) -> Blame:
    """The blame of a worker that ended after the stop, which may be the reason for its end."""
    # The exit status is one that a worker does not get from being stopped, so the cause is its own.
    if not failure.message and not failure.stop_may_cause:
        return Blame.OWN_LATE
    if not parsed.text or (failure.exit_code in STOP_SIGNALS and not failure.message):
        return Blame.STOPPED
    if FROM_THE_STOP.search(parsed.text) or FROM_THE_STOP.search(parsed.raised):
        return Blame.STOPPED
    match complaint(failure, parsed):
        case Blame.OWN:
            return Blame.OWN_LATE
        case Blame.RELAYED:
            return Blame.RELAYED
        case Blame.WAITED:
            return Blame.WAITED_LATE
        case _:
            return Blame.STOPPED


def _is_control_flow(parsed: ExceptionText) -> bool:
    """Whether the root is only control flow of a library (`except KeyError: …`); then the end of the chain counts."""
    return parsed.chained and parsed.root_type in CONTROL_FLOW and not parsed.in_users_code


def _native_complaint(stderr: str) -> str:
    """The text that a communication library wrote before the process was aborted."""
    if OWN_TROUBLE.search(stderr):
        return ""
    lines = [
        line for line in stderr.splitlines() if TRANSPORT.search(line) and (ENDED.search(line) or WAITED.search(line))
    ]
    return "\n".join(lines)


def _is_no_peers(parsed: ExceptionText, text: str) -> bool:
    # "Read timed out" of huggingface.co and a broken pipe of a data loader sound like a lost peer and are the worker's.
    if SERVER_TEXT.search(text) or (URL.search(text) and not TRANSPORT.search(text)):
        return True
    return any(SERVER.search(file) or OWN_CHILDREN.search(file) for file in parsed.frames[-6:])


def _is_transport(file: str) -> bool:
    return "/torch/distributed/" in file or "/deepspeed/comm" in file or "/horovod/" in file


# --- ranks that agreed to end -----------------------------------------------------------------------------------------

COMPARED_MAX = 64
"""Number of failures that are compared."""
NAMES_RANKS = re.compile(
    r"\b(?:global[ _])?ranks?(?:\(s\))?\W{0,4}(?:dict_keys\()?\W{0,3}(\d+(?:(?:,| and|, and)?\s*\d+)*)", re.IGNORECASE
)
OF_A_PART = re.compile(r"(?:\b(?:local|node|group)|parallel|\b[tdpecs]p)[\s_-]*$", re.IGNORECASE)
"""What stands before a rank that is counted within a node or a group: its number is not the rank of the job."""
SAYS_FAILED = re.compile(
    r"fail|error|exception|rais|abort|crash|died|dead|broke|\bnan\b|\binf\b|not finite|non-?finite|bad|invalid"
    r"|unhealthy|missing|caught|problem|corrupt|overflow|diverge|stopp",
    re.IGNORECASE,
)
ERROR_LINE = re.compile(
    r"\b\w*(?:Error|Exception)\b|\berror\b|\bfail(?:ed|ure)?\b|\bfatal\b|\bcritical\b", re.IGNORECASE
)
OF_HOLDFAST = re.compile(r"holdfast\.protocol\.errors\.\w+: (?:rank (\d+): )?")
"""An exception that holdfast.train raises on purpose, and the rank on which it began, if that is another one."""
PYTHON_WARNING = re.compile(r"^\S+:\d+: \w*Warning: (?:.*\n){1,12}?  \S.*\n", re.MULTILINE)
"""A warning of Python's on stderr, up to the source line below it: the program went on after it."""
EQUAL_CHARACTERS_MAX = 200


class Agreed(Struct, frozen=True):
    """The rank to blame, and what shows its cause."""

    culprit: Failure
    """The failure of that rank, one of the evidence."""
    seen: Failure
    """The culprit's failure with only the part of its text that is the cause, or the failure that reports it."""
    reported: str = ""
    """The other rank's words about the culprit, if the culprit's own text does not show its cause."""


def agreed(failures: Sequence[Failure], first: Failure) -> Agreed | None:
    """The rank to blame if `first`, which would be blamed otherwise, ended because the ranks had agreed to.

    None: they had not, or it is unknown which rank is to blame.
    """
    failures = failures[:COMPARED_MAX]
    parsed = ExceptionText(first)
    ours = OF_HOLDFAST.match(parsed.qualified)
    if ours is not None:  # holdfast.train raises on all ranks what went wrong on one, and names it
        its = next((each for each in failures if ours[1] and each.rank == int(ours[1]) and each is not first), None)
        return None if its is None or not OF_HOLDFAST.match(ExceptionText(its).qualified) else Agreed(its, its)

    named = _named_rank(failures, first, parsed)
    if named is first:
        return None
    if named is not None:
        named_text = ExceptionText(named)
        if named_text.text and named_text.text != parsed.text and not relays(named, named_text):
            return Agreed(named, named)  # its own exception says more than what it wrote before, such as a warning
        own = _only_here(named, [each for each in failures if each is not named])
        if own is not None:
            return Agreed(named, own)
        return Agreed(named, first, _first_line(unwrapped(parsed.text) or parsed.last_line))

    alike = [each for each in failures if _kind_of_end(each) == _kind_of_end(first)]
    if not relays(first, parsed) and (len(alike) < 2 or not _on_purpose(first, parsed)):
        return None
    # A root of the exception that no other rank has counts more than what a rank wrote before.
    for each in failures:
        if blame(each) in (Blame.OWN, Blame.OWN_LATE) and ExceptionText(each).text and _unlike(each, failures):
            return Agreed(each, each)
    for each in failures:
        own = _only_here(each, [other for other in failures if other is not each])
        if own is not None:
            return Agreed(each, own)
    return None


def _named_rank(failures: Sequence[Failure], first: Failure, parsed: ExceptionText) -> Failure | None:
    """The failure of the rank that the text of `first` names as failed: `loading failed on ranks [2]`; None: none.

    Ranks that all raise the same text name one of them. A single rank must speak of another one in its own words.
    """
    text = _first_line(parsed.text or parsed.last_line)
    if not SAYS_FAILED.search(text) or not _on_purpose(first, parsed):
        return None
    named = (found for found in NAMES_RANKS.finditer(text) if not OF_A_PART.search(text[: found.start()]))
    ranks = [int(number) for found in named for number in re.findall(r"\d+", found[1])]
    if not ranks or len(set(ranks)) >= max(2, len(failures)):
        return None
    return next((each for each in failures if each.rank == ranks[0]), None)


def _on_purpose(failure: Failure, parsed: ExceptionText) -> bool:
    """Whether the script ended itself: by `raise` in its own code, or by an exit code."""
    if parsed.text:
        return bool(parsed.raised) or parsed.type == "CheckpointException"
    return is_own_code(failure.exit_code)


def _kind_of_end(failure: Failure) -> tuple[int, str]:
    """A key that is equal for ranks that ended alike, except for numbers."""
    text = ExceptionText(failure).text
    return (0 if text else failure.exit_code), re.sub(r"\d+", "0", text[:EQUAL_CHARACTERS_MAX])


def _unlike(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Whether no other rank's exception has this root, or this text."""
    root = _without_numbers(ExceptionText(failure).root)
    others = [ExceptionText(each) for each in failures if each is not failure]
    return all(root not in (_without_numbers(other.root), _without_numbers(other.text)) for other in others)


def _only_here(failure: Failure, others: Sequence[Failure]) -> Failure | None:
    """The failure with only what it wrote to stderr before its end, if no other rank did: a traceback, or an error."""
    parsed = ExceptionText(failure)
    theirs = "\n".join(_without_numbers(other.stderr_tail) for other in others)
    if parsed.caught_traceback:
        found = _with_traceback(failure, parsed.caught_traceback)
        root = ExceptionText(found).root
        if root and _without_numbers(_first_line(root)) not in theirs:
            return found
    before = PYTHON_WARNING.sub("", parsed.stderr_before)
    said = [
        line for line in before.splitlines() if ERROR_LINE.search(line) and _without_numbers(line.strip()) not in theirs
    ]
    if not said or not parsed.text:  # without an exception, its last words are its cause already
        return failure if said else None
    return structs.replace(failure, message="", error_type="", traceback="", stderr_tail=said[-1], exit_code=1)


def _with_traceback(failure: Failure, trace: str) -> Failure:
    return structs.replace(failure, message="", error_type="", traceback=trace, stderr_tail="", exit_code=1)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text[-4096:])


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
