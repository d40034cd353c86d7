"""`holdfast submit`: hand a job to a scheduler. To Slurm: write a batch script, submit it, follow its log; to
Kubernetes: submit_k8s.py.

sbatch's options and those of `holdfast run` are written side by side before the training script. The few spellings that
both have are sbatch's here: -t is --time and --exclude names nodes; -m stays `python -m`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import EXIT_INTERRUPTED, grammar
from holdfast.cli.option_table import FLAG, HOSTS, OPTIONS, Option
from holdfast.launchers.slurm.batch import FLAGS, MARK, SHORT, VALUES, Batch, Directive, check, preempt_signal, script
from holdfast.launchers.slurm.job import JobState, read_job
from holdfast.launchers.slurm.step import ask_scontrol
from holdfast.protocol.errors import EXIT_FAILURE, CallerError, MissingPackageError, ScriptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


LOG_LOOK_S, JOB_LOOK_S = 0.3, 2.0
"""Neither a shared file system nor Slurm reports changes: both are polled."""
LAST_WORDS_S = 1.0
COPY_BYTES_MAX = 1 << 20

RUN_OPTIONS = tuple(option for option in OPTIONS if option.group != HOSTS and option.dest not in ("slurm", "plan"))
USAGE = """\
usage: holdfast submit --slurm [options of sbatch and of holdfast run] script.py [its arguments]
       holdfast submit --k8s [options] script.py [its arguments]

Hands a training job to a scheduler. `holdfast submit --slurm --help` tells more of one."""
HELP = """\
usage: holdfast submit --slurm [options] script.py [its arguments]

Writes a batch script, submits it with sbatch and follows its log. Ctrl-C leaves the job running.

  -N NODES, --time T, ...   any option of sbatch that does not start tasks
  --nproc-per-node N, ...   any option of holdfast run (see holdfast run --help)
  --signal=USR1@SECONDS     so long before its time is over the job saves, goes back into the queue, and resumes later
  --dry-run                 print the batch script, and exit
  --no-follow               submit, say the job's number, and exit
  --help                    print this text, and exit"""


class BatchRequest(NamedTuple):
    batch: Batch
    dry_run: bool
    follow: bool


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises HoldfastError."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if words[:1] == ["--slurm"]:
        return to_slurm(words[1:])
    if words[:1] == ["--k8s"]:
        from holdfast.cli import submit_k8s

        return submit_k8s.main(words[1:])
    raise UsageError("to which scheduler? write holdfast submit --slurm or --k8s first, then the rest")


def to_slurm(argv: Sequence[str]) -> int:
    """Returns the exit status: with a log that is followed, the job's own. Raises CallerError."""
    if wants_help(argv):
        print(HELP)
        return 0
    request = read(argv)
    text = script(request.batch)
    if request.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise MissingPackageError(
            "sbatch is not on the PATH: submit from a login node of the cluster; --dry-run shows the batch script"
        )
    path = write(Path(f"{request.batch.name}.sbatch"), text)
    job = submit(path)
    print(f"holdfast: submitted {path} as job {job}; stop it with: scancel {job}", file=sys.stderr)
    if request.batch.is_array:
        print("holdfast: it is an array, each task has a log of its own: none is followed", file=sys.stderr)
        return 0
    return follow(job) if request.follow else 0


def wants_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv[:1])


def read(argv: Sequence[str]) -> BatchRequest:
    """Sorts the words into sbatch's, ours and the script's. Raises UsageError."""
    words, own, directives = list(argv), [], list[Directive]()
    chosen = {"--dry-run": False, "--no-follow": False}
    spellings = {spelling: option for option in RUN_OPTIONS for spelling in option.spellings}
    while words:
        word = words[0]
        if word == "--" or not word.startswith("-"):
            break
        if word in chosen:
            chosen[word] = True
            words.pop(0)
        elif directive := take_directive(words, spellings):
            directives.append(directive)
        else:
            own += take_own(words, spellings)
    check(directives)
    signal = preempt_signal(directives)
    if signal is not None and not any(word.startswith(("--preempt-signal", "--preempt_signal")) for word in own):
        own += ["--preempt-signal", signal]
    parsed = grammar.parse([*own, *words], {}, RUN_OPTIONS)  # what is wrong is said here, not by every node
    run = ("-m", "holdfast", "run", "--slurm", *own, *words)
    check_script(parsed, directives)
    name = job_name(parsed.values.training_script)
    return BatchRequest(
        Batch(tuple(directives), (sys.executable, *run), name), chosen["--dry-run"], not chosen["--no-follow"]
    )


def check_script(parsed: grammar.Parsed, directives: Sequence[Directive]) -> None:
    """The job starts in this folder, so a script that is not here is not there. Raises ScriptError."""
    given = parsed.values
    elsewhere = given.module or given.no_python or any(each.name == "chdir" for each in directives)
    if not elsewhere and not os.path.isfile(given.training_script):
        raise ScriptError(f"{given.training_script} is not here, and the job would look for it from this folder")


def take_directive(words: list[str], spellings: dict[str, Option]) -> Directive | None:
    """sbatch's option at the front, taken away with its value; None when it is none of sbatch's."""
    word = words[0]
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        if "--" + name in spellings or name not in VALUES | FLAGS:
            return None
        value = text if equals else None
    else:
        name, value = SHORT.get(word[1:2], ""), word[2:].removeprefix("=") or None
        if not name:
            return None
    words.pop(0)
    if name in VALUES and value is None:
        if not words:
            raise UsageError(f"{word} needs a value")
        value = words.pop(0)
    return Directive(name, value)


def take_own(words: list[str], spellings: dict[str, Option]) -> list[str]:
    """The option of `holdfast run` at the front, with its value. Raises UsageError."""
    word = words.pop(0)
    found = grammar.read_word(word, spellings, [])
    option, text = found[-1]
    if option.kind == FLAG or text is not None:
        return [word]
    if not words:
        raise UsageError(f"{word} needs a value")
    return [word, words.pop(0)]


def job_name(script_path: str) -> str:
    """`train` for `jobs/train.py`, without what a file name or sbatch would mind."""
    stem = os.path.basename(script_path).removesuffix(".py")
    return re.sub(r"[^\w.+-]", "_", stem).lstrip("-.") or "holdfast"


def write(path: Path, text: str) -> Path:
    """Write the script. Raises CallerError when the path is a file of another origin, or cannot be written."""
    try:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise UsageError(f"{path} is not from holdfast submit: rename it, or submit from another folder")
        path.write_text(text, errors="surrogateescape")
        path.chmod(0o755)
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}") from None
    return path


def submit(path: Path) -> str:
    """The job's number. Raises CallerError with what sbatch said."""
    line = ["sbatch", "--parsable", str(path)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise CallerError(f"sbatch does not take {path}: {'; '.join(said[-2:])}")
    return done.stdout.decode(errors="replace").strip().partition(";")[0]


def follow(job: str) -> int:
    """Shows the log as it grows until the job is over; returns its status."""
    try:
        return Follower(job).run()
    except KeyboardInterrupt:
        print(f"\nholdfast: job {job} goes on without you; stop it with: scancel {job}", file=sys.stderr)
        return EXIT_INTERRUPTED


class Follower:
    """Reports the states of a job, and copies its log to our stdout."""

    def __init__(self, job: str, ask: Callable[..., JobState | None] | None = None) -> None:
        self.job = job
        self.log = ""
        self.at = 0
        self.said = ""
        self.ask = ask or (lambda: read_job(ask_scontrol("show", "job", job)))

    def run(self) -> int:
        silent_since = None
        while True:
            state = self.ask()
            if state is None:
                # The controller restarts now and then; it forgets a job minutes after its end.
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > 60:
                    self.say(f"Slurm tells nothing of job {self.job} any more; its log is {self.log or 'not known'}")
                    return EXIT_FAILURE
            else:
                silent_since = None
                self.tell(state)
                if state.over:
                    self.copy_for(LAST_WORDS_S)
                    return state.status
            self.copy_for(JOB_LOOK_S)

    def tell(self, state: JobState) -> None:
        """What is new about it."""
        self.log = state.log or self.log
        if state.waits:
            self.say(f"job {self.job} waits ({state.reason})")
        elif state.over:
            self.say(f"job {self.job} is over: {state.state}")
        else:
            self.say(f"job {self.job} runs on {state.nodes}; its log is {self.log or 'not known'}")

    def say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            print(f"holdfast: {text}", file=sys.stderr, flush=True)

    def copy_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self.copy()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, LOG_LOOK_S))

    def copy(self) -> None:
        """Print what was appended to the log; all of it when it was restarted."""
        try:
            with open(self.log, "rb") as file:
                self.at = self.at if os.fstat(file.fileno()).st_size >= self.at else 0
                file.seek(self.at)
                while text := file.read(COPY_BYTES_MAX):
                    self.at += len(text)
                    sys.stdout.buffer.write(text)
                    sys.stdout.buffer.flush()
        except FileNotFoundError:
            return  # it comes with the job's start, and from another host a little later
