"""What an agent knows of its own node, for commands that come while the coordinator cannot be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.core.agent.events import Event, Received
from holdfast.core.agent.machine import AgentMachine
from holdfast.core.policy import JobSpec, NodeSpec
from holdfast.core.progress import JobView, NodeView, RankProgress, RankSample, RankView
from holdfast.core.protocol import Quit
from holdfast.runtime.answers import stacks_body, stacks_view


class OwnNode:
    """One per agent. `feed` hands an event to its machine; `progress` and `look` ask its workers."""

    def __init__(
        self,
        machine: AgentMachine,
        job: JobSpec,
        node: NodeSpec,
        feed: Callable[[Event], None],
        progress: Callable[[], tuple[RankProgress, ...]],
        look: Callable[[], Awaitable[tuple[RankSample, ...]]],
    ) -> None:
        self._machine = machine
        self._job = job
        self._node = node
        self._feed = feed
        self._progress = progress
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    def view(self) -> JobView:
        machine, term = self._machine, self._machine.term
        place = term.assign if term is not None else None
        ranks = self._ranks(place.rank_base) if place is not None else ()
        own = NodeView(
            member=machine.identity,
            host=self._node.host,
            group_rank=place.group_rank if place is not None else None,
            state=machine.work.value,
            heard_s=0.0,
            ranks=ranks,
        )
        return JobView(
            run_id=self._job.run_id,
            phase=machine.work.value,
            generation=term.generation if term is not None else 0,
            restarts=place.restart_count if place is not None else 0,
            restarts_max=self._job.max_restarts,
            world_size=place.world_size if place is not None else 0,
            since_s=0.0,
            job_s=self._loop.time() - self._began_s,
            training_s=0.0,
            nodes=(own,),
            notices=("the coordinator does not answer: this is what this node knows of itself",),
        )

    async def stacks(self) -> bytes:
        term = self._machine.term
        place = term.assign if term is not None else None
        base = place.rank_base if place is not None else 0
        samples = await self._look() if place is not None else ()
        seen = [(self._node.host, base + sample.local_rank, sample) for sample in samples]
        generation = term.generation if term is not None else 0
        return stacks_body(stacks_view(self._job.run_id, generation, place.world_size if place else 0, seen))

    def quit(self, order: Quit) -> None:
        self._loop.call_soon(self._feed, Received(order))  # a fault of the machine's shall not look like the asker's

    def _ranks(self, base: int) -> tuple[RankView, ...]:
        return tuple(
            RankView(
                rank=base + each.local_rank,
                local_rank=each.local_rank,
                stage=each.stage,
                steps=each.steps,
                step_s=0.0,
                own_s=0.0,
                age_s=each.age_s,
            )
            for each in self._progress()
        )
