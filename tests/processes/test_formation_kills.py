"""One of three agents is killed at some moment of the formation; the others form and finish, whatever the moment."""

from __future__ import annotations

import signal
import time

import pytest

ROUNDS = {
    "early": (0, 80, 150),
    "joining": (190, 230, 270),
    "forming": (310, 350, 390),
    "running": (440, 520, 650),
}


@pytest.mark.parametrize("moment", ROUNDS)
def test_a_kill_at_any_moment(site, free_port, moment: str) -> None:
    """The killed one may host the coordinator: then another takes the endpoint. Nobody waits for a time-out."""
    script = site.script("meet()\nchild()\ntime.sleep(0.2)\nnote('end', key=os.environ['KEY'])")
    for round_number, pause_ms in enumerate(ROUNDS[moment]):
        key = f"{moment}{pause_ms}"
        args = (
            *("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
            *("--rdzv-conf", "settle=0.3,lease=1.5", "--max-restarts", "1", "--shutdown-timeout", "3", script),
        )
        agents = [site.start(*args, env={"KEY": key}) for _ in range(3)]
        time.sleep(pause_ms / 1000)
        victim = agents.pop(round_number % 3)
        victim.signal(signal.SIGKILL)
        codes = [agent.end(30) for agent in agents]
        story = key + "".join(f"\n--- {agent.text}" for agent in agents)
        assert codes == [0, 0], story
        ends = site.trail("end", key=key)
        last = ends[-1]["port"]
        finished = {each["rank"] for each in ends if each["port"] == last}
        assert finished == set(range(ends[-1]["world"])), story
    site.all_gone()


def test_a_clean_end_at_any_moment(site, free_port) -> None:
    """The same with SIGTERM: whoever leaves says so, and ends with 143."""
    script = site.script("meet()\ntime.sleep(0.2)")
    for round_number, pause_ms in enumerate((200, 280, 360, 440)):
        args = (
            *("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
            *("--rdzv-conf", "settle=0.3,lease=1.5", script),
        )
        agents = [site.start(*args) for _ in range(3)]
        time.sleep(pause_ms / 1000)
        leaver = agents.pop(round_number % 3)
        leaver.signal(signal.SIGTERM)
        assert leaver.end(10) in (0, 143), leaver.text
        assert [agent.end(30) for agent in agents] == [0, 0], "".join(agent.text for agent in agents)
    site.all_gone()
