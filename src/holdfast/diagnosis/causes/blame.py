"""Who is to blame: how much each failure says of itself and how much of its peers, and the order that follows.

Pure. A rank that complains about its peers' connections is a victim whenever somebody has another reason; between
equals the order of arrival decides. What is quoted, or comes from a server that is no peer, is no complaint.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import IntEnum

from holdfast.diagnosis.causes.exception_text import ExceptionText, listen, unwrapped
from holdfast.protocol.outcome import Failure


class Blame(IntEnum):
    """Smaller is more to blame."""

    OWN = 0
    """A reason of its own, before anybody was stopped."""
    OWN_LATE = 1
    """A reason of its own that cannot come from being stopped, though its end was seen after others had complained."""
    LOOSE = 2
    """Something about a connection or a time-out, which may or may not be about a training peer."""
    WAITED = 3
    """It could not reach its peers, or waited for them in vain."""
    WAITED_LATE = 4
    CUT = 5
    """A peer closed the connection."""
    STOPPED = 6
    """It was being stopped: at most a consequence."""


def types_of(names: str) -> frozenset[str]:
    """Exception classes, by their names with blanks between."""
    return frozenset(names.split())


class AnyCase:
    """A pattern that ignores case. Three times as fast as re.IGNORECASE, which cannot skip to where a word may
    begin: a lost node makes thousands of failures, and all are read before the job goes on."""

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
"""Words that name a trouble of the speaker's own, whatever else it says."""

TRANSPORT = AnyCase(
    r"gloo|\bNCCL|nccl\w+|\bRCCL|\bHCCL|oneCCL|ProcessGroup\w*|process group|TCPStore|HashStore|c10d|WorkNCCL"
    r"|Dist(?:Network|Store|Backend)?Error|monitored ?Barrier|recvValue|sendBytes|\bstore->|rendezvous"
    r"|collective operation|communicator|MASTER_ADDR|holdfast.{0,40}peer|pair\.cc|all_?reduce|all_?gather",
)
"""What training peers talk through."""

GENUINE = re.compile(
    r"\w+\.(?:cc|cpp|hpp|h):\d+|\[\d{1,3}(?:\.\d{1,3}){3}\]:\d+|\[Rank \d+\]|WorkNCCL\(|^Last error:", re.MULTILINE
)
"""A library's own text, and not a quotation of it."""

ENDED = AnyCase(
    r"connection (?:was )?(?:likely )?(?:closed|reset|aborted|lost)|closed (?:by|the connection)|reset by peer"
    r"|broken pipe"
    r"|remote process exited|remote (?:worker|peer)|ncclRemoteError|remote error|caused connection abort|failed to recv"
    r"|got 0 bytes|end ?of ?file|EOFError|peer (?:has )?(?:closed|gone|failed|disconnected)|socket (?:closed|hang ?up)"
    r"|was aborted|been aborted|aborted (?:due|because)|pair closure|sendBytes failed|recvValue failed"
    r"|errors? while waiting for send/recv",
)
"""The other side went away."""

WAITED = AnyCase(
    r"timed? ?-?out|timeout|watchdog caught|failed to pass|failed to connect|could not connect"
    r"|connect(?:ion)? .{0,60}(?:failed|refused)"
    r"|no route to host|network is unreachable|(?:system|internal) error|ncclSystemError|ncclInternalError|heartbeat"
    r"|clients joined|hasn't joined|deadline exceeded",
)
"""The other side did not come, or cannot be reached."""

SERVER = re.compile(
    r"/(?:requests|urllib3|httpx|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|wandb|mlflow"
    r"|comet_ml|neptune"
    r"|pymongo|redis|psycopg2?|asyncpg|pymysql|MySQLdb|kafka|paramiko|grpc|google|azure|clearml|datasets)/"
    r"|/urllib/request\.py|/http/client\.py| in do_handshake$"
)
"""Frames of clients: the other side is a server and no training peer."""
SERVER_TEXT = AnyCase(
    r"\b(?:wandb|mlflow|requests|urllib3?|httpx|botocore|huggingface_hub|aiohttp|pymysql|psycopg2?|pymongo"
    r"|redis)\.\w|s3://|gs://"
    r"|HTTPS?Connection(?:Pool)?|urlopen error|HTTP Error|Max retries exceeded",
)
URL = AnyCase(r"https?://")
"""Says nothing in a text of what peers talk through: their errors name pages of documentation."""

OWN_CHILDREN = re.compile(
    r"/multiprocessing/|/torch/utils/data/|/concurrent/futures/|/subprocess\.py|/asyncio/subprocess"
)
"""Frames of what talks to one's own child processes: the other side is a data-loader worker."""

NAMES_A_WAIT = AnyCase(
    r"timed? ?-?out|timeout|failed to pass|watchdog caught|connect to .{0,80}failed|failed to connect|no route to host"
    r"|refused|unreachable",
)
"""A time-out that mentions closed connections too: it closed them itself."""

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
"""No library reports a lost peer by these: such words in them are quoted."""

FROM_THE_STOP = AnyCase(
    r"\bSIG(?:TERM|INT|KILL|HUP)\b|killed by signal: Terminated|signal 15|KeyboardInterrupt|\bshutdown\b"
    r"|interpreter shutdown"
    r"|preempt|received signal|signum|Terminated",
)
"""What a worker says because it is being stopped."""

NATIVE_ENDS = frozenset({-signal.SIGABRT, -signal.SIGPIPE, -signal.SIGSEGV})
"""How a communication library that loses its peers may end a process."""
STOP_SIGNALS = frozenset({-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT})


def ranked(failures: Sequence[Failure]) -> list[tuple[Blame, Failure]]:
    """All failures, the most to blame first; equals in the order they came in."""
    return sorted(((blame(failure), failure) for failure in failures), key=lambda pair: pair[0])


def first_own(failures: Sequence[Failure]) -> Failure | None:
    """The first with a reason of its own. Mostly there is one, and what came after it need not be read.

    The user's code may raise in its own words what it noticed of a peer: then any other reason comes first, since the
    victim may have been reported before the culprit.
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
    words = listen(failure)
    text = unwrapped(words.root)
    return bool(words.raised and not OWN_TROUBLE.search(text) and (ENDED.search(text) or WAITED.search(text)))


def blame(failure: Failure) -> Blame:
    """How much one failure, by its own words and its way to end, is to blame."""
    words = listen(failure)
    if failure.after_stop:
        return _late(failure, words)
    return complaint(failure, words)


def complaint(failure: Failure, words: ExceptionText) -> Blame:
    """OWN, LOOSE, WAITED or CUT: what it says of its peers."""
    text = unwrapped(words.text if _is_control_flow(words) else words.root)
    if not text and failure.exit_code in NATIVE_ENDS:
        text = _native_complaint(words.stderr)
        if not text:
            return (
                Blame.LOOSE
                if failure.exit_code in (-signal.SIGABRT, -signal.SIGPIPE) and not words.stderr
                else Blame.OWN
            )
    if not text or failure.out_of_memory or not failure.started or OWN_TROUBLE.search(text):
        return Blame.OWN
    ended, waited = ENDED.search(text), WAITED.search(text)
    if not (ended or waited or words.root_type in CONNECTION_TYPES):
        return Blame.OWN
    if words.root_type in PLAIN_TYPES or _is_no_peers(words, text):
        return Blame.OWN
    firm = of_peers(words, text)
    if words.raised:
        # The user wrote these words; he may be quoting. `raise RuntimeError(str(error)) from None` is a complaint.
        genuine = words.root_type in CONNECTION_TYPES or (firm and GENUINE.search(text))
        return Blame.LOOSE if genuine else Blame.OWN
    if not firm:
        return Blame.LOOSE
    return Blame.WAITED if waited and (not ended or NAMES_A_WAIT.search(text)) else Blame.CUT


def of_peers(words: ExceptionText, text: str) -> bool:
    """Whether its words, its exception or the innermost frames are of what training peers talk through."""
    return bool(
        TRANSPORT.search(text) or TRANSPORT.search(words.root_type) or any(map(_is_transport, words.frames[-4:]))
    )


def speaks_of_peers(failure: Failure) -> bool:
    """Whether what it complains about is a training peer."""
    words = listen(failure)
    return of_peers(words, unwrapped(words.root) or _native_complaint(words.stderr)) or not words.text


def is_complaint(text: str) -> bool:
    """Whether this text alone speaks of training peers that went away or did not come."""
    return bool(not OWN_TROUBLE.search(text) and TRANSPORT.search(text) and (ENDED.search(text) or WAITED.search(text)))


def _late(failure: Failure, words: ExceptionText) -> Blame:
    if not words.text or (failure.exit_code in STOP_SIGNALS and not failure.message):
        return Blame.STOPPED
    if FROM_THE_STOP.search(words.text) or FROM_THE_STOP.search(words.raised):
        return Blame.STOPPED
    match complaint(failure, words):
        case Blame.OWN:
            return Blame.OWN_LATE
        case Blame.WAITED:
            return Blame.WAITED_LATE
        case _:
            return Blame.STOPPED


def _is_control_flow(words: ExceptionText) -> bool:
    """A library's own way through its code (`except KeyError: …`), and what went wrong then is the end of the chain."""
    return words.chained and words.root_type in CONTROL_FLOW and not words.in_users_code


def _native_complaint(stderr: str) -> str:
    """What a communication library wrote before the process was aborted."""
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
