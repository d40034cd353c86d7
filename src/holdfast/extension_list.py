"""The list of extensions: what holdfast does about a running job besides forming, starting and stopping generations.

Each is a folder of `holdfast.extensions` with those files that it needs:

    messages.py     what its halves say to each other, what it is asked about, what it answers
    coordinator.py  `AtCoordinator`, its half at the coordinator (pure: protocol/extension.py)
    node.py         `OnNode`, its half on each node (runtime/node_extension.py)
    worker.py       what runs in a worker, loaded by its path
    ahead.py        `work(options)`: what a child finds out while the agent imports its modules (runtime/ahead.py)
    command.py      its commands: `main_NAME` and `NAME_parser` for each

The list is literal, and a file is imported when it is needed: with the first question, message, or command. To add one,
add its folder and its line here. Imports nothing, because the command line reads it before anything else.
"""

TYPE_CHECKING = False  # importing typing would take time in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from holdfast.protocol.extension import CoordinatorExtension, Job
    from holdfast.protocol.options import RunOptions
    from holdfast.runtime.node_extension import Node, NodeExtension, Send


class Extension:
    """One line of the list."""

    def __init__(
        self,
        name: str,
        *,
        questions: tuple[str, ...] = (),
        commands: "Mapping[str, str]" = {},  # noqa: B006 - never changed
        follows: bool = False,
        begins: "Callable[[RunOptions], bool] | None" = None,
        ahead: "Callable[[RunOptions], bool]" = lambda _: False,
        package: str = "holdfast.extensions",
    ) -> None:
        """`questions`: those that its half at the coordinator answers. `commands`: sub-commands of holdfast, and what
        they do. `follows`: its halves are made at the start, because they have something to do without a question.
        `begins`: whether its half on a node does, in a job with these options; None: as `follows` says. `ahead`:
        whether its file ahead.py does."""
        self.name = name
        self.questions = questions
        self.commands = commands
        self.follows = follows
        self._begins = begins
        self._ahead = ahead
        self._package = package

    def coordinator(self, job: "Job") -> "CoordinatorExtension":
        made: CoordinatorExtension = self.file("coordinator").AtCoordinator(job)
        return made

    def begins(self, options: "RunOptions") -> bool:
        return self.follows if self._begins is None else self._begins(options)

    def ahead(self, options: "RunOptions") -> "Callable[[], bytes] | None":
        """What a child finds out for its half on a node; None: nothing in a job with these options."""
        return (lambda: self.file("ahead").work(options)) if self._ahead(options) else None

    def node(self, node: "Node", send: "Send") -> "NodeExtension | None":
        """None: it has no half there."""
        try:
            file = self.file("node")
        except ModuleNotFoundError as error:
            if error.name != f"{self._package}.{self.name}.node":
                raise
            return None
        made: NodeExtension = file.OnNode(node, send)
        return made

    def file(self, name: str) -> "ModuleType":
        from importlib import import_module

        return import_module(f"{self._package}.{self.name}.{name}")


EXTENSIONS = (
    Extension(
        "status",
        questions=("status",),
        commands={"status": "show a running job: its nodes and ranks, steps, restarts; --watch; or how a job ended"},
    ),
    Extension(
        "stacks",
        questions=("stacks",),
        commands={"stacks": "show where all ranks of a running job are now"},
    ),
    Extension(
        "profile",
        questions=("profile",),
        commands={
            "profile": "profile ranks of a running job for some steps or seconds: trace, most expensive operations"
        },
    ),
    Extension(
        "save",
        questions=("save",),
        commands={"save": "have all ranks of a running job save at their next safe point, and go on"},
    ),
    Extension(
        "end",
        questions=("stop", "kill"),
        commands={
            "stop": "end a running job on all its nodes; its workers save first",
            "kill": "end a running job on all its nodes at once; nothing is saved",
        },
    ),
    Extension(
        "hosts",
        questions=("drain", "exclude", "readmit"),
        commands={
            "drain": "have one host's nodes leave a running job; its workers save first",
            "exclude": "the same, and keep the host out for a time; --for 1h",
            "readmit": "let an excluded host take part again",
        },
    ),
    Extension(
        "dashboard",
        commands={"dashboard": "show a job as a page in the browser: running, or ended; or the list of all"},
        begins=lambda options: options.dashboard is not None,
    ),
    Extension(
        "health",
        begins=lambda options: (
            bool(options.health_command) or options.preflight != "off" or options.watch_devices or options.watch_cards
        ),
        ahead=lambda options: options.preflight == "quick",
    ),
    Extension("load", follows=True),
    Extension("metrics", begins=lambda options: options.metrics is not None or options.health is not None),
    Extension("notices", begins=lambda options: bool(options.notify)),
    Extension("otel", begins=lambda options: options.otel is not None),
    Extension("torch_events", begins=lambda options: options.event_log_handler == "console"),
    Extension("caches", begins=lambda options: options.cache_dir is not None),
    Extension("saver", begins=lambda _options: True),
    Extension("hangs", follows=True, begins=lambda _: False),  # on a node the first order to sample is soon enough
    Extension("stragglers", follows=True, begins=lambda _: False),
)
COMMANDS = {command: each for each in EXTENSIONS for command in each.commands}
"""The extension that has a sub-command, by its name."""
