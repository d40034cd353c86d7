"""Every option of `holdfast run` and `holdfast launch` in one table, and `--help` made from it.

The parser, the reading of variables and files, the plan, the schema of the file and the pages use the same table. Knows
names, types, ranges and defaults (torchrun's), and the field that gets a value; knows no other meaning of values.
No third-party package is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.rendezvous.backends import BACKENDS

if TYPE_CHECKING:
    from typing import Any


EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""torchrun's own values of --event-log-handler; it also takes plug-ins."""
SECONDS = ("S", "SECONDS")
"""Metavars of times."""
COLUMN, WIDTH = 28, 80
"""Column of the explanations in the help, and its width."""
FLAG, TEXT, INT, FLOAT, LIST = "flag", "text", "int", "float", "list"
"""Kinds of option: what a value is turned into. LIST is separated by commas, `,,` is one literal comma."""


class Option(NamedTuple):
    """An option of a command line."""

    name: str
    """The spelling with dashes; the one with underscores is accepted as well."""
    kind: str
    default: object
    help: str
    """The explanation in one line."""
    metavar: str = ""
    short: str = ""
    env: bool = True
    """Whether a variable gives the default: PET_ for torchrun's options, HOLDFAST_ (or PET_) for ours."""
    choices: tuple[str, ...] = ()
    ours: bool = False
    """Whether torchrun does not have the option."""
    newer: bool = False
    """Whether torchrun has the option only since 2.14: an abbreviation that meant another one before still does."""
    many: bool = False
    """Whether the option may be given several times: the texts are joined."""
    joiner: str = ","
    """The text between the joined texts."""
    group: str = ""
    """The option's heading in the help."""
    least: float | None = None
    """The smallest number that is accepted."""
    above: float | None = None
    """The number below which, and at which, none is accepted."""
    goes_to: str = ""
    """The field that gets the value as it is: of RunOptions (`role`), or of its job or limits (`limits.drain_s`).
    Empty: cli/resolve.py makes something else of it."""
    launchers_only: bool = False
    """Whether a script is unlikely to have an option of this name: behind the script, it is probably misplaced."""
    line_only: bool = False
    """Whether it belongs on the command line only, not in a file."""
    number_too: bool = False
    """Whether a text is often a number, which TOML writes without quotes."""
    decides_what_runs: bool = False
    """Whether it decides which programs run, and where, or what is sent there. A file that was found, not named, and
    that another user can change, may not have it."""

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """The spellings: short, with dashes and with underscores, in the order in which torchrun declares them."""
        both = (self.name, "--" + self.dest)
        return (*([self.short] if self.short else []), *dict.fromkeys(both))

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that give the default; the first that is set counts."""
        if not self.env:
            return ()
        prefixes = ("HOLDFAST_", "PET_") if self.ours else ("PET_",)
        return tuple(prefix + self.dest.upper() for prefix in prefixes)

    @property
    def range(self) -> str:
        """The accepted numbers in words; empty: all."""
        unit = " of seconds" if self.metavar in SECONDS else ""
        if self.above is not None:
            return f"a number{unit} above {self.above:g}"
        if self.least is None:
            return ""
        return f"{self.least:g} or more" if self.kind == INT else f"a number{unit}, {self.least:g} or more"

    def accepts(self, number: float) -> bool:
        """Whether the number is in the range. One that is not finite is in none."""
        lowest = -float("inf") if self.least is None else self.least
        return lowest <= number < float("inf") and (self.above is None or number > self.above)

    @property
    def variable(self) -> str:
        """The variable that the help names; empty when there is none."""
        return self.variables[0] if self.variables else ""


def flag_of(dest: str) -> str:
    """The flag of an option.

    >>> flag_of("log_dir")
    '--log-dir'
    """
    return "--" + dest.replace("_", "-")


def own(name: str, kind: str, default: object, text: str, metavar: str = "", **more: Any) -> Option:
    """An option that torchrun does not have."""
    return Option(name, kind, default, text, metavar, ours=True, **more)


def in_group(group: str, *options: Option) -> tuple[Option, ...]:
    return tuple(option._replace(group=group) for option in options)


NODES, RENDEZVOUS, PROGRAM = "nodes and processes", "rendezvous", "program"
HOSTS = "several hosts by ssh"
RESTARTS, LOGS, PLACEMENT, OWN = "restarts and end", "logs", "placement", "holdfast's own"

OPTIONS: tuple[Option, ...] = (
    *in_group(
        NODES,
        Option(
            "--nnodes",
            TEXT,
            "1:1",
            "number of nodes, or the range the job may have",
            "N|MIN:MAX",
            number_too=True,
            launchers_only=True,
        ),
        Option(
            "--nproc-per-node",
            TEXT,
            "1",
            "workers on this node: a number, auto, gpu, cpu or xpu",
            "N|DEVICE",
            number_too=True,
            launchers_only=True,
        ),
        Option(
            "--node-rank",
            INT,
            0,
            "rank of this node (static: required; otherwise preferred)",
            "RANK",
            launchers_only=True,
        ),
        Option("--role", TEXT, "default", "role of the workers: ROLE_NAME and log prefix", "NAME", goes_to="role"),
        own("--slurm", FLAG, False, "in a Slurm batch script: start an agent on each node of the job"),
    ),
    *in_group(
        RENDEZVOUS,
        Option(
            "--standalone",
            FLAG,
            False,
            "a job of this node alone; needs no endpoint and no free port",
            launchers_only=True,
        ),
        Option(
            "--rdzv-backend", TEXT, "static", f"how the nodes meet: {', '.join(BACKENDS)}", "NAME", launchers_only=True
        ),
        Option(
            "--rdzv-endpoint",
            TEXT,
            "",
            "where they meet, the same on all nodes; c10d: or several",
            "HOST[:PORT]",
            decides_what_runs=True,
            launchers_only=True,
        ),
        Option(
            "--rdzv-id",
            TEXT,
            "none",
            "name of the job, the same on all nodes",
            "ID",
            number_too=True,
            launchers_only=True,
        ),
        Option("--rdzv-conf", TEXT, "", "further settings of the rendezvous", "KEY=VALUE,...", launchers_only=True),
        Option(
            "--master-addr",
            TEXT,
            "127.0.0.1",
            "address of node 0 (static only)",
            "HOST",
            decides_what_runs=True,
            launchers_only=True,
        ),
        Option(
            "--master-port", INT, None, "port on node 0, 29500 by default (static only)", "PORT", launchers_only=True
        ),
        Option(
            "--local-addr", TEXT, None, "address under which the others reach this node", "HOST", goes_to="local_addr"
        ),
        own("--agent-port", INT, 0, "where this agent listens for the others (c10d); 0: any free port", "PORT"),
    ),
    *in_group(
        PROGRAM,
        Option(
            "--module",
            FLAG,
            False,
            "the script is a module name, as in `python -m`",
            short="-m",
            decides_what_runs=True,
        ),
        Option(
            "--no-python",
            FLAG,
            False,
            "the script is a program: execute it without python",
            decides_what_runs=True,
            launchers_only=True,
        ),
        Option(
            "--run-path",
            FLAG,
            False,
            "run the script in the worker by runpy; takes precedence over -m and --no-python",
            decides_what_runs=True,
        ),
        Option(
            "--start-method",
            TEXT,
            "spawn",
            "how --run-path workers are made: spawn, fork or forkserver",
            "METHOD",
            choices=("spawn", "fork", "forkserver"),
            goes_to="start_method",
        ),
        own(
            "--preload",
            TEXT,
            "auto",
            "import once per node and fork the workers: auto, none or modules",
            "auto|none|MODULE,...",
            decides_what_runs=True,
        ),
        own(
            "--cache-dir",
            TEXT,
            "off",
            "where workers keep compiled kernels; auto: one per user, temporary; off: where each library does",
            "DIR|auto|off",
        ),
        own(
            "--cache-from",
            TEXT,
            "off",
            "folder on shared storage: an empty --cache-dir is filled from it, and gives it what is new",
            "DIR|off",
        ),
    ),
    *in_group(
        RESTARTS,
        own(
            "--standby",
            TEXT,
            "on",
            "keep workers for the next restart ready, where workers are forked: on or off",
            "on|off",
            choices=("on", "off"),
        ),
        Option(
            "--max-restarts",
            INT,
            0,
            "restart the workers after a failure, at most N times",
            "N",
            goes_to="job.max_restarts",
            least=0,
            launchers_only=True,
        ),
        Option(
            "--monitor-interval",
            FLOAT,
            0.1,
            "accepted as in torchrun; has no effect, because holdfast does not poll",
            "SECONDS",
            goes_to="monitor_interval_s",
            above=0,
            launchers_only=True,
        ),
        Option(
            "--signals-to-handle",
            TEXT,
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "signals that end this node's part of the job",
            "NAME,...",
            goes_to="signals_text",
        ),
        Option(
            "--shutdown-timeout",
            INT,
            None,
            "from SIGTERM to SIGKILL when workers are stopped, 30; 0: both at once",
            "SECONDS",
            least=0,
            launchers_only=True,
        ),
        own(
            "--grow",
            TEXT,
            "drain",
            "when a new node joins a running job: now, drain (if the script has safe points) or never",
            "HOW",
            choices=("now", "drain", "never"),
        ),
        own(
            "--survive",
            TEXT,
            "shrink",
            "when a worker is lost, others in ht.survive: shrink (go on with fewer), wait for it, or off (restart)",
            "HOW",
            choices=("shrink", "wait", "off"),
        ),
        own(
            "--min-ranks",
            INT,
            1,
            "with fewer workers left than this, all are restarted instead",
            "N",
            goes_to="job.min_ranks",
            least=1,
        ),
        own(
            "--drain-timeout",
            FLOAT,
            60.0,
            "how long workers may take to save at a safe point and leave",
            "S",
            goes_to="limits.drain_s",
            above=0,
            launchers_only=True,
        ),
        own(
            "--preempt-signal",
            TEXT,
            None,
            "a signal that announces the end of this node: drain, leave with 75; workers ignore it",
            "NAME",
            launchers_only=True,
        ),
        own(
            "--hang-timeout",
            FLOAT,
            300.0,
            "restart workers if no stack has changed for this time; 0: never",
            "S",
            goes_to="limits.hang_timeout_s",
            least=0,
            launchers_only=True,
        ),
        own(
            "--exclude-after",
            INT,
            0,
            "exclude a host for a while after N failures blamed on it; 0: never",
            "N",
            goes_to="job.exclude_after",
            least=0,
        ),
        own(
            "--health-command",
            TEXT,
            "",
            "run this before each generation; a node on which it fails is parked, and a spare is taken",
            "COMMAND",
            decides_what_runs=True,
        ),
        own(
            "--preflight",
            TEXT,
            "auto",
            "check this node before its first generation (off, quick or full; auto: quick where there are GPUs); "
            "one that cannot train is parked",
            "HOW",
            choices=("auto", "off", "quick", "full"),
        ),
        Option(
            "--event-log-handler", TEXT, "null", "where events go: null or console", "NAME", goes_to="event_log_handler"
        ),
        own(
            "--dashboard",
            TEXT,
            None,
            "serve a web page of the job there (loopback by default)",
            "[HOST:]PORT",
            number_too=True,
        ),
        own(
            "--notify",
            TEXT,
            "",
            "send start, restart, hang, straggler, lost node and end to this URL or command",
            "URL|COMMAND",
            many=True,
            joiner="\n",
            decides_what_runs=True,
        ),
        own(
            "--otel",
            TEXT,
            None,
            "send a span of the run and of each generation to this OTLP/HTTP receiver",
            "URL",
            decides_what_runs=True,
        ),
        own(
            "--metrics",
            TEXT,
            None,
            "serve Prometheus metrics there (loopback by default)",
            "[HOST:]PORT",
            number_too=True,
        ),
        own(
            "--health",
            TEXT,
            None,
            "serve health checks there; it may be the port of --metrics",
            "[HOST:]PORT",
            number_too=True,
        ),
    ),
    *in_group(
        LOGS,
        Option("--log-dir", TEXT, None, "folder of the run folders; /dev/null for no files", "DIR"),
        Option(
            "--redirects",
            TEXT,
            "0",
            "to file only: 1 stdout, 2 stderr, 3 both; or RANK:N,...",
            "SPEC",
            short="-r",
            number_too=True,
            launchers_only=True,
        ),
        Option(
            "--tee",
            TEXT,
            "0",
            "to file and console, numbers as for --redirects",
            "SPEC",
            short="-t",
            number_too=True,
            launchers_only=True,
        ),
        Option(
            "--local-ranks-filter",
            TEXT,
            "",
            "show only these local ranks on the console",
            "RANK,...",
            launchers_only=True,
        ),
        own("--ranks-filter", TEXT, "", "show only these ranks of the job on the console", "RANK,..."),
        Option("--duplicate-stdout-filters", LIST, (), "copy teed stdout lines that contain one of these", "TEXT,..."),
        Option("--duplicate-stderr-filters", LIST, (), "copy teed stderr lines that contain one of these", "TEXT,..."),
        own(
            "--no-dedup",
            FLAG,
            False,
            "show each line and traceback of each rank, even if all ranks print the same",
        ),
        Option(
            "--log-line-prefix-template",
            TEXT,
            "",
            "prefix of console lines: ${role_name}, ${rank}, ${local_rank}, ${hostname}",
            "TEXT",
            newer=True,
        ),
        Option("--logs-specs", TEXT, None, "torchrun's plug-in for logs; only `default` is supported", "NAME"),
    ),
    *in_group(
        PLACEMENT,
        Option(
            "--numa-binding",
            TEXT,
            None,
            "bind workers to CPUs: node, socket, exclusive or core-complex",
            "MODE",
            choices=("node", "socket", "exclusive", "core-complex"),
            goes_to="numa_binding",
            launchers_only=True,
        ),
        Option(
            "--virtual-local-rank",
            FLAG,
            False,
            "LOCAL_RANK=0 for all; each worker sees only its own GPU",
            goes_to="virtual_local_rank",
            launchers_only=True,
        ),
    ),
    *in_group(
        HOSTS,
        own(
            "--hosts",
            TEXT,
            "",
            "start the job on these hosts, from here, by ssh",
            "[USER@]HOST[:SLOTS],...",
            decides_what_runs=True,
            launchers_only=True,
        ),
        own(
            "--hostfile",
            TEXT,
            "",
            "the same from a file: `host slots=8` or `host:8`, one a line",
            "FILE",
            decides_what_runs=True,
            launchers_only=True,
        ),
        own("--include", TEXT, "", "use only these of the hosts (patterns as for file names)", "HOST,...", many=True),
        own("--exclude", TEXT, "", "leave out these of the hosts", "HOST,...", many=True),
        own(
            "--host-discovery",
            TEXT,
            "",
            "a program that prints the hosts that exist now; it is run repeatedly",
            "PROGRAM",
            decides_what_runs=True,
        ),
        own(
            "--env",
            TEXT,
            "",
            "also pass these variables to the hosts; `*` as in file names",
            "NAME,...",
            many=True,
            decides_what_runs=True,
        ),
        own(
            "--ssh",
            TEXT,
            "ssh",
            "the ssh command, with options of its own: `ssh -p 2222 -i KEY` (as rsync's -e)",
            "COMMAND",
            decides_what_runs=True,
        ),
        own(
            "--python",
            TEXT,
            "",
            "Python on the hosts (~/… too), by default this one's path",
            "PATH",
            decides_what_runs=True,
        ),
        own(
            "--cwd", TEXT, "", "working folder on the hosts, by default the same as here", "DIR", decides_what_runs=True
        ),
        own(
            "--on-disconnect",
            TEXT,
            "end",
            "what a host does when the ssh connection is lost: end, or detach and go on",
            "HOW",
            choices=("end", "detach"),
        ),
    ),
    *in_group(
        OWN,
        own(
            "--config",
            TEXT,
            "",
            "read options from this file, not from the nearest holdfast.toml",
            "FILE",
            line_only=True,
        ),
        own("--no-config", FLAG, False, "read options from no file", line_only=True),
        own("--help", FLAG, False, "print this text, and exit", short="-h", env=False, line_only=True),
        Option(
            "--print-completion",
            TEXT,
            None,
            "print a script that completes this command in that shell, and exit",
            "SHELL",
            env=False,
            choices=("bash", "zsh", "tcsh"),
            newer=True,
        ),
        own("--plan", FLAG, False, "show what would be started, where and why, and exit", line_only=True),
        own("--json", FLAG, False, "with --plan: print it as JSON", env=False, line_only=True),
        own("--version", FLAG, False, "print the version, and exit", env=False, line_only=True),
    ),
)
"""torchrun's options and ours. A prefix that fits one of torchrun's never means one of ours."""

USE_ENV = Option(
    "--use-env",
    FLAG,
    False,
    "do not add --local-rank=N to the script's arguments",
    env=False,
    group=PROGRAM,
    line_only=True,
)
LAUNCH_OPTIONS = (*OPTIONS, USE_ENV)
TABLES = {"run": OPTIONS, "launch": LAUNCH_OPTIONS}
"""The options of each command."""


def render(command: str) -> str:
    """The text of `holdfast COMMAND --help`."""
    table = TABLES[command]
    lines = [
        f"usage: holdfast {command} [options] script.py [arguments of the script]",
        "",
        "Starts the workers of this node and keeps the job going. Options are torchrun's:",
        "each is also accepted with underscores, abbreviated as long as it is",
        "unambiguous, and read from the variable named at its end.",
    ]
    for group in dict.fromkeys(option.group for option in table):
        lines += ["", f"{group}:", *(line(option) for option in table if option.group == group)]
    return "\n".join(lines)


def line(option: Option) -> str:
    """The lines of the help about one option."""
    names = f"{option.short}, {option.name}" if option.short else option.name
    left = f"  {names} {option.metavar}".rstrip()
    texts = wrapped(f"{option.help}{origin(option)}", WIDTH - COLUMN)
    head = [f"{left:{COLUMN}}{texts.pop(0)}"] if len(left) < COLUMN - 1 else [left]
    return "\n".join([*head, *(f"{'':{COLUMN}}{each}" for each in texts)])


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of this width. (textwrap would load the modules of regular expressions.)

    >>> wrapped("one two three", 8)
    ['one two', 'three']
    """
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def origin(option: Option) -> str:
    """Default and variable of an option, in brackets."""
    shown = option.kind != FLAG and option.default not in (None, "", ())
    parts = [str(option.default)] if shown else []
    if option.variable:
        parts.append(option.variable)
    return f"  [{'; '.join(parts)}]" if parts else ""
