"""Two nodes, two ranks each, on loopback."""

from __future__ import annotations

import os
import signal
import time

from .parts import every, keep_meeting, group, rank, one


@one(3, "HF201", says="second node", torch=True, nodes=2)
def raises_on_the_second_node() -> None:
    raise ValueError("this one is on the second node")


@one(2, "HF217", says="/scratch/shard", nodes=2)
def file_missing_on_the_second_node() -> None:
    open("/scratch/shard-2/train.bin", "rb").close()


@one(2, "HF204", torch=True, nodes=2)
def killed_on_the_second_node() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@every("", "HF306", nodes=2)
def agent_of_the_second_node_is_killed() -> None:
    if rank() == 2:
        time.sleep(1)
        _kill_agent()
    time.sleep(30)


def _kill_agent() -> None:
    """Its supervisor, our parent, and the supervisor's parent: as when the machine goes."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        agent = int(file.read().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)


@every("3", "HF209", nodes=2)
def sleeps_on_the_second_node() -> None:
    from .parts import meet

    group(4)
    meet()
    if rank() == 3:
        time.sleep(25)
    meet()


@every("1", "HF229", nodes=2)
def leaves_on_the_first_node() -> None:
    group()
    if rank() == 1:
        raise SystemExit(0)
    keep_meeting()
