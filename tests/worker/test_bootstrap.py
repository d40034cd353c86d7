"""A program under the bootstrap beside the same program under plain python: it must not be able to tell."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.worker import bootstrap
from tests.support.limits import limit_s

BOOTSTRAP = bootstrap.__file__

PROBE = '''"""Its docstring."""
from __future__ import annotations
import atexit, sys
import __main__
from beside import VALUE

def show(name, value):
    print(name, "=", value)

def fail(text):
    raise ValueError(text)

class Strange(Exception):
    def __str__(self):
        raise RuntimeError("no text")

for name in ("argv", "path", "orig_argv", "flags", "warnoptions"):
    show(name, getattr(sys, name))
for name in sorted(globals()):
    if name.startswith("__"):
        show(name, globals()[name])
show("main is main", __main__.__dict__ is globals() and sys.modules["__main__"] is __main__)
show("value", VALUE)
show("hook", sys.excepthook is sys.__excepthook__)
show("stdout", (sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.write_through))
atexit.register(lambda: print("at exit", __name__, sys.modules["__main__"] is __main__, sys.excepthook, flush=True))
case = sys.argv[1] if len(sys.argv) > 1 else ""
if case == "raise":
    fail("bad")
elif case == "chain":
    try:
        fail("first")
    except ValueError as error:
        raise KeyError("second") from error
elif case == "group":
    raise ExceptionGroup("many", [ValueError(1), KeyError(2)])
elif case == "interrupt":
    raise KeyboardInterrupt
elif case == "strange":
    raise Strange
elif case == "generator":
    raise GeneratorExit
elif case == "deep":
    def deep(): deep()
    deep()
elif case == "exec":
    exec("import nothing_of_that_name")
elif case.startswith("exit"):
    sys.exit({"exit": None, "exit0": 0, "exit3": 3, "exit-text": "bye", "exit-300": 300, "exit-list": [1]}[case])
elif case == "hook":
    def hook(kind, error, trace):
        print("hook", kind, error, trace is error.__traceback__, trace.tb_frame.f_code.co_filename, sys.last_traceback is trace)
    sys.excepthook = hook
    fail("bad")
elif case == "bad-hook":
    def hook(kind, error, trace):
        raise RuntimeError("in the hook")
    sys.excepthook = hook
    fail("bad")
elif case == "exit-hook":
    def hook(kind, error, trace):
        sys.exit(5)
    sys.excepthook = hook
    fail("bad")
elif case == "no-hook":
    del sys.excepthook
    print(sys.modules["__main__"].__name__)
elif case == "os-exit":
    import os
    os._exit(4)
elif case == "signal":
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)
elif case == "fork":
    import os
    if os.fork() == 0:
        fail("in the child")
    show("child", os.wait()[1])
elif case == "thread":
    import threading
    thread = threading.Thread(target=fail, args=("in a thread",))
    thread.start()
    thread.join()
elif case == "pickle":
    import pickle
    show("pickle", pickle.loads(pickle.dumps(fail)) is fail)
elif case == "source":
    import inspect
    show("source", inspect.getsource(fail))
elif case == "stdin":
    show("stdin", sys.stdin.read())
'''
CASES = [
    "none",
    "raise",
    "chain",
    "group",
    "interrupt",
    "strange",
    "generator",
    "deep",
    "exec",
    "exit",
    "exit0",
    "exit3",
    "exit-text",
    "exit-300",
    "exit-list",
    "hook",
    "bad-hook",
    "exit-hook",
    "no-hook",
    "os-exit",
    "signal",
    "fork",
    "thread",
    "pickle",
    "source",
    "stdin",
]

POOLS = """
import multiprocessing, os, sys
print("seen as", __name__, __file__, os.path.basename(sys.argv[0]), flush=True)
def square(number):
    return number * number, __name__
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [3]), flush=True)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the probe as script, module, package, folder, archive, link and compiled file."""
    root = tmp_path_factory.mktemp("programs")
    for folder in ("", "folder", "package", "elsewhere"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "beside.py").write_text(f"VALUE = {folder!r}\n")
    (root / "probe.py").write_text(PROBE)
    (root / "folder" / "__main__.py").write_text(PROBE)
    (root / "package" / "__init__.py").touch()
    (root / "package" / "__main__.py").write_text(PROBE)
    (root / "package" / "module.py").write_text(PROBE)
    with zipfile.ZipFile(root / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", PROBE)
        archive.writestr("beside.py", "VALUE = 'archive'\n")
    (root / "elsewhere" / "link.py").symlink_to(root / "probe.py")
    (root / "pools.py").write_text(POOLS)
    (root / "syntax.py").write_text("def broken(:\n    pass\n")
    (root / "coding.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    (root / "badbytes.py").write_bytes(b"print('\xff')\n")
    (root / "null.py").write_bytes(b"print(1)\0\n")
    (root / "bom.py").write_bytes(b"\xef\xbb\xbfprint('bom')\r\nprint('crlf')\r\n")
    (root / "empty").mkdir()
    subprocess.run([sys.executable, "-m", "compileall", "-b", "-q", "probe.py"], cwd=root, check=True)
    return root


def run(arguments: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        input="text on stdin",
        capture_output=True,
        text=True,
        timeout=limit_s(60),
    )
    return done.returncode, _without_addresses(done.stdout), _without_addresses(done.stderr)


def _without_addresses(text: str) -> str:
    # How deep a recursion gets is the one thing that shows: we take three frames of a thousand.
    return re.sub(r"0x[0-9a-f]+|\b(pid|process|repeated) \d+", "#", text)


def both(
    mode: str, target: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run plainly and under the bootstrap; both must be the same."""
    flags = ["-u", "-m"] if mode == "module" else ["-u"]
    plain = run([*flags, target, *arguments], cwd, env or {})
    ours = run(["-u", BOOTSTRAP, mode, target, *arguments], cwd, env or {})
    assert ours == plain
    return plain


@pytest.mark.parametrize("case", CASES)
def test_each_end_of_a_script(programs: Path, case: str) -> None:
    code, out, _ = both("script", "probe.py", case, cwd=programs)
    assert "main is main = True" in out
    assert (code == 0) == (case in ["none", "exit", "exit0", "no-hook", "fork", "thread", "pickle", "source", "stdin"])


@pytest.mark.parametrize("case", ["raise", "exit3"])
@pytest.mark.parametrize(
    ("mode", "target"),
    [
        ("module", "probe"),
        ("module", "package"),
        ("module", "package.module"),
        ("script", "folder"),
        ("script", "archive.pyz"),
        ("script", "elsewhere/link.py"),
        ("script", "./folder/../probe.py"),
        ("script", "probe.pyc"),
    ],
)
def test_each_kind_of_program(programs: Path, mode: str, target: str, case: str) -> None:
    _, out, _ = both(mode, target, case, "two words", "", cwd=programs)
    assert "'two words', ''" in out


@pytest.mark.parametrize("target", ["syntax.py", "coding.py", "bom.py", "missing.py", "empty"])
def test_odd_scripts(programs: Path, target: str) -> None:
    both("script", target, cwd=programs)


@pytest.mark.parametrize("target", ["badbytes.py", "null.py"])
def test_scripts_that_are_no_text(programs: Path, target: str) -> None:
    """Here the interpreter's words for a file differ from those for its content."""
    code, _, err = run(["-u", BOOTSTRAP, "script", target], programs, {})
    assert code == 1
    assert err.startswith(f'  File "{programs / target}", line 1')
    assert "\nSyntaxError: " in err
    assert "bootstrap" not in err


def test_unreadable_modules(programs: Path) -> None:
    for target in ("missing", "package.missing", "syntax", "empty", "..relative"):
        code, _, _ = both("module", target, cwd=programs)
        assert code == 1


@pytest.mark.parametrize("env", [{"PYTHONSAFEPATH": "1"}, {"PYTHONWARNINGS": "error"}, {"PYTHONPATH": "folder"}])
def test_interpreter_settings(programs: Path, env: dict[str, str]) -> None:
    for mode, target in (("script", "probe.py"), ("script", "folder"), ("module", "probe")):
        both(mode, target, cwd=programs, env=env)


def test_absolute_path_from_another_folder(programs: Path, tmp_path: Path) -> None:
    both("script", str(programs / "probe.py"), "raise", cwd=tmp_path)


@pytest.mark.parametrize(("mode", "target"), [("script", "pools.py"), ("module", "pools")])
def test_multiprocessing_sees_the_program_and_not_the_bootstrap(programs: Path, mode: str, target: str) -> None:
    code, out, err = both(mode, target, cwd=programs)
    assert code == 0, err
    assert "spawn [(9, '__mp_main__')]" in out
    assert "forkserver [(9, '__mp_main__')]" in out


def test_run_path_runs_a_script(programs: Path) -> None:
    code, out, _ = run([BOOTSTRAP, "run_path", "probe.py", "exit"], programs, {})
    assert code == 0  # and does not hang
    assert "argv = ['probe.py', 'exit']" in out


def test_a_script_finds_no_module_of_ours_and_hardly_any_other_loaded(programs: Path) -> None:
    (programs / "loaded.py").write_text("import sys; print('\\n'.join(sorted(sys.modules)))")
    _, plain, _ = run(["-u", "loaded.py"], programs, {})
    _, ours, _ = run(["-u", BOOTSTRAP, "script", "loaded.py"], programs, {})
    assert set(ours.split()) - set(plain.split()) <= {"faulthandler", "__future__"}


def test_it_works_without_holdfast_installed(programs: Path) -> None:
    code, out, _ = run(["-I", "-S", "-u", BOOTSTRAP, "script", "coding.py"], programs, {})
    assert (code, out) == (0, "'\\xe9'\n")


# --- the error file ---------------------------------------------------------------------------------------------------


def recorded(
    programs: Path, tmp_path: Path, *arguments: str, mode: str = "script"
) -> dict[str, dict[str, object]] | None:
    path = tmp_path / "error.json"
    run(["-u", BOOTSTRAP, mode, *arguments], programs, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert [entry for entry in tmp_path.iterdir() if entry != path] == []
    return json.loads(path.read_text()) if path.exists() else None


def test_an_uncaught_exception_is_recorded(programs: Path, tmp_path: Path) -> None:
    before = int(time.time())
    data = recorded(programs, tmp_path, "probe.py", "chain")
    assert data is not None
    assert list(data) == ["message"]
    assert list(data["message"]) == ["message", "extraInfo"]
    assert data["message"]["message"] == "KeyError: 'second'"
    extra = data["message"]["extraInfo"]
    assert isinstance(extra, dict)
    assert list(extra) == ["py_callstack", "timestamp"]
    assert before <= int(extra["timestamp"]) <= time.time()
    assert extra["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert "The above exception was the direct cause" in extra["py_callstack"]
    assert extra["py_callstack"].endswith("\nKeyError: 'second'\n")
    assert "bootstrap" not in extra["py_callstack"]


@pytest.mark.parametrize(
    ("case", "message"),
    [("generator", "GeneratorExit: "), ("strange", "Strange: <exception str() failed>")],
)
def test_every_uncaught_exception_is_recorded(programs: Path, tmp_path: Path, case: str, message: str) -> None:
    """Some do not inherit from Exception, as torch's CheckpointException; some have no text."""
    data = recorded(programs, tmp_path, "probe.py", case)
    assert data is not None
    assert data["message"]["message"] == message


ENDS = """
import sys
class Stop(BaseException): pass
case = sys.argv[1]
if case == "base":
    raise Stop("loss spike")
try:
    {}["vocab"]
except KeyError:
    if case == "handled":
        sys.exit(3)
    if case == "text":
        sys.exit("no vocabulary")
    if case == "zero":
        sys.exit(0)
if case == "later":
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("case", "message"),
    [("base", "Stop: loss spike"), ("handled", "KeyError: 'vocab'"), ("text", ""), ("zero", ""), ("later", "")],
)
def test_an_exception_that_was_handled_by_an_exit_code_is_recorded(tmp_path: Path, case: str, message: str) -> None:
    programs, folder = tmp_path / "programs", tmp_path / "errors"
    programs.mkdir()
    folder.mkdir()
    (programs / "ends.py").write_text(ENDS)
    data = recorded(programs, folder, "ends.py", case)
    assert (data["message"]["message"] if data is not None else "") == message


COLLECTIVE = """
class Tensor:
    def __init__(self, *shape): self.shape, self.dtype = shape, "torch.float32"
def all_gather(tensor_list, tensor, group=None):
    try: raise RuntimeError("Connection closed by peer")
    except RuntimeError as error: raise ValueError("in the wrapper") from error
"""
CALLS = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "lib"))
from torch.distributed.distributed_c10d import Tensor, all_gather
def step():
    batch, rate = Tensor(8, 4), 0.1
    all_gather([Tensor(4), Tensor(4)], Tensor(5))
weights = Tensor(2)
step()
"""


def test_the_collective_in_which_an_exception_was_raised_is_recorded_with_its_shapes(tmp_path: Path) -> None:
    """Also of a script in a folder that is called torch."""
    programs, folder = tmp_path / "torch", tmp_path / "errors"
    package = programs / "lib" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    folder.mkdir()
    (package / "distributed_c10d.py").write_text(COLLECTIVE)
    (programs / "calls.py").write_text(CALLS)
    data = recorded(programs, folder, "calls.py")
    assert data is not None
    extra = data["message"]["extraInfo"]
    assert isinstance(extra, dict)
    assert extra["collective"] == "all_gather([float32[4], float32[4]], float32[5])"
    assert extra["tensors"] == {"weights": "float32[2]", "batch": "float32[8, 4]"}


@pytest.mark.parametrize("target", ["syntax.py", "badbytes.py"])
def test_a_script_that_cannot_be_compiled_is_recorded(programs: Path, tmp_path: Path, target: str) -> None:
    data = recorded(programs, tmp_path, target)
    assert str(data["message"]["message"]).startswith("SyntaxError: ")


def test_modules_are_recorded(programs: Path, tmp_path: Path) -> None:
    data = recorded(programs, tmp_path, "package.module", "raise", mode="module")
    assert data["message"]["message"] == "ValueError: bad"


@pytest.mark.parametrize("case", ["none", "exit", "exit0", "exit3", "exit-text", "interrupt", "fork", "thread"])
def test_other_ends_are_not_recorded(programs: Path, tmp_path: Path, case: str) -> None:
    assert recorded(programs, tmp_path, "probe.py", case) is None


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("raise", ""),
        ("raise", "/no/such/folder/e.json"),
        ("raise", "/proc/e.json"),
        ("deep", ""),
    ],
)
def test_the_error_is_shown_whatever_becomes_of_the_file(programs: Path, case: str, path: str) -> None:
    code, _, err = both("script", "probe.py", case, cwd=programs, env={"TORCHELASTIC_ERROR_FILE": path})
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert not (programs / "e.json").exists()


def test_a_full_disk(programs: Path, tmp_path: Path) -> None:
    device, file = tmp_path / "device", tmp_path / "folder" / "error.json"
    device.symlink_to("/dev/full")
    file.parent.mkdir()
    untraced = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }  # it writes files
    for path in (device, file):
        done = subprocess.run(
            [sys.executable, "-u", BOOTSTRAP, "script", "probe.py", "raise"],
            cwd=programs,
            env={**untraced, "TORCHELASTIC_ERROR_FILE": str(path)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            capture_output=True,
            text=True,
            timeout=limit_s(60),
        )
        assert done.returncode == 1
        assert done.stderr.endswith("\nValueError: bad\n")
    assert device.is_symlink()
    assert list(file.parent.iterdir()) == []


def test_a_disk_that_does_not_respond(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    os.mkfifo(path)  # nobody reads: it cannot be opened
    code, _, err = run(
        ["-u", BOOTSTRAP, "script", "probe.py", "raise"], programs, {"TORCHELASTIC_ERROR_FILE": str(path)}
    )
    assert code == 1
    assert err.endswith("\nValueError: bad\n")


def test_what_was_written_already_stays(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("kept")
    run(["-u", BOOTSTRAP, "script", "probe.py", "raise"], programs, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert path.read_text() == "kept"


def test_a_relative_error_file_is_found_after_the_script_changed_its_folder(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text("import os; os.chdir('/'); 1 / 0")
    run(["-u", BOOTSTRAP, "script", "moves.py"], tmp_path, {"TORCHELASTIC_ERROR_FILE": "error.json"})
    assert "ZeroDivisionError" in (tmp_path / "error.json").read_text()


def test_faulthandler_is_on(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text("import os; os.abort()")
    code, _, err = run(["-u", BOOTSTRAP, "script", "faults.py"], tmp_path, {})
    assert code == -6
    assert "Fatal Python error: Aborted" in err


WITHOUT_FILES = """
from holdfast.protocol import board_layout
from holdfast.worker import bootstrap
print(bootstrap._take_profiles("/proc/0/fd/3@24", board_layout, "/removed")(1, True))
print(bootstrap._answer_about_collectives("/proc/0/fd/3@24", board_layout, "/removed")(object(), memoryview(b""), 24))
"""


def test_a_holdfast_that_is_replaced_on_the_disk_while_a_job_runs_ends_no_training() -> None:
    """Its observers are loaded late: at the first group, and at the first order for a profile."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=limit_s(30), check=True
    )
    assert done.stdout == "False\nNone\n"
