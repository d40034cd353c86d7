"""events.jsonl of real jobs: every record is what the table of events says. A new event or field has to be named there."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.insight.events import problems

FAILS_ONCE = """
note("up")
if RANK == 1 and ROUND == 0:
    raise ValueError("first\\nsecond")
"""


def wrong(site) -> list[str]:
    """In the journals of all agents."""
    journals = [agent.folder / "events.jsonl" for agent in site.agents]
    records = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    assert records
    return [problem for record in records for problem in problems(record)]


def names(agent) -> list[str]:
    return [each["event"] for each in agent.events()]


def test_a_job_that_restarts(site) -> None:
    code, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", site.script(FAILS_ONCE))
    assert code == 0, agent.text
    assert wrong(site) == []
    (failed,) = (each for each in agent.events("worker_failed") if not each["after_stop"])
    assert (failed["rank"], failed["generation"], failed["error_type"]) == (1, 1, "ValueError")
    assert failed["message"] == "ValueError: first"
    first, second = agent.events("generation")
    assert (first["generation"], second["generation"], second["restart_count"]) == (1, 2, 1)
    assert {each["generation"] for each in agent.events("worker_started")} == {1, 2}
    assert names(agent)[0] == "begins"
    assert names(agent)[-1] == "ended"


def test_two_nodes_of_which_one_leaves(site, endpoint: str) -> None:
    stays = "note('up')\nwhile not notes('go'): time.sleep(0.01)\n"
    line = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--max-restarts", "3")
    for _ in range(2):
        site.start(*line, site.script(stays))
    site.wait(2, "up")
    other = next(agent for agent in site.agents if not agent.events("coordinator.joined"))
    other.signal(15)
    other.end()
    here = next(agent for agent in site.agents if agent is not other)
    port = site.wait(1, "up", world=1)[-1]["port"]
    with Path(site.folder / "trail.jsonl").open("ab", buffering=0) as trail:
        trail.write(repr({"event": "go", "rank": 0, "port": port, "pid": here.pid}).encode() + b"\n")
    assert here.end() == 0, here.text
    assert wrong(site) == []
    assert here.events("coordinator.leaving")
    assert any(each["stopped"] for each in other.events("worker_ended"))


def test_a_program_that_cannot_be_started(site) -> None:
    program = site.folder / "program"
    program.write_text("no magic number")
    program.chmod(0o755)
    site.run("--standalone", "--no-python", program)
    assert wrong(site) == []
