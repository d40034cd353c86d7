"""The guard in conftest.py catches what it is there to catch: each of these little tests leaks one thing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.limits import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"

LEAKS = '''
import os, subprocess, sys, threading, time

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
"""

def test_clean():
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    os.close(os.open(os.devnull, os.O_RDONLY))

def test_child():
    subprocess.Popen(["sleep", "600"])

def test_daemon():
    subprocess.run([sys.executable, "-S", "-c", DAEMON], check=True)

def test_thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="left").start()

def test_descriptor():
    os.open(__file__, os.O_RDONLY)
'''


def test_each_leak_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT), VARIABLE: "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    errors = sorted(re.findall(r"^ERROR test_leaks.py::(\w+)", done.stdout, re.MULTILINE))
    assert errors == ["test_child", "test_daemon", "test_descriptor", "test_thread"], done.stdout
    assert re.search(r"process \d+: sleep 600", done.stdout), done.stdout
    assert "thread left" in done.stdout
    assert re.search(r"descriptor \d+ -> .*test_leaks.py", done.stdout), done.stdout
