"""The shell of a coordinator whose authority is a lease in etcd: it speaks only while the lease is fresh, and of a new
generation only when etcd remembers its number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from holdfast.core.coordinator.elected import ElectedCoordinator
from holdfast.core.coordinator.state import Command, DropLink, Tell
from holdfast.core.policy import Limits
from holdfast.core.protocol import Assign, Finish
from holdfast.rendezvous.etcd import Memory
from holdfast.runtime.coordinator_service import CoordinatorService
from holdfast.runtime.etcd_office import Office
from holdfast.runtime.journal import Journal


class ElectedService(CoordinatorService):
    """`on_over(reason)` is called once when the office is lost."""

    def __init__(
        self,
        machine: ElectedCoordinator,
        office: Office,
        journal: Journal,
        say: Callable[[str], None],
        on_over: Callable[[str], None],
    ) -> None:
        self._office = office
        self._elected = machine
        self._on_over: Callable[[str], None] | None = on_over
        self._outbox: deque[Tell | DropLink] = deque()
        self._remembered = 0
        self._remembering = False
        super().__init__(machine, journal, say)
        self._timer = asyncio.get_running_loop().call_later(office.left_s(), self.look)

    def look(self) -> None:
        """The lease was renewed, lost, or is due to be looked at."""
        if self._on_over is None:
            return
        self._timer.cancel()
        reason = self._office.over
        if reason:
            on_over, self._on_over = self._on_over, None
            self._outbox.clear()
            on_over(reason)
            return
        self._timer = asyncio.get_running_loop().call_later(self._office.left_s(), self.look)
        self._flush()

    def last_words(self) -> Memory | None:
        """What a successor must heed when we go of our own accord; None: nothing was ever started."""
        machine = self._elected
        generation = max(machine.generation, self._remembered)
        if not generation:
            return self._office.predecessor
        tail_s = fence_s(machine.limits) if machine.workers_may_live else 0.0
        return Memory(run_id=machine.job.run_id, generation=generation, tail_s=tail_s)

    async def close(self) -> None:
        self._on_over = None
        self._timer.cancel()
        await super().close()

    def _execute(self, command: Command) -> None:
        match command:
            case Tell(_, Finish()):
                super()._execute(
                    command
                )  # decided while the lease held; it starts nothing, and who waits for it may go
            case Tell() | DropLink():
                self._outbox.append(command)
                self._flush()
            case _:
                super()._execute(command)

    def _flush(self) -> None:
        while self._outbox and self._office.fresh() and not self._remembering:
            command = self._outbox[0]
            if isinstance(command, Tell) and isinstance(command.message, Assign):
                generation = command.message.generation
                if generation > self._remembered:
                    self._remember(generation)
                    return
            self._outbox.popleft()
            super()._execute(command)

    def _remember(self, generation: int) -> None:
        self._remembering = True
        limits = self._elected.limits
        tail_s = self._office.tail_s(fence_s(limits))

        def done(written: bool) -> None:
            self._remembering = False
            if written:
                self._remembered = generation
                self._flush()
            # else: the next renewal tries again, or says that we lost the office

        self._office.remember(Memory(run_id=self.machine.job.run_id, generation=generation, tail_s=tail_s), done)


def fence_s(limits: Limits) -> float:
    """From the last answer of a coordinator until no worker of its agents is alive."""
    return limits.fence_s + limits.kill_s
