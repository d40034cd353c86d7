"""`holdfast submit`: submits a job to a scheduler.

With --slurm it writes a batch script, submits it and follows the log; --k8s is in submit_k8s.py. sbatch's options and
those of `holdfast run` are mixed before the training script. If both have an option of the same spelling, sbatch's
meaning counts: -t is --time, and --exclude names nodes. -m stays `python -m`. The batch script is readable and can be
submitted again by hand.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import NamedTuple, TypedDict

from holdfast import own_folders
from holdfast.cli import EXIT_INTERRUPTED, grammar, say
from holdfast.cli.option_table import FLAG, HOSTS, OPTIONS, Option
from holdfast.cli.printing import print_json
from holdfast.cli.program import check_script
from holdfast.cli.rendezvous import conf_to_publish
from holdfast.cli.resolve import preempt_signal as preempt_signal_of
from holdfast.launchers.slurm import JobState, ask_scontrol, read_job
from holdfast.protocol.errors import CallerError, MissingPackageError, UsageError
from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_SIGNAL_BASE, ExitCode, Scheduler, codes_for
from holdfast.protocol.train_contract import RUN_ID_VARIABLE

AGAIN = codes_for(Scheduler.AGAIN)
LOG_POLL_S, JOB_POLL_S = 0.3, 2.0
"""Intervals of polling: neither a shared file system nor Slurm reports changes."""
LOG_END_S = 1.0
"""Time after the job's end in which the rest of its log becomes visible here."""
COPY_BYTES_MAX = 1 << 20

NOT_FOR_JOBS = ("slurm", "plan", "json")
RUN_OPTIONS = tuple(option for option in OPTIONS if option.group != HOSTS and option.dest not in NOT_FOR_JOBS)
USAGE = """\
usage: holdfast submit --slurm [options of sbatch and of holdfast run] script.py [its arguments]
       holdfast submit --k8s [options] script.py [its arguments]

Submits a training job to a scheduler. `holdfast submit --slurm --help` explains one of them."""
HELP = """\
usage: holdfast submit --slurm [options] script.py [its arguments]

Writes a batch script, submits it with sbatch and follows its log. Ctrl-C leaves the job running.

  -N NODES, --time T, ...   any option of sbatch that does not start tasks
  --nproc-per-node N, ...   any option of holdfast run (see holdfast run --help)
  --signal=USR1@SECONDS     this long before its time limit the job saves and is requeued; it resumes later
  --spares N                N nodes more than the -N that train; one takes the place of a node that is lost
  --chain N                 N jobs, one after the other, each of which goes on where the time of the one before was over
  --dry-run                 print the batch script, and exit
  --no-follow               submit, print the job's number, and exit
  --json                    print JSON, and follow no log
  --help                    print this text, and exit"""
CHAIN, CHAIN_MAX = "--chain", 1000
CHAIN_MARK = "holdfast-chain-"
SPARES, SPARES_MAX = "--spares", 1000
NOT_IN_CHAINS = {
    "array": "each task would need a chain of its own",
    "comment": "the chain is known by it",
    "requeue": "the next job of the chain goes on instead",
}
VALUES = frozenset(
    [
        *("account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters"),
        *("comment", "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq"),
        *("cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude"),
        *("export", "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node"),
        *("gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name"),
        *("kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu"),
        *("mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core"),
        *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "oom-kill-step", "open-mode", "output"),
        "partition",
        *("power", "prefer", "priority", "profile", "qos", "reservation", "resv-ports", "segment", "signal"),
        *("sockets-per-node", "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind"),
        *("tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap"),
    ]
)
FLAGS = frozenset(
    [
        *("contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "nice", "no-kill", "no-requeue"),
        *("overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue", "spread-job"),
        *("stepmgr", "test-only", "use-min-nodes", "verbose", "wait"),
    ]
)
"""sbatch's options without a value, or with one only after `=`."""
SHORT = dict(
    [
        *(("A", "account"), ("a", "array"), ("b", "begin"), ("B", "extra-node-info"), ("C", "constraint")),
        *(("c", "cpus-per-task"), ("D", "chdir"), ("d", "dependency"), ("e", "error"), ("F", "nodefile")),
        ("G", "gpus"),
        *(("H", "hold"), ("i", "input"), ("J", "job-name"), ("k", "no-kill"), ("L", "licenses"), ("M", "clusters")),
        *(("N", "nodes"), ("n", "ntasks"), ("O", "overcommit"), ("o", "output"), ("p", "partition"), ("Q", "quiet")),
        *(("q", "qos"), ("s", "oversubscribe"), ("S", "core-spec"), ("t", "time"), ("v", "verbose"), ("W", "wait")),
        *(("w", "nodelist"), ("x", "exclude")),
    ]
)
"""sbatch's short options, except -m (--distribution): `-m` is `python -m`. `-t` is --time and not torchrun's --tee."""
ONE_AGENT = "holdfast starts one agent on each node, which starts the workers; use -N NODES and --nproc-per-node"
REFUSED = {
    "ntasks": ONE_AGENT,
    "ntasks-per-core": ONE_AGENT,
    "ntasks-per-gpu": ONE_AGENT,
    "ntasks-per-socket": ONE_AGENT,
    "ntasks-per-node": ONE_AGENT,
    "wrap": "the job runs the training script",
    "parsable": "holdfast submit has its own output",
    "test-only": "look at the batch script with --dry-run",
    "wait": "holdfast submit waits anyway; --no-follow returns at once",
}


class ScriptData(TypedDict):
    """A batch script that was not submitted."""

    script: str


class SubmittedData(TypedDict):
    """A batch script that was submitted to Slurm."""

    job: str
    """The number of the job."""
    chain: list[str]
    """The numbers of the jobs after it, with --chain."""
    script_file: str


JSON_FORMS: dict[str, tuple[tuple[type, ...], ...]] = {"submit": ((ScriptData,), (SubmittedData,))}


class BatchRequest(NamedTuple):
    """A line of `holdfast submit --slurm`."""

    batch: Batch
    dry_run: bool
    follow: bool
    as_json: bool
    chain: int = 1
    """Number of jobs that run one after the other."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast submit` with these arguments. Returns the exit status. Raises HoldfastError."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if words[:1] == ["--slurm"]:
        return to_slurm(words[1:])
    if words[:1] == ["--k8s"]:
        from holdfast.cli import submit_k8s

        return submit_k8s.main(words[1:])
    raise UsageError("the first word says where to: holdfast submit --slurm … or holdfast submit --k8s … (Kubernetes)")


def to_slurm(argv: Sequence[str]) -> int:
    """Submit to Slurm. Returns the exit status, the job's own if its log is followed. Raises CallerError."""
    request = read(argv)
    if request is None:
        print(HELP)
        return 0
    text = batch_script(request.batch)
    if request.dry_run:
        if request.as_json:
            print_json(ScriptData(script=text))
        else:
            print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise MissingPackageError(
            "sbatch is not on the PATH: submit from a login node of the cluster; --dry-run shows the batch script"
        )
    path = write(Path(f"{request.batch.name}.sbatch"), text)
    job, *later = submit_chain(path, request.chain)
    if request.as_json:
        print_json(SubmittedData(job=job, chain=later, script_file=str(path.absolute())))
        return 0
    if later:
        numbers = " ".join([job, *later])
        say(f"submitted {path} as a chain of {request.chain} jobs, {numbers}; stop it with: scancel {numbers}")
        return 0
    say(f"submitted {path} as job {job}; stop it with: scancel {job}")
    if request.batch.is_array:
        say("this is an array and each task has its own log; no log is followed")
        return 0
    return follow(job) if request.follow else 0


def read(argv: Sequence[str]) -> BatchRequest | None:
    """Divide the line into sbatch's options, ours, and the script with its arguments. None: it asks for help. Raises
    UsageError."""
    words, own, directives = list(argv), [], list[Directive]()
    chosen = {"--dry-run": False, "--no-follow": False, "--json": False}
    chain, spares = 1, 0
    spellings = grammar.spellings_of(RUN_OPTIONS)
    while words:
        word = words[0]
        if word == "--" or not word.startswith("-"):
            break
        if word in chosen:
            chosen[word] = True
            words.pop(0)
        elif word.partition("=")[0] == CHAIN:
            chain = take_number(words, CHAIN_MAX, "jobs")
        elif word.partition("=")[0] == SPARES:
            spares = take_number(words, SPARES_MAX, "nodes")
        elif directive := take_directive(words, spellings):
            directives.append(directive)
        else:
            own += take_own(words, spellings)

    check(directives)
    if chain > 1:
        begin_chain(directives)
    if spares:
        own += add_spares(directives, own, spares)
    signal = preempt_signal(directives)
    # SIGTERM announces a preemption without an option.
    if signal not in (None, "TERM") and not any(
        word.startswith(("--preempt-signal", "--preempt_signal")) for word in own
    ):
        own += ["--preempt-signal", signal]
    # Errors are reported here and not by every node, when the job has waited in the queue.
    parsed = grammar.parse([*own, *words], {}, RUN_OPTIONS)
    if any(getattr(parsed.values, dest) for dest in grammar.ABOUT_US):
        return None
    run = ("-m", "holdfast", "run", "--slurm", *own, *words)
    # Both are read for what they refuse: the agents read the options again.
    preempt_signal_of(parsed)
    conf_to_publish(parsed, "the job's script; use password_file=, with a file that the nodes can read")
    check_script_here(parsed, directives)
    name = job_name(parsed.values.training_script)
    return BatchRequest(
        Batch(tuple(directives), (sys.executable, *run), name),
        dry_run=chosen["--dry-run"],
        follow=not chosen["--no-follow"],
        as_json=chosen["--json"],
        chain=chain,
    )


def take_number(words: list[str], most: int, of: str) -> int:
    """Remove an option and its number from the front. Raises UsageError."""
    name, equals, text = words.pop(0).partition("=")
    text = text if equals else words.pop(0) if words else ""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise UsageError(f"{name} {text}: must be a number of {of}, 1 to {most}")
    return int(text)


def add_spares(directives: list[Directive], own: list[str], spares: int) -> list[str]:
    """Ask sbatch for so many nodes more. Returns the options of `holdfast run` by which the job forms without them.
    Raises UsageError."""
    text = next((each.value or "" for each in reversed(directives) if each.name == "nodes"), "")
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        given = f"-N {text}" if text else "without -N"
        raise UsageError(
            f"{SPARES} {spares}: {given}: give the number of nodes that train, at least 2: -N 4 {SPARES} 1"
        )
    if any(word.partition("=")[0] in ("--nnodes", "--nnode") for word in own):
        raise UsageError(f"{SPARES} {spares}: not with --nnodes: the job has the nodes of -N, and the spares are more")
    directives[:] = [each for each in directives if each.name != "nodes"]
    directives.append(Directive("nodes", str(int(text) + spares)))
    return ["--nnodes", text]


def begin_chain(directives: list[Directive]) -> None:
    """Name the chain in the jobs' comment, by which its last job finds those that wait. Raises UsageError."""
    for directive in directives:
        if directive.name in NOT_IN_CHAINS:
            raise UsageError(f"{directive}: not with {CHAIN}: {NOT_IN_CHAINS[directive.name]}")
    if not any(directive.name == "no-requeue" for directive in directives):
        directives.append(Directive("no-requeue"))
    directives.append(Directive("comment", f"{CHAIN_MARK}{secrets.token_hex(4)}"))


def check_script_here(parsed: grammar.Parsed, directives: Sequence[Directive]) -> None:
    """Raise ScriptError for a script that python could not run: the job starts in this folder."""
    given = parsed.values
    # A module or a program need not be a file of this folder, and with --chdir the folder is another one.
    elsewhere = given.module or given.no_python or any(each.name == "chdir" for each in directives)
    if not elsewhere and "$" not in given.training_script:
        check_script(given.training_script, os.environ)


def take_directive(words: list[str], spellings: dict[str, Option]) -> Directive | None:
    """Remove sbatch's option and its value from the front; None: the first word is no option of sbatch."""
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
    """Remove the option of `holdfast run` and its value from the front. Raises UsageError."""
    word = words.pop(0)
    found = grammar.read_word(word, spellings, [])
    option, text = found[-1]
    if option.kind == FLAG or text is not None:
        return [word]
    if not words:
        raise UsageError(f"{word} needs a value")
    return [word, words.pop(0)]


def job_name(script_path: str) -> str:
    """The job's name: `train` for `jobs/train.py`, with only characters that file names and sbatch allow."""
    stem = os.path.basename(script_path).removesuffix(".py")
    return re.sub(r"[^\w.+-]", "_", stem).lstrip("-.") or "holdfast"


def write(path: Path, text: str) -> Path:
    """Write the script. Raises CallerError if the file is not ours or cannot be written."""
    try:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise UsageError(f"{path} was not written by holdfast submit: rename it, or submit from another folder")
        own_folders.write_new(path, text.encode(errors="surrogateescape"), 0o755)
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}") from None
    return path


def submit(path: Path, *options: str) -> str:
    """Submit the script. Returns the job's number. Raises CallerError with sbatch's message."""
    line = ["sbatch", "--parsable", *options, str(path)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().splitlines() or ["without a message"]
        raise CallerError(f"sbatch refused {path}: {'; '.join(message[-2:])}")
    return done.stdout.decode(errors="replace").strip().partition(";")[0]


def submit_chain(path: Path, number: int) -> list[str]:
    """Submit the script this many times; each job waits for the end of the one before. Returns their numbers. Raises
    CallerError."""
    jobs: list[str] = []
    for _ in range(number):
        try:
            jobs.append(submit(path, *([f"--dependency=afterany:{jobs[-1]}"] if jobs else [])))
        except CallerError as error:
            if not jobs:
                raise
            raise CallerError(f"{error}; the chain's first jobs are submitted: scancel {' '.join(jobs)}") from None
    return jobs


def follow(job: str) -> int:
    """Show the log as it grows until the job is over. Returns the job's status."""
    try:
        return Follower(job).run()
    except KeyboardInterrupt:
        print(f"\nholdfast: job {job} continues; stop it with: scancel {job}", file=sys.stderr)
        return EXIT_INTERRUPTED


class Follower:
    """Reports the states of a job and copies its log to stdout."""

    def __init__(self, job: str, ask: Callable[..., JobState | None] | None = None) -> None:
        self.job = job
        self.log = ""
        """Path of the log; empty: unknown yet."""
        self.at = 0
        """Number of the log's bytes that were shown."""
        self.shown = ""
        """The last line about the job's state."""
        self.unreadable = False
        """Its log cannot be read on this machine, which was reported."""
        self.ask = ask or (lambda: read_job(ask_scontrol("show", "job", job)))

    def run(self) -> int:
        silent_since = None
        while True:
            state = self.ask()
            if state is None:
                # The controller may restart, and it forgets a job some minutes after its end.
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > 60:
                    self.say(f"Slurm no longer knows job {self.job}; its log is {self.log or 'unknown'}")
                    return EXIT_FAILURE
            else:
                silent_since = None
                self.report(state)
                if state.over:
                    self.copy_for(LOG_END_S)
                    return state.status
            self.copy_for(JOB_POLL_S)

    def report(self, state: JobState) -> None:
        """Report the state if it is new."""
        self.log = state.log or self.log
        if state.waits:
            self.say(f"job {self.job} waits ({state.reason})")
        elif state.over:
            self.say(f"job {self.job} is over: {state.state}")
        else:
            self.say(f"job {self.job} runs on {state.nodes}; its log is {self.log or 'unknown'}")

    def say(self, text: str) -> None:
        if text != self.shown:
            self.shown = text
            say(text)

    def copy_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self.copy()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, LOG_POLL_S))

    def copy(self) -> None:
        """Print what was appended to the log; all of it if the log is shorter than before, because it was replaced."""
        try:
            with open(self.log, "rb") as file:
                self.at = self.at if os.fstat(file.fileno()).st_size >= self.at else 0
                file.seek(self.at)
                while text := file.read(COPY_BYTES_MAX):
                    self.at += len(text)
                    sys.stdout.buffer.write(text)
                    sys.stdout.buffer.flush()
        except FileNotFoundError:
            return  # it exists after the job's start, and is visible here a little later
        except BrokenPipeError:
            raise  # of stdout
        except OSError as error:
            if not self.unreadable:
                self.unreadable = True
                say(f"{self.log} cannot be read here: {error.strerror}")


# --- the batch script ------------------------------------------------------------------------------------------------


class Directive(NamedTuple):
    """One option of sbatch, in its long spelling."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


HARMLESS = Directive("ntasks-per-node", "1")
"""The only value of a refused option that is accepted: every job of holdfast has it."""


def check(directives: list[Directive]) -> None:
    """Raise UsageError for an option that contradicts one agent per node or would break the batch script."""
    for directive in directives:
        if directive.name in REFUSED and directive != HARMLESS:
            raise UsageError(f"{directive}: {REFUSED[directive.name]}")
        if "\n" in (directive.value or ""):
            raise UsageError(f"--{directive.name}: its value must be one line")


def preempt_signal(directives: list[Directive]) -> str | None:
    """The signal of `--signal=[R:]SIGNAL[@SECONDS]`; None: there is no such option. Raises UsageError."""
    text = next((each.value for each in reversed(directives) if each.name == "signal"), None)
    if text is None:
        return None
    flags, colon, rest = text.rpartition(":")
    if colon and "B" in flags.upper():
        raise UsageError(
            f"--signal={text}: B: is for the batch script alone, but the agents need the signal; write --signal={rest}"
        )
    name = rest.partition("@")[0].upper()
    if name.isdigit():
        return known_signal(text, int(name))
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in Signals.__members__:
        raise UsageError(f"--signal={text}: {name} is no signal")
    return name.removeprefix("SIG")


def known_signal(text: str, number: int) -> str:
    try:
        return Signals(number).name.removeprefix("SIG")
    except ValueError:
        raise UsageError(f"--signal={text}: {number} is no signal") from None


MARK = "# Written by `holdfast submit --slurm`"
"""The line by which a batch script of ours is known: only such a file is overwritten."""

TOKEN_LINES = (
    "# The job's secret, new at each start unless there is one. It is in the environment, never on a command line.",
    "HOLDFAST_TOKEN=${HOLDFAST_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}",
    "export HOLDFAST_TOKEN",
)


class Batch(NamedTuple):
    """A job to submit."""

    directives: tuple[Directive, ...]
    """The options for sbatch, as given."""
    command: tuple[str, ...]
    """The command that starts the job in the allocation."""
    name: str
    """The job's name, unless a directive sets another."""

    @property
    def requeues(self) -> bool:
        return not self.gave("no-requeue")

    @property
    def is_array(self) -> bool:
        return self.gave("array")

    @property
    def chain(self) -> str:
        """The mark of the chain that the job is part of; empty: of none."""
        marks = [each.value or "" for each in self.directives if each.name == "comment"]
        return next((mark for mark in marks if mark.startswith(CHAIN_MARK)), "")

    def gave(self, name: str) -> bool:
        return any(each.name == name for each in self.directives)


def batch_script(batch: Batch) -> str:
    """The text of the batch script."""
    return "\n".join([*header_lines(batch), "", *TOKEN_LINES, "", *command_lines(batch), ""])


def directive_line(directive: Directive) -> str:
    """The line for sbatch, which splits it into words as a shell does and takes `#` for the begin of a comment."""
    return f"#SBATCH {shlex.quote(str(directive))}"


def header_lines(batch: Batch) -> list[str]:
    lines = ["#!/bin/bash", f"{MARK}; it can be submitted again with sbatch."]
    if not batch.gave("job-name"):
        lines.append(directive_line(Directive("job-name", batch.name)))
    lines += map(directive_line, batch.directives)
    if not batch.gave("ntasks-per-node"):
        lines += ["# One agent on each node starts that node's workers.", "#SBATCH --ntasks-per-node=1"]
    if not batch.gave("no-kill"):
        lines += [
            "# A lost node does not end the job: holdfast continues without it if --nnodes allows.",
            "#SBATCH --no-kill",
        ]
    if batch.requeues:
        lines += ["# After a preemption the job resumes, and its log is appended to."]
        lines += [f"#SBATCH {name}" for name in missing(batch, "requeue", "open-mode=append")]
    return lines


def missing(batch: Batch, *options: str) -> list[str]:
    return [f"--{option}" for option in options if not batch.gave(option.partition("=")[0])]


def command_lines(batch: Batch) -> list[str]:
    command = shlex.join(batch.command)
    # The number of an array is also that of one of its tasks: `scontrol requeue` with it would requeue all of them.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if batch.is_array else '"$SLURM_JOB_ID"'
    if batch.chain:
        return [*run_id_lines(batch), command, *chain_lines(batch.chain)]
    if not batch.requeues:
        return [command]
    return [
        command,
        "code=$?",
        "",
        *(f"# {each.number}: {each.meaning}." for each in AGAIN),
        "# Another exit code after a preemption: Slurm would not start the job again by itself.",
        f"preempted() {{ scontrol --oneliner show job {job} | grep -q 'PreemptTime=[0-9]'; }}",
        f'if {" || ".join(map(ended_with, AGAIN))} || {{ [ "$code" -ne 0 ] && preempted; }}; then',
        f"    scontrol requeue {job}",
        "fi",
        'exit "$code"',
    ]


def ended_with(code: ExitCode) -> str:
    """The shell's test whether the command ended so."""
    return f'[ "$code" -eq {code.number} ]'


def run_id_lines(batch: Batch) -> list[str]:
    """Give all jobs of the chain one id: each has a number of its own."""
    own = f"{batch.name}-{batch.chain.removeprefix(CHAIN_MARK)}"
    return [
        "# One id for loggers (W&B, MLflow, TensorBoard) in all jobs of the chain.",
        f"export {RUN_ID_VARIABLE}=${{{RUN_ID_VARIABLE}:-{shlex.quote(own)}}}",
        "",
    ]


def chain_lines(mark: str) -> list[str]:
    """What follows the command in a job of a chain."""
    stopped = ExitCode(EXIT_SIGNAL_BASE + Signals.SIGTERM, "the time was over before everything was saved")
    goes_on = (*AGAIN, stopped)
    return [
        "code=$?",
        "",
        *(f"# {each.number}: {each.meaning}." for each in goes_on),
        "# Then the chain's next job goes on, also when Slurm ends this script. After any other end the jobs that wait",
        "# are cancelled.",
        f"if ! {{ {' || '.join(map(ended_with, goes_on))}; }}; then",
        "    squeue --noheader --states=PENDING --format='%i %k' \\",
        f"        | awk '$2 == \"{mark}\" {{ print $1 }}' | xargs -r scancel",
        "fi",
        'exit "$code"',
    ]
