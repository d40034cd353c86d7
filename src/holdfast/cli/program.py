"""The program of the workers: its command, checked before anything starts, and the modules to preload for it.

--preload auto decides from the script's syntax tree which modules a node imports once for all workers. It must never
change what a script sees, so it preloads nothing where the script sets environment variables before it imports torch,
or where the source is not clear. Knows the file system as the worker will see it (same folder, same PATH), Python's
syntax and the packages that use torch; imports none of them.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.protocol.errors import EnvironmentValueError, ScriptError, UsageError
from holdfast.protocol.options import CommandKind, Preload, WorkerCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.cli.grammar import Parsed
    from holdfast.protocol.policy import JobSpec


DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def worker_command(parsed: Parsed, environ: Mapping[str, str], notices: list[str]) -> WorkerCommand:
    """The command of each worker. Raises UsageError for flags that exclude each other, ScriptError for a script that
    cannot be run."""
    values = parsed.values
    kind = command_kind(parsed, notices)
    target: str = values.training_script
    use_env: bool = getattr(values, "use_env", True)
    if not use_env and values.no_python:
        raise UsageError("holdfast launch --no-python needs --use-env as well")
    if not target:
        raise ScriptError("the training script's name is empty")
    if kind is CommandKind.PROGRAM:
        if "$" not in target:
            check_program(target, environ)
    elif kind is CommandKind.MODULE:
        check_module(target, environ)
    elif target == "-":
        raise ScriptError("the script is -, standard input, which only one worker could read, and once: give a file")
    elif "$" not in target:  # `$local_rank`: known per worker
        check_script(target, environ)
    return WorkerCommand(
        kind=kind,
        target=target,
        args=tuple(values.training_script_args),
        python="" if kind is CommandKind.PROGRAM else interpreter(environ),
        local_rank_argument=not use_env,
    )


def command_kind(parsed: Parsed, notices: list[str]) -> CommandKind:
    values = parsed.values
    if values.run_path:
        idle = [parsed.as_written(dest) for dest in ("module", "no_python") if getattr(values, dest)]
        if idle:
            notices.append(f"{' and '.join(idle)} without effect: --run-path wins")
        return CommandKind.RUN_PATH
    # torchrun's rules: --run-path has precedence, and the other two exclude each other.
    if values.no_python and values.module:
        raise UsageError("--no-python and --module exclude each other")
    if values.no_python:
        return CommandKind.PROGRAM
    return CommandKind.MODULE if values.module else CommandKind.SCRIPT


PYTHON = re.compile(r"(?:pypy|python)[\d.]*")
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "holdfast"})
HEAD_BYTES = 256
"""Length of a program's beginning that the kernel reads to find the interpreter."""
MAGIC = b"\x7fELF"


def check_script(path: str, environ: Mapping[str, str]) -> None:
    """Raise ScriptError for a file that python could not run."""
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise ScriptError(f"the training script {path} is a folder without a __main__.py")
    elif not os.path.exists(path):
        raise ScriptError(f"the training script {path} does not exist{hint(path, environ)}")
    if not os.access(path, os.R_OK):
        raise ScriptError(f"the training script {path} cannot be read: permission denied")
    if os.path.isfile(path):
        check_language(path, head_of(path), environ)


def check_language(path: str, head: bytes, environ: Mapping[str, str]) -> None:
    """Raise ScriptError for a file that is no Python: a notebook, or a program of its own."""
    name = os.path.basename(path)
    if name.endswith(".ipynb") and head.lstrip().startswith(b"{"):
        raise ScriptError(
            f"{path} is a notebook: convert it with `jupyter nbconvert --to script {path}`, "
            "or call holdfast.launch in the notebook"
        )
    if head.startswith(MAGIC):
        raise ScriptError(f"{path} is a program, not a Python script{meant(path, environ)}")


def hint(path: str, environ: Mapping[str, str]) -> str:
    """The end of a message about a script that does not exist: what may be meant, else the folder."""
    near = closest(path)
    if near and not PYTHON.fullmatch(os.path.basename(path)):
        return f"; did you mean {near}?"
    return meant(path, environ) or similar(path)


def meant(path: str, environ: Mapping[str, str]) -> str:
    """The advice if a program was given as the training script, as in `holdfast run python train.py`; empty: it is
    none."""
    first, *others = path.split()[:2] or [path]
    name = os.path.basename(first)
    quoted = ". Give the script and its arguments without quotes" if others else ""
    if PYTHON.fullmatch(name):
        return f"; holdfast starts Python itself: leave {first!r} out{quoted}"
    if name in LAUNCHERS:
        return f"; `holdfast run` takes the place of {name}: leave {first!r} out{quoted}"
    if find_program(first, environ) is not None:
        return f"; to run the program {first}, write --no-python before it{quoted}"
    if others and os.path.isfile(first):
        return f"; the script is {first!r}{quoted}"
    return ""


CURRENT_FOLDER = ""
"""An entry of a module search path. Unlike what os.getcwd() gives, it is none if that folder was deleted."""


def check_module(name: str, environ: Mapping[str, str]) -> None:
    """Raise ScriptError for the name of a file, and for a module that Python cannot find.

    `python -m train.py` would report the first only after running `train`. Only a top-level name is searched: a module
    of a package may be known only when the package is imported.
    """
    if name.endswith(".py") and os.path.isfile(name) and not os.path.isdir(name.removesuffix(".py")):
        raise ScriptError(f"-m needs a module's name, but {name} is a file; leave -m out")
    top = name.partition(".")[0]
    if "/" in name:
        raise ScriptError(f"-m needs a module's name, but {name} is a path; leave -m out")
    if "$" in name or interpreter(environ) != sys.executable or module_exists(top):
        return
    raise ScriptError(f"no module named {top!r}: it is neither installed nor in {folder_here()}{similar_module(top)}")


def module_exists(top: str) -> bool:
    """Whether Python finds this module, with the current folder first, as after -m. Imports nothing."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        return PathFinder.find_spec(top, [CURRENT_FOLDER]) is not None or find_spec(top) is not None
    except (ImportError, ValueError):  # a finder of an installed package fails, or the module has no spec
        return True


def similar_module(top: str) -> str:
    """The end of a message, `; did you mean X?`, for a module in the current folder; empty: none is similar."""
    import difflib

    try:
        names = [name.removesuffix(".py") for name in os.listdir() if name.endswith(".py") or os.path.isdir(name)]
    except OSError:
        return ""
    matches = difflib.get_close_matches(top, names, n=1, cutoff=0.75)
    return f"; did you mean {matches[0]}?" if matches else ""


def similar(path: str) -> str:
    """The end of a message: `; did you mean X?` if the folder has a file with a similar name, else the folder."""
    if near := closest(path):
        return f"; did you mean {near}?"
    return "" if os.path.isabs(path) else f" in {folder_here()}"


def closest(path: str) -> str:
    """A file in the same folder with a similar name; empty: there is none."""
    import difflib

    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        names = []
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return os.path.join(folder, matches[0]) if matches else ""


def folder_here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "the current folder, which was deleted"


def check_program(name: str, environ: Mapping[str, str]) -> None:
    """Raise ScriptError unless exec would find the program, and its interpreter."""
    found = find_program(name, environ)
    if found is not None:
        check_interpreter(found, head_of(found))
        return
    words = name.split()
    if len(words) > 1 and not os.path.exists(name):
        raise ScriptError(f"the program {name!r} does not exist; write it without quotes, the words are its arguments")
    if "/" not in name:
        raise ScriptError(f"the program {name} is not on PATH; write ./{name} for one in this folder")
    if os.path.isdir(name):
        raise ScriptError(f"the program {name} is a folder")
    if os.path.exists(name):
        raise ScriptError(f"the program {name} is not executable; chmod +x it, or leave --no-python out for python")
    raise ScriptError(f"the program {name} does not exist{similar(name)}")


def check_interpreter(path: str, head: bytes) -> None:
    """Raise ScriptError for a script that the kernel cannot execute: no interpreter, or one that does not exist."""
    if head.startswith(MAGIC) or b"\0" in head:  # a program of this kernel, or of one that is registered with it
        return
    first, ended, _ = head.partition(b"\n")
    if not first.startswith(b"#!"):
        advice = "; leave --no-python out" if path.endswith(".py") else ", for example #!/bin/bash"
        before = " (it has a byte order mark before it)" if head.startswith(b"\xef\xbb\xbf#!") else ""
        raise ScriptError(f"the program {path} does not begin with #! and the path of its interpreter{before}{advice}")
    words = first.removeprefix(b"#!").split(b" ")
    named, *given = [os.fsdecode(word) for word in words if word.strip(b"\t")] or [""]
    is_complete = bool(ended) or len(head) < HEAD_BYTES
    last_word = [named, *given][-1] if os.path.basename(named) == "env" else named
    if last_word.endswith("\r"):
        raise ScriptError(
            f"the program {path} has the line ends of Windows (CRLF), so its interpreter is not found; "
            f"remove them: sed -i 's/\\r$//' {path}"
        )
    if is_complete and not os.path.exists(named):
        raise ScriptError(f"the program {path} names the interpreter {named!r} in its first line, which does not exist")


def head_of(path: str) -> bytes:
    """The first bytes of a file. One that may be executed but not read counts as a compiled program."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return MAGIC


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """The file that exec would run. (shutil.which would load the compression modules.)"""
    folders = [""] if "/" in name else environ.get("PATH", DEFAULT_PATH).split(os.pathsep)
    candidates = (os.path.join(folder, name) for folder in folders)
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), None)


PYTHON_VARIABLE = "PYTHON_EXEC"


def interpreter(environ: Mapping[str, str]) -> str:
    """The workers' Python: PYTHON_EXEC, one path that is never split; else the one that runs this."""
    python = environ.get(PYTHON_VARIABLE)
    if not python:
        return sys.executable
    if find_program(python, environ) is None:
        raise EnvironmentValueError(
            f"{PYTHON_VARIABLE}={python}: no such executable; it must be one path without arguments"
        )
    return python


AUTO, NONE = "auto", "none"
TORCH = ("numpy", "torch")
TRAINING = "torch._dynamo"
"""A module that the first optimizer and DistributedDataParallel import. It takes as long as torch itself."""
OURS = "holdfast.train"
OUR_MODULES = (f"{OURS}.snapshots_api", f"{OURS}.data.loader", f"{OURS}.survival")
"""The modules that `holdfast.train` imports when its names are used: 0.15 to 0.25 s in each worker."""
SOURCE_BYTES_MAX = 300_000
"""Limit for a program and the modules beside it: reading them takes about 50 ms."""

TORCH_USERS = frozenset(
    [
        "torch",
        "accelerate",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "transformers",
        "deepspeed",
        "fairscale",
        "composer",
        "trl",
        "peft",
        "ignite",
        "catalyst",
        "fastai",
        "torchvision",
        "torchaudio",
        "torchtext",
        "megatron",
        "colossalai",
        "horovod",
        "nemo",
        "torchtune",
    ]
)
"""torch and packages that use it: a program that imports one of them probably opens a process group."""
LIGHT_USERS = frozenset(["torch", "torchvision", "torchaudio", "torchtext"])
"""Packages that do not train by themselves."""
TRAINING_WORDS = frozenset(
    [
        "optim",
        "DistributedDataParallel",
        "DDP",
        "FullyShardedDataParallel",
        "FSDP",
        "fully_shard",
        "_dynamo",
        "tensor_parallel",
    ]
)
ENVIRON = frozenset(["environ", "environb"])
CHANGING_METHODS = frozenset(
    ["setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__"]
)
CHANGING_CALLS = frozenset(["putenv", "unsetenv", "load_dotenv", "sched_setaffinity"])


def preload(
    parsed: Parsed, command: WorkerCommand, job: JobSpec, *, counted: bool, installed: Callable[[str], bool]
) -> Preload:
    """The result of --preload. `counted` says that OMP_NUM_THREADS is set for the workers. Raises UsageError."""
    requested: str = parsed.values.preload
    if requested not in (AUTO, NONE):
        modules = tuple(name.strip() for name in requested.split(","))
        if not all(part.isidentifier() for name in modules for part in name.split(".")):
            raise parsed.error("preload", UsageError, "must be auto, none, or names of modules")
    if command.kind is CommandKind.PROGRAM:
        return Preload(why="as asked for" if requested == NONE else "--no-python programs are always executed")
    choice = decide(command, restarts=job.max_restarts > 0 or job.min_nodes != job.max_nodes)
    if requested == NONE:
        return Preload(why="as asked for", torch=choice.torch)
    if parsed.values.numa_binding and not counted:
        why = "with --numa-binding libraries count their CPUs when they are loaded; set OMP_NUM_THREADS"
        return Preload(why=why, torch=choice.torch)
    if requested != AUTO:
        return Preload(modules=modules, why="as asked for", torch=choice.torch)
    if choice.modules and command.python == sys.executable:
        if not installed("torch"):
            return Preload(why="torch is not installed", torch=choice.torch)
        if not installed("numpy"):  # torch does not need it
            present = tuple(name for name in choice.modules if name != "numpy")
            return Preload(modules=present, later=choice.later, why=choice.why, torch=choice.torch)
    return choice


def decide(command: WorkerCommand, *, restarts: bool) -> Preload:
    """The decision of `--preload auto`. `restarts` says that workers may be started a second time."""
    try:
        sources = sources_of(command)
        if not sources:
            return Preload(why=f"the source of {command.target} is not known in advance")
        reader = Reader()
        for source in sources:
            try:
                reader.read(source)
            except BrokenSourceError as error:
                # Another Python may know another syntax, and a module beside the script may be imported in a `try`.
                if error.path in sources and command.python == sys.executable:
                    raise ScriptError(str(error)) from None
                raise
    except UnreadableError as error:
        return Preload(why=str(error))
    except RecursionError:  # a sum of 500 terms, a chain of 330 `elif`: Python runs both
        return Preload(why=f"{command.target} is nested too deeply to be read in advance")

    name = os.path.basename(sources[-1])
    user, setting = reader.verdict()
    if not user:
        return Preload(why=f"{name} imports nothing that is built on torch")
    if setting:
        return Preload(why=f"{setting} before {user} is imported", torch=user)
    word = reader.training
    if word:
        modules = (*TORCH, TRAINING, *(OUR_MODULES if word == OURS else ()))
        return Preload(modules=modules, why=f"{name} imports {user} and uses {word}", torch=user)
    later = (TRAINING,) if restarts else ()
    return Preload(modules=TORCH, later=later, why=f"{name} imports {user}", torch=user)


def sources_of(command: WorkerCommand) -> list[Path]:
    """The files that run as or before the program, in this order; empty: only the worker knows them."""
    if "$" in command.target:
        return []
    if command.kind is not CommandKind.MODULE:
        path = Path(command.target)
        path = path / "__main__.py" if path.is_dir() else path
        return [path]
    return list(module_sources(command.target, ours=command.python in ("", sys.executable)))


def module_sources(name: str, *, ours: bool) -> Iterator[Path]:
    """The files of a module and its packages, without importing any. `ours` says that the worker's Python is this
    one."""
    from importlib.machinery import PathFinder

    where: list[str] | None = [CURRENT_FOLDER, *(sys.path if ours else [])]
    parts = name.split(".")
    found: list[Path] = []
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), where)
        if spec is None:
            return
        where = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin))
        if where is None and depth < len(parts):
            return
    if where is not None:  # a package is run by its __main__
        main = Path(where[0]) / "__main__.py"
        if not main.is_file():
            return
        found.append(main)
    yield from found


def module_beside(source: Path, name: str) -> Path | None:
    candidates = (source.parent / f"{name}.py", source.parent / name / "__init__.py")
    return next((path for path in candidates if path != source and path.is_file()), None)


class UnreadableError(Exception):
    """The reason why a source cannot be analysed."""


class BrokenSourceError(UnreadableError):
    """The source has an error in its syntax."""

    def __init__(self, path: Path, source: bytes, error: SyntaxError) -> None:
        line = f"line {error.lineno}: " if error.lineno else ""
        text = f": `{error.text.strip()}`" if error.text and error.text.strip() else ""
        first = source.partition(b"\n")[0]
        other = first.startswith(b"#!") and b"python" not in first
        run_it = "; its first line names another interpreter: write --no-python before it" if other else ""
        super().__init__(f"{path} is not valid Python: {line}{error.msg}{text}{run_it}")
        self.path = path


class Reader(ast.NodeVisitor):
    """Follows a program's statements in the order in which they run when it is loaded, up to the first torch."""

    def __init__(self) -> None:
        self.training = ""
        """The name that shows that the program trains; empty: none was found."""
        self._user = ""
        """The first import that loads torch when the program is loaded; empty: there is none yet."""
        self._setting = ""
        """The first change of the environment before that import, in words."""
        self._functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        """The functions that are defined so far: a call continues in their bodies."""
        self._called: set[str] = set()
        self._seen: set[Path] = set()
        self._file = Path()
        """The file that is being read."""
        self._bytes_left = SOURCE_BYTES_MAX
        self._late_user = ""
        """The first import of torch in any function, which may run at any time or never."""
        self._late_setting = ""
        """The first change of the environment anywhere."""

    def verdict(self) -> tuple[str, str]:
        """The import that loads torch, and the change of the environment before it; both may be empty."""
        if self._user:
            return self._user, self._setting
        # Only a function imports it, and it is unknown what runs before that.
        return self._late_user, self._setting or self._late_setting

    def read(self, path: Path) -> None:
        """Read a file, and the modules beside it that it imports. Raises UnreadableError for one that is not Python or
        too long."""
        self._seen.add(path)
        tree = self._tree(path)
        self._scan(tree, path)
        before, self._file = self._file, path
        for statement in tree.body:
            self.visit(statement)
        self._file = before

    def _tree(self, path: Path) -> ast.Module:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # what is read from a pipe would be lost to the worker
                raise UnreadableError(f"{path.name} is not a regular file")
            self._bytes_left -= status.st_size
            if self._bytes_left < 0:
                raise UnreadableError(f"with {path.name} it is more than {SOURCE_BYTES_MAX:,} bytes of source to read")
            source = path.read_bytes()
        except OSError as error:
            raise UnreadableError(f"{path.name} cannot be read: {error.strerror}") from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(source, str(path))
        except SyntaxError as error:
            if b"\0" not in source:  # an archive, or compiled code, which Python runs, has zeros
                raise BrokenSourceError(path, source, error) from None
            raise UnreadableError(f"{path.name} is not Python") from None
        except (ValueError, RecursionError, MemoryError):
            raise UnreadableError(f"{path.name} is not Python") from None

    # --- in the order of execution ------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._define(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Skip the body, which does not run here."""

    def visit_If(self, node: ast.If) -> None:
        if name_of(node.test) == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imports(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            for alias in node.names:
                self._imports(f"{node.module}.{alias.name}")
        elif node.level == 1:
            for name in [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]:
                self._follow(name)

    def visit_Call(self, node: ast.Call) -> None:
        self._note(change(node), node)
        self.generic_visit(node)
        name = name_of(node.func)
        if isinstance(node.func, ast.Name) and name in self._functions and name not in self._called:
            self._called.add(name)
            for statement in self._functions[name].body:
                self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self._note(change(node), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self._note(change(node), node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._note(change(node), node)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions[node.name] = node
        users = (name for inner in ast.walk(node) for name in imported_names(inner)[:1] if name in TORCH_USERS)
        self._late_user = self._late_user or next(users, "")
        for decorator in node.decorator_list:
            self.visit(decorator)

    def _imports(self, name: str) -> None:
        package = name.partition(".")[0]
        if package in TORCH_USERS or f"{name}.".startswith(f"{OURS}."):
            self._user = self._user or (package if package in TORCH_USERS else OURS)
        elif not self._user:  # what runs after torch is loaded cannot change how it is loaded
            self._follow(package)

    def _follow(self, name: str) -> None:
        """Read a module beside the program, which runs when it is imported."""
        beside = module_beside(self._file, name)
        if beside is not None and beside not in self._seen:
            self.read(beside)

    def _note(self, what: str, node: ast.expr | ast.stmt) -> None:
        if what and not self._user and not self._setting:
            self._setting = f"{self._file.name} line {node.lineno} {what}"

    # --- anywhere in a file -------------------------------------------------------------------------------------------

    def _scan(self, tree: ast.Module, path: Path) -> None:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="torch"), attr="compile"):
                    self.training = self.training or "torch.compile"
                case ast.Attribute(attr=word) | ast.Name(id=word) if word in TRAINING_WORDS:
                    self.training = self.training or word
            names = imported_names(node)
            if names[:2] == OURS.split("."):
                self.training = OURS
            heavy = {*names[:1]} & (TORCH_USERS - LIGHT_USERS) or {*names} & TRAINING_WORDS
            self.training = self.training or next(iter(sorted(heavy)), "")
            if not self._late_setting and (what := change(node)):
                self._late_setting = f"{path.name} line {getattr(node, 'lineno', 0)} {what}"


def imported_names(node: ast.AST) -> list[str]:
    """All names of an import, the package first; empty for other nodes and for relative imports."""
    match node:
        case ast.Import(names=aliases):
            return [part for alias in aliases for part in alias.name.split(".")]
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            return [*module.split("."), *(alias.name for alias in aliases)]
    return []


def change(node: ast.AST) -> str:
    """The change of the environment that a node makes, in words; empty: none."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return next((said for target in targets if (said := _written(target))), "")
        case ast.AugAssign(target=target):
            return _written(target)
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=arguments) if name_of(value) in ENVIRON:
            return f"changes {_variable(arguments)}" if method in CHANGING_METHODS else ""
        case ast.Call(func=function) if (name := name_of(function)) in CHANGING_CALLS:
            return f"calls {name}"
    return ""


def _written(target: ast.expr) -> str:
    match target:
        case ast.Subscript(value=value, slice=key) if name_of(value) in ENVIRON:
            return f"sets {_variable([key])}"
        case ast.Attribute(attr="environ"):
            return "changes the environment"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return next((said for part in parts if (said := _written(part))), "")
    return ""


def _variable(arguments: list[ast.expr]) -> str:
    match arguments:
        case [ast.Constant(value=str(name)), *_]:
            return name
    return "the environment"


def name_of(node: ast.expr) -> str:
    """The last word of a dotted name."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
