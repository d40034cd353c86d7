"""Ranks failures by blame: by whether each reports a cause of its own or a problem with its peers.

Pure. A rank that reports broken connections to peers is a victim if any other rank has a cause of its own. Between
equal failures the order of arrival decides. Quoted texts and errors of servers that are not peers are not complaints.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import IntEnum

from holdfast.coordinator.complaints import RELAYED
from holdfast.diagnosis.causes.exception_text import ExceptionText, unwrapped
from holdfast.protocol.outcome import Failure, is_own_code


class Blame(IntEnum):
    """Blame of a failure; a smaller value is more to blame."""

    OWN = 0
    """A cause of its own, before any worker was stopped."""
    OWN_LATE = 1
    """A cause of its own that cannot come from the stop, although its end was reported after complaints of others."""
    RELAYED = 2
    """It reports that another rank failed: the ranks agreed to end."""
    LOOSE = 3
    """A connection or a time-out, perhaps to a training peer."""
    WAITED = 4
    """It could not reach its peers, or its wait for them timed out."""
    WAITED_LATE = 5
    CUT = 6
    """A peer closed the connection."""
    STOPPED = 7
    """It ended because it was stopped: at most a consequence."""


def types_of(names: str) -> frozenset[str]:
    """A set of exception classes from their names, separated by blanks."""
    return frozenset(names.split())


class AnyCase:
    """A pattern that ignores case. Three times as fast as re.IGNORECASE, which cannot skip to possible beginnings of a
    word. A lost node causes thousands of failures, and all are read before the job continues."""

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
    r"\w+\.(?:cc|cpp|hpp|h):\d+|\[\d{1,3}(?:\.\d{1,3}){3}\]:\d+|\[Rank \d+\]|WorkNCCL\(|^Last error:", re.MULTILINE
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
"""The other side closed the connection."""

WAITED = AnyCase(
    r"timed? ?-?out|timeout|watchdog caught|failed to pass|failed to connect|could not connect"
    r"|connect(?:ion)? .{0,60}(?:failed|refused)"
    r"|no route to host|network is unreachable|(?:system|internal) error|ncclSystemError|ncclInternalError|heartbeat"
    r"|clients joined|hasn't joined|deadline exceeded|interrupted system call",
)
"""The other side did not connect, or cannot be reached."""

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
    of_a_connection: Failure | None = None
    for each in failures:
        if each.after_stop or blame(each) is not Blame.OWN:
            continue
        if not _may_be_of_a_peer(each):
            return each
        of_a_connection = of_a_connection or each
    return of_a_connection


def _may_be_of_a_peer(failure: Failure) -> bool:
    words = ExceptionText(failure)
    text = unwrapped(words.root)
    return bool(words.raised and not OWN_TROUBLE.search(text) and (ENDED.search(text) or WAITED.search(text)))


def blame(failure: Failure) -> Blame:
    """The blame of one failure, from its text and its exit code."""
    words = ExceptionText(failure)
    if failure.after_stop:
        return _late(failure, words)
    return complaint(failure, words)


def complaint(failure: Failure, words: ExceptionText) -> Blame:
    """OWN, LOOSE, WAITED or CUT, from what the failure says about its peers."""
    text = unwrapped(words.text if _is_control_flow(words) else words.root)
    if not text and failure.exit_code in NATIVE_ENDS:
        text = _native_complaint(words.stderr)
        if not text:
            return (
                Blame.LOOSE
                if failure.exit_code in (-signal.SIGABRT, -signal.SIGPIPE) and not words.stderr
                else Blame.OWN
            )
    if failure.out_of_memory or not failure.started:
        return Blame.OWN
    if relays(failure, words):
        return Blame.RELAYED
    if not text or OWN_TROUBLE.search(text):
        return Blame.OWN
    ended, waited = ENDED.search(text), WAITED.search(text)
    if not (ended or waited or words.root_type in CONNECTION_TYPES):
        return Blame.OWN
    if words.root_type in PLAIN_TYPES or _is_no_peers(words, text):
        return Blame.OWN
    firm = of_peers(words, text)
    if words.raised:
        # The user's code raised this text, which may be a quotation. `raise RuntimeError(str(error)) from None` is a
        # complaint.
        genuine = words.root_type in CONNECTION_TYPES or (firm and GENUINE.search(text))
        return Blame.LOOSE if genuine else Blame.OWN
    if not firm:
        return Blame.LOOSE
    return Blame.WAITED if waited and (not ended or NAMES_A_WAIT.search(text)) else Blame.CUT


def relays(failure: Failure, words: ExceptionText) -> bool:
    """Whether the script says in its own words that another rank failed, as an exception without another root or as the
    text of sys.exit."""
    if words.text:
        return bool(words.raised and RELAYED.search(words.root.partition("\n")[0]))
    return is_own_code(failure.exit_code) and bool(RELAYED.search(words.last_said))


def of_peers(words: ExceptionText, text: str) -> bool:
    """Whether its text, its exception or the innermost frames belong to communication with training peers."""
    return bool(
        TRANSPORT.search(text) or TRANSPORT.search(words.root_type) or any(map(_is_transport, words.frames[-4:]))
    )


def speaks_of_peers(failure: Failure) -> bool:
    """Whether its complaint is about a training peer."""
    words = ExceptionText(failure)
    return of_peers(words, unwrapped(words.root) or _native_complaint(words.stderr)) or not words.text


def is_complaint(text: str) -> bool:
    """Whether this text alone reports training peers that left or did not connect."""
    return bool(not OWN_TROUBLE.search(text) and TRANSPORT.search(text) and (ENDED.search(text) or WAITED.search(text)))


def _late(failure: Failure, words: ExceptionText) -> Blame:
    if not failure.message and not failure.stop_may_cause:
        return Blame.OWN_LATE
    if not words.text or (failure.exit_code in STOP_SIGNALS and not failure.message):
        return Blame.STOPPED
    if FROM_THE_STOP.search(words.text) or FROM_THE_STOP.search(words.raised):
        return Blame.STOPPED
    match complaint(failure, words):
        case Blame.OWN:
            return Blame.OWN_LATE
        case Blame.RELAYED:
            return Blame.RELAYED
        case Blame.WAITED:
            return Blame.WAITED_LATE
        case _:
            return Blame.STOPPED


def _is_control_flow(words: ExceptionText) -> bool:
    """Whether the root is only control flow of a library (`except KeyError: …`); then the end of the chain counts."""
    return words.chained and words.root_type in CONTROL_FLOW and not words.in_users_code


def _native_complaint(stderr: str) -> str:
    """The text that a communication library wrote before the process was aborted."""
    if OWN_TROUBLE.search(stderr):
        return ""
    lines = [
        line for line in stderr.splitlines() if TRANSPORT.search(line) and (ENDED.search(line) or WAITED.search(line))
    ]
    return "\n".join(lines)


def _is_no_peers(words: ExceptionText, text: str) -> bool:
    if SERVER_TEXT.search(text) or (URL.search(text) and not TRANSPORT.search(text)):
        return True
    return any(SERVER.search(file) or OWN_CHILDREN.search(file) for file in words.frames[-6:])


def _is_transport(file: str) -> bool:
    return "/torch/distributed/" in file or "/deepspeed/comm" in file or "/horovod/" in file
