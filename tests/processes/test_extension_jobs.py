"""The example extension (tests/extensions/example) in a real job: its question, both halves, and its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import JobFolder
from tests.processes.test_control_jobs import entries
from tests.support.limits import limit_s, until

pytestmark = pytest.mark.usefixtures("registry")
ROOT = Path(__file__).parents[2]
AGENT = f"""
import sys
sys.path.append({str(ROOT)!r})
from holdfast.cli import grammar, run
from holdfast.cli.option_table import TABLES
from holdfast.extension_list import EXTENSIONS
from tests.extensions.example import EXAMPLE

parsed = grammar.parse(sys.argv[1:], {{}}, TABLES["run"])
sys.exit(run.start(parsed, extensions=(*EXTENSIONS, EXAMPLE)))
"""
COMMAND = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.extensions.example import EXAMPLE

sys.exit(EXAMPLE.file("command").main_where(sys.argv[1:]))
"""


def where() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=limit_s(30))


def test_a_new_question_is_answered_by_a_job_whose_agents_have_it(job_folder: JobFolder) -> None:
    agent = job_folder.start("--standalone", job_folder.script("meet(); hold()"), program=job_folder.program(AGENT))
    job_folder.wait(1, "up")
    until(lambda: entries(job_folder), "an entry in the list")
    done = where()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f": {os.path.realpath(job_folder.folder)}\n")
    assert len(agent.events("where_asked")) == 1
    agent.signal(signal.SIGTERM)
    agent.end()


def test_a_job_without_the_extension_refuses_its_question(job_folder: JobFolder) -> None:
    agent = job_folder.start("--standalone", job_folder.script("meet(); hold()"))
    job_folder.wait(1, "up")
    until(lambda: entries(job_folder), "an entry in the list")
    done = where()
    assert done.returncode != 0
    assert "there is no question 'where'" in done.stderr
    agent.signal(signal.SIGTERM)
    agent.end()
