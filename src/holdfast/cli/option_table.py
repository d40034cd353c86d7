"""Every option of `holdfast run` and `holdfast launch` in one table, and `--help` from it; parser, PET_ reading and
plan come from it as well.

Knows names, types and defaults (torchrun's); knows nothing of what the values mean. Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


COLUMN = 38
"""Where the explanations begin."""


FLAG, TEXT, INT, FLOAT, LIST = "flag", "text", "int", "float", "list"
"""Kinds of option: what a value is turned into. LIST is separated by commas, `,,` is one literal comma."""


class Option(NamedTuple):
    name: str
    """All-dash spelling; the all-underscore one is accepted as well."""
    kind: str
    default: object
    group: str
    help: str
    """One line."""
    metavar: str = ""
    short: str = ""
    env: bool = True
    """Whether a variable gives the default: PET_ for torchrun's options, HOLDFAST_ (or PET_) for ours."""
    choices: tuple[str, ...] = ()
    ours: bool = False
    newer: bool = False
    """torchrun has it since 2.14: a beginning that meant another option before still means that one."""
    many: bool = False
    """May be said several times: the texts are joined."""
    joiner: str = ","

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Short, all-dash and all-underscore, in the order torchrun declares them."""
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
    def variable(self) -> str:
        """The variable that the help names; empty when there is none."""
        return self.variables[0] if self.variables else ""


NODES, RENDEZVOUS, PROGRAM = "nodes and processes", "rendezvous", "program"
HOSTS = "several hosts by ssh"
LIFE, LOGS, PLACE, OURS = "restarts and end", "logs", "placement", "holdfast's own"

OPTIONS: tuple[Option, ...] = (
    Option("--nnodes", TEXT, "1:1", NODES, "number of nodes, or the range the job may have", "N|MIN:MAX"),
    Option("--nproc-per-node", TEXT, "1", NODES, "workers on this node: a number, auto, gpu, cpu or xpu", "N|DEVICE"),
    Option("--node-rank", INT, 0, NODES, "rank of this node (static: required; otherwise preferred)", "RANK"),
    Option("--role", TEXT, "default", NODES, "role of the workers: ROLE_NAME and log prefix", "NAME"),
    Option("--standalone", FLAG, False, RENDEZVOUS, "one node by itself; needs no endpoint and no free port"),
    Option("--rdzv-backend", TEXT, "static", RENDEZVOUS, "how the nodes meet: c10d, static, etcd, etcd-v2", "NAME"),
    Option("--rdzv-endpoint", TEXT, "", RENDEZVOUS, "where they meet, the same on all nodes", "HOST[:PORT]"),
    Option("--rdzv-id", TEXT, "none", RENDEZVOUS, "name of the job, the same on all nodes", "ID"),
    Option("--rdzv-conf", TEXT, "", RENDEZVOUS, "further settings of the rendezvous", "KEY=VALUE,..."),
    Option("--master-addr", TEXT, "127.0.0.1", RENDEZVOUS, "address of node 0 (static only)", "HOST"),
    Option("--master-port", INT, None, RENDEZVOUS, "port on node 0, 29500 by default (static only)", "PORT"),
    Option("--local-addr", TEXT, None, RENDEZVOUS, "address under which the others reach this node", "HOST"),
    Option("--module", FLAG, False, PROGRAM, "the script is a module name, as in `python -m`", short="-m"),
    Option("--no-python", FLAG, False, PROGRAM, "the script is a program: execute it without python"),
    Option("--run-path", FLAG, False, PROGRAM, "run the script in the worker by runpy; beats the two above"),
    Option(
        "--start-method",
        TEXT,
        "spawn",
        PROGRAM,
        "how --run-path workers are made: spawn, fork or forkserver",
        "METHOD",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        "--preload",
        TEXT,
        "auto",
        PROGRAM,
        "import once per node and fork the workers: auto, none or modules",
        "auto|none|MODULE,...",
        ours=True,
    ),
    Option(
        "--standby",
        TEXT,
        "on",
        LIFE,
        "keep the next generation's workers forked and parked, where they are forked: on or off",
        "on|off",
        choices=("on", "off"),
        ours=True,
    ),
    Option("--max-restarts", INT, 0, LIFE, "so many worker failures are answered by a restart", "N"),
    Option("--monitor-interval", FLOAT, 0.1, LIFE, "accepted as in torchrun; nothing here polls", "SECONDS"),
    Option(
        "--signals-to-handle",
        TEXT,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        LIFE,
        "signals that end this node's part of the job",
        "NAME,...",
    ),
    Option("--shutdown-timeout", INT, None, LIFE, "from SIGTERM to SIGKILL when workers are stopped, 30", "SECONDS"),
    Option(
        "--grow",
        TEXT,
        "drain",
        LIFE,
        "when a new node joins a running job: now, drain (if the script has safe points) or never",
        "HOW",
        choices=("now", "drain", "never"),
        ours=True,
    ),
    Option(
        "--survive",
        TEXT,
        "shrink",
        LIFE,
        "when a worker is lost, the others, in ht.survive: shrink (go on with fewer), wait for it, or off (restart)",
        "HOW",
        choices=("shrink", "wait", "off"),
        ours=True,
    ),
    Option("--min-ranks", INT, 1, LIFE, "with fewer workers left than this, all are restarted instead", "N", ours=True),
    Option(
        "--drain-timeout",
        FLOAT,
        60.0,
        LIFE,
        "how long workers may take to save at a safe point and leave",
        "S",
        ours=True,
    ),
    Option(
        "--preempt-signal",
        TEXT,
        None,
        LIFE,
        "a signal that announces the end of this node: drain, leave with 75; workers ignore it",
        "NAME",
        ours=True,
    ),
    Option(
        "--hang-timeout",
        FLOAT,
        300.0,
        LIFE,
        "restart workers if no stack has changed for so long; 0: never",
        "S",
        ours=True,
    ),
    Option(
        "--exclude-after",
        INT,
        0,
        LIFE,
        "exclude a host for a while after N failures blamed on it; 0: never",
        "N",
        ours=True,
    ),
    Option("--event-log-handler", TEXT, "null", LIFE, "where events go: null or console", "NAME"),
    Option(
        "--metrics", TEXT, None, LIFE, "serve Prometheus metrics there (loopback by default)", "[HOST:]PORT", ours=True
    ),
    Option("--health", TEXT, None, LIFE, "answer health checks there; the same port will do", "[HOST:]PORT", ours=True),
    Option("--log-dir", TEXT, None, LOGS, "folder of the run folders; /dev/null for no files", "DIR"),
    Option(
        "--redirects", TEXT, "0", LOGS, "to file only: 1 stdout, 2 stderr, 3 both; or RANK:N,...", "SPEC", short="-r"
    ),
    Option("--tee", TEXT, "0", LOGS, "to file and console, numbers as for --redirects", "SPEC", short="-t"),
    Option("--local-ranks-filter", TEXT, "", LOGS, "show only these local ranks on the console", "RANK,..."),
    Option(
        "--duplicate-stdout-filters", LIST, (), LOGS, "copy teed stdout lines that contain one of these", "TEXT,..."
    ),
    Option(
        "--duplicate-stderr-filters", LIST, (), LOGS, "copy teed stderr lines that contain one of these", "TEXT,..."
    ),
    Option(
        "--no-dedup",
        FLAG,
        False,
        LOGS,
        "show every line of every rank at once, also those that many ranks print alike, and every traceback",
        ours=True,
    ),
    Option(
        "--log-line-prefix-template",
        TEXT,
        "",
        LOGS,
        "prefix of console lines: ${role_name}, ${rank}, ${local_rank}, ${hostname}",
        "TEXT",
        newer=True,
    ),
    Option("--logs-specs", TEXT, None, LOGS, "torchrun's plug-in for logs; only `default` is supported", "NAME"),
    Option(
        "--numa-binding",
        TEXT,
        None,
        PLACE,
        "bind workers to CPUs: node, socket, exclusive or core-complex",
        "MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    Option("--virtual-local-rank", FLAG, False, PLACE, "LOCAL_RANK=0 for all; each worker sees only its own GPU"),
    Option("--slurm", FLAG, False, NODES, "in a Slurm batch script: start an agent on each node of the job", ours=True),
    Option(
        "--hosts",
        TEXT,
        "",
        HOSTS,
        "start the job on these hosts, from here, by ssh",
        "[USER@]HOST[:SLOTS],...",
        ours=True,
    ),
    Option(
        "--hostfile", TEXT, "", HOSTS, "the same from a file: `host slots=8` or `host:8`, one a line", "FILE", ours=True
    ),
    Option(
        "--include",
        TEXT,
        "",
        HOSTS,
        "of these hosts only those (patterns as of file names)",
        "HOST,...",
        ours=True,
        many=True,
    ),
    Option("--exclude", TEXT, "", HOSTS, "of these hosts all but those", "HOST,...", ours=True, many=True),
    Option(
        "--host-discovery",
        TEXT,
        "",
        HOSTS,
        "a program that prints the hosts there are now, asked again and again",
        "PROGRAM",
        ours=True,
    ),
    Option(
        "--env",
        TEXT,
        "",
        HOSTS,
        "send these variables along too; `*` as in file names",
        "NAME,...",
        ours=True,
        many=True,
    ),
    Option(
        "--ssh",
        TEXT,
        "ssh",
        HOSTS,
        "the ssh command, with options of its own: `ssh -p 2222 -i KEY` (as rsync's -e)",
        "COMMAND",
        ours=True,
    ),
    Option("--python", TEXT, "", HOSTS, "Python on the hosts (~/… too), by default this one's path", "PATH", ours=True),
    Option("--cwd", TEXT, "", HOSTS, "working folder on the hosts, by default the same as here", "DIR", ours=True),
    Option(
        "--on-disconnect",
        TEXT,
        "end",
        HOSTS,
        "what a host does when the ssh connection is lost: end, or detach and go on",
        "HOW",
        choices=("end", "detach"),
        ours=True,
    ),
    Option(
        "--config", TEXT, "", OURS, "read options from this file, not from the nearest holdfast.toml", "FILE", ours=True
    ),
    Option("--no-config", FLAG, False, OURS, "read options from no file", ours=True),
    Option("--help", FLAG, False, OURS, "print this text, and exit", env=False, ours=True, short="-h"),
    Option(
        "--print-completion",
        TEXT,
        None,
        OURS,
        "print a script that completes this command in that shell, and exit",
        "SHELL",
        env=False,
        choices=("bash", "zsh", "tcsh"),
        newer=True,
    ),
    Option("--plan", FLAG, False, OURS, "print who would run what, and exit", ours=True),
    Option("--version", FLAG, False, OURS, "print the version, and exit", env=False, ours=True),
)
"""torchrun's options and ours. A prefix that fits one of torchrun's never means one of ours."""

USE_ENV = Option("--use-env", FLAG, False, PROGRAM, "do not add --local-rank=N to the script's arguments", env=False)
LAUNCH_OPTIONS = (*OPTIONS, USE_ENV)
"""The table of `holdfast launch`."""


def render(command: str, table: Sequence[Option]) -> str:
    """The text of `holdfast COMMAND --help`."""
    lines = [
        f"usage: holdfast {command} [options] script.py [arguments of the script]",
        "",
        "Starts the workers of this node and keeps the job going. Options are torchrun's: each is also accepted with",
        "underscores, abbreviated as long as it is unambiguous, and read from the variable named at its end.",
    ]
    for group in dict.fromkeys(option.group for option in table):
        lines += ["", f"{group}:", *(line(option) for option in table if option.group == group)]
    return "\n".join(lines)


def line(option: Option) -> str:
    names = f"{option.short}, {option.name}" if option.short else option.name
    left = f"  {names} {option.metavar}".rstrip()
    gap = " " * max(COLUMN - len(left), 2)
    return f"{left}{gap}{option.help}{origin(option)}"


def origin(option: Option) -> str:
    """Default and variable, in brackets."""
    shown = option.kind != FLAG and option.default not in (None, "", ())
    parts = [str(option.default)] if shown else []
    if option.variable:
        parts.append(option.variable)
    return f"  [{'; '.join(parts)}]" if parts else ""
