"""Nothing that a job starts finds the job's secret in its environment, nor in that of its launcher."""

from __future__ import annotations

import sys

import pytest

SECRET = "a-secret-of-32-characters-0123456"

LOOKS = """
def environment(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()

def parents(pid):
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat", "rb") as file:
            pid = int(file.read().rpartition(b")")[2].split()[1])
        if f"AGENT={os.environ['AGENT']}".encode() not in environment(pid):
            return

child = subprocess.run(["env"], capture_output=True, text=True).stdout
secret = os.environ["WANTED"].encode()[::-1]
note("found", own=[name for name, value in os.environ.items() if secret in value.encode()],
     child=secret.decode() in child, above=[secret in environment(pid) for pid in parents(os.getpid())])
"""


@pytest.mark.parametrize(
    "given",
    [
        {"HOLDFAST_TOKEN": SECRET},
        {"PET_RDZV_CONF": f"password={SECRET}"},
    ],
    ids=["token", "password"],
)
def test_no_worker_has_the_secret(site, given: dict[str, str]) -> None:
    env = {**given, "WANTED": SECRET[::-1]}
    # Executed, as users do: a forked agent has the memory of its parent.
    agent = site.start("--standalone", site.script(LOOKS), env=env, program=(sys.executable, "-m", "holdfast", "run"))
    assert agent.end() == 0, agent.text
    (found,) = site.trail("found")
    assert found["own"] == []
    assert not found["child"]
    assert len(found["above"]) >= 3, "worker, keeper, agent"
    assert not any(found["above"]), found
