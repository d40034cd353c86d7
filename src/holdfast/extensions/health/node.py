"""Checks this node: by --preflight before its first generation, by --health-command before each, and by both again
while the node is parked.

A node is fit if the command ends with 0 within its time, and no finding of the preflight says that it cannot train.
What becomes of the job is the coordinator's, which also compares what the nodes have. The quick preflight is done by a
child before this agent has its modules (ahead.py), the full one while the nodes meet. While workers run, devices and
network cards are watched (device_watch.py, card_watch.py); a severe event has the node checked again before the next
generation, which also waits for GPU memory (freed_memory.py). An event that has cut this node off is reported when it
is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from holdfast.extensions.health.found import Preflight
from holdfast.extensions.health.messages import (
    REASON_CHARACTERS_MAX,
    Checked,
    DeviceNoted,
    DeviceSeen,
    Differs,
    MeasurePairs,
    PairsOver,
    Recovered,
    Unfit,
)
from holdfast.protocol.messages import Assign
from holdfast.protocol.outcome import Outcome
from holdfast.runtime.node_extension import Node, NodeExtension, NodeHappened, Send, WorkersStarted
from holdfast.supervisor.attached import attached
from holdfast.text import listed, visible

if TYPE_CHECKING:
    from holdfast.doctor.device_events import DeviceEvent
    from holdfast.extensions.health.card_watch import CardWatch
    from holdfast.extensions.health.device_watch import DeviceWatch

Result = TypeVar("Result")

NODES_MIN = 4
"""Nodes from which the networks of all are compared: of fewer, nothing says what is usual."""
UNFIT_S_MAX = 27.0
"""Limit for all checks together (s), with the rounds in which nodes measure each other."""
HEALTH_S_MAX = 20.0
"""Limit for the command (s). It is shorter than Limits.prepare_s, after which the coordinator loses the node."""
END_S_MAX = 2.0
"""Time from SIGTERM to SIGKILL for a command that takes too long (s)."""
AGAIN_FIRST_S = 30.0
"""Time until a parked node runs the command again (s); it doubles."""
AGAIN_MAX_S = 600.0
OUTPUT_BYTES_MAX = 65536
PENDING_MAX = 32
"""Severe events of devices that the coordinator has not confirmed."""
PROMPT_S = 1.0
"""An event that is confirmed later than this is sent again: its age was that of the first time (s)."""
SENT_MAX = 3
"""Number of times that an event is sent because of that."""


class _Pending(NamedTuple):
    """An event of a device that the coordinator has perhaps not got."""

    device: str
    text: str
    severe: bool
    at_s: float
    """The time at which it was seen (monotonic s)."""
    sent_s: float = 0.0
    """The time at which it was sent, the last time."""
    sent: int = 0


class OnNode(NodeExtension):
    messages = Differs | DeviceNoted | MeasurePairs | PairsOver

    def __init__(
        self, node: Node, send: Send, limit_s: float = HEALTH_S_MAX, again_first_s: float = AGAIN_FIRST_S
    ) -> None:
        super().__init__(node, send)
        self._limit_s = limit_s
        self._again_first_s = again_first_s
        self._checking: set[asyncio.Task[Any]] = set()
        """Checks that have not ended. They are cancelled with the job."""
        self._preflight_due = node.options.preflight != "off"
        """It has not passed here yet, or a device has failed since it has."""
        self._severe = 0
        """Number of severe events of devices so far."""
        self._begun: asyncio.Task[Preflight] | None = None
        """The preflight that began with the agent; None: its result was taken, or there is none."""
        self._traits: dict[str, str] | None = None
        """What the last preflight found for the comparison with the other nodes; None: there was none."""
        self._watch: DeviceWatch | None = None
        """None: no workers have run here, or there is nothing to watch."""
        self._cards: CardWatch | None = None
        """The same of network cards."""
        self._devices = 0
        """Number of events of devices."""
        self._pending: dict[int, _Pending] = {}
        """Severe events that the coordinator has not confirmed, by number."""
        self._used: dict[int, int] | None = None
        """Bytes in use on each GPU before any workers ran; None: not known."""
        self._pairs = node.options.preflight == "full" and node.options.job.max_nodes >= NODES_MIN
        """This node measures others before a generation with new nodes."""
        self._pair_orders: dict[int, asyncio.Queue[MeasurePairs | PairsOver]] = {}
        """Orders that were not taken yet, by the generation that waits for them."""
        self._parked = False
        self._rounds = 0
        """Number of checks and comparisons that were ordered. A loop that began with a smaller number ends."""
        if self._preflight_due:
            self._begun = self._task(self._first_look())

    def _task(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Do this in a task of its own, so that the end of the job does not wait for it."""
        task = asyncio.create_task(work)
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)
        return task

    def heard(self, message: Differs | DeviceNoted | MeasurePairs | PairsOver) -> None:
        match message:
            case Differs():
                self._rounds += 1
                self.node.start("health", self._compare_again(self._rounds))
            case DeviceNoted(number):
                self._noted(number)
            case MeasurePairs(generation) | PairsOver(generation):
                if generation in self._pair_orders:
                    self._pair_orders[generation].put_nowait(message)

    async def unfit(self, assign: Assign) -> str:
        self._rounds += 1
        until_s = time.monotonic() + UNFIT_S_MAX
        for number in self._pending:  # the link is there, perhaps again
            self._tell(number)
        # Both at once: together they have to end before Limits.prepare_s.
        checking = self._task(self._check(assign.generation))
        # Workers have run here: what they held may not be free yet
        # (test_a_restart_waits_for_the_memory_of_the_workers_before).
        if self._watch is not None and self._used:
            await self._task(self._wait_for_memory(assign.generation, self._used))
        reason = await checking
        if not reason and self._traits is not None:
            self.send(Checked(assign.generation, assign.group_world_size, self._traits))
        if reason:
            self._parked = True
            self.send(Unfit(assign.generation, reason))
            self.node.start("health", self._check_again(assign.generation, self._rounds))
            return reason
        if self._parked:
            self._fit()
        if self._pairs and assign.group_world_size >= NODES_MIN:
            await self._task(self._measure_pairs(assign, until_s))
        return ""

    async def _measure_pairs(self, assign: Assign, until_s: float) -> None:
        from holdfast.extensions.health.pair_measure import take_part  # most jobs do not need it

        for generation, waiting in self._pair_orders.items():
            waiting.put_nowait(PairsOver(generation))  # another one was formed instead
        orders = self._pair_orders[assign.generation] = asyncio.Queue()
        try:
            why = await take_part(assign, orders, self.send, until_s)
        finally:
            del self._pair_orders[assign.generation]
        place = self.node.place
        if why and place is not None and place.generation == assign.generation:
            self._pairs = False
            self.node.write("pairs_unmeasured", generation=assign.generation, why=why)
            self.node.say(f"--preflight full: the network between the nodes is not measured: {why}")

    def happened(self, event: NodeHappened) -> None:
        options = self.node.options
        if not isinstance(event, WorkersStarted):
            return
        # Where there is nothing to watch it is not imported.
        if options.watch_devices and self._watch is None:
            from holdfast.extensions.health.device_watch import DeviceWatch

            self._watch = DeviceWatch(*self._reports())
            self._watch.start()
        if options.watch_cards and self._cards is None:
            from holdfast.extensions.health.card_watch import CardWatch

            self._cards = CardWatch(*self._reports())
            self._cards.start()

    def _reports(self) -> tuple[Callable[[DeviceEvent, float], None], Callable[[Exception], None]]:
        """What threads call with an event and its time, and with the fault that ends them."""
        loop = asyncio.get_running_loop()

        def report(event: DeviceEvent, at_s: float) -> None:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._device, event, at_s)

        def fault(error: Exception) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.node.fault, "health", error)

        return report, fault

    def _device(self, event: DeviceEvent, at_s: float) -> None:
        self.node.write("device", device=event.device, text=event.text, severe=event.severe, xid=event.xid)
        self._devices += 1
        self._pending[self._devices] = _Pending(event.device, event.text[:REASON_CHARACTERS_MAX], event.severe, at_s)
        self._tell(self._devices)
        if not event.severe:
            del self._pending[self._devices]
        elif len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        if event.severe and self.node.options.preflight != "off":
            self._preflight_due = True
            self._severe += 1

    def _tell(self, number: int) -> None:
        event, now_s = self._pending[number], time.monotonic()
        self._pending[number] = event._replace(sent_s=now_s, sent=event.sent + 1)
        self.send(DeviceSeen(number, event.device, event.text, event.severe, max(0.0, now_s - event.at_s)))

    def _noted(self, number: int) -> None:
        event = self._pending.get(number)
        if event is None:
            return
        if time.monotonic() - event.sent_s > PROMPT_S and event.sent < SENT_MAX:
            self._tell(number)  # the carrier was lost, for example, while the first one was on its way
        else:
            del self._pending[number]

    async def _wait_for_memory(self, generation: int, used: dict[int, int]) -> None:
        from holdfast.extensions.health.freed_memory import wait_until_free

        freed = await wait_until_free(used)
        left = {f"GPU {index}": bytes_ for index, bytes_ in freed.left.items()}
        self.node.write("gpu_memory", generation=generation, seconds=freed.seconds, left_bytes=left)
        if left:
            shown = listed([f"{bytes_ >> 20} MiB on {gpu}" for gpu, bytes_ in left.items()])
            self.node.say(
                f"{freed.seconds:.0f} s after its workers have ended, {shown} of this node are still in use: "
                f"generation {generation} may run out of memory"
            )

    async def close(self, outcome: Outcome | None) -> None:  # noqa: ARG002
        for watch in (self._watch, self._cards):
            if watch is not None:
                watch.stop()
        for task in self._checking:
            task.cancel()
        if self._checking:
            await asyncio.wait(self._checking)

    async def _check_again(self, generation: int, number: int) -> None:
        pause_s = self._again_first_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)
            if not self._parked or number != self._rounds:
                return
            if not await self._check(generation) and number == self._rounds:
                self._fit()
                return

    async def _compare_again(self, number: int) -> None:
        """Report what this node has, until it is as the others."""
        pause_s = self._again_first_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)
            found = await self._look()
            # A generation was prepared here meanwhile, and has reported what this node has.
            if number != self._rounds:
                return
            self._traits = found.traits
            self.send(Checked(0, 0, found.traits))

    def _fit(self) -> None:
        self._parked = False
        self.send(Recovered())

    async def _check(self, generation: int) -> str:
        """The reason why this node is unfit; empty: it is fit."""
        checks = [self._preflight(generation)] if self._preflight_due else []
        checks += [self._command(generation)] if self.node.options.health_command else []
        reasons = await asyncio.gather(*checks)
        return "; ".join(reason for reason in reasons if reason)[:REASON_CHARACTERS_MAX]

    async def _first_look(self) -> Preflight:
        """The checks that began before this agent's own modules were there; without them, or their result, they begin
        now."""
        ahead = self.node.ahead.get("health")
        result = await ahead.result() if ahead is not None else b""
        return msgspec.msgpack.decode(result, type=Preflight) if result else await self._look()

    async def _look(self) -> Preflight:
        from holdfast.extensions.health import preflight  # the doctor's checks are not needed without it

        return await preflight.check_node(self.node.options, self.node.host)

    async def _preflight(self, generation: int) -> str:
        begun, self._begun = self._begun, None
        severe = 0 if begun is not None else self._severe  # that one began with the agent
        found = await (begun if begun is not None else self._look())
        stops = [problem.text for problem in found.problems if problem.stops]
        # A device that fails while the node is checked may have been looked at before
        # (test_a_device_that_fails_during_a_check_is_checked_again).
        self._preflight_due = bool(stops) or self._severe != severe
        self._traits = found.traits
        # Later readings contain what this job's own workers hold.
        if self._watch is None:
            self._used = found.used_bytes
        self.node.write(
            "preflight",
            generation=generation,
            seconds=round(found.seconds, 3),  # it may have begun before this generation did
            findings=[problem.text for problem in found.problems],
            fit=not stops,
        )
        return "; ".join(f"--preflight {text}" for text in stops)

    async def _command(self, generation: int) -> str:
        command = self.node.options.health_command
        began_s = time.monotonic()
        try:
            reason = await self._run(shlex.split(command))
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
        seconds = round(time.monotonic() - began_s, 3)
        reason = visible(f"--health-command {reason}")[:REASON_CHARACTERS_MAX] if reason else ""
        self.node.write("health", generation=generation, seconds=seconds, reason=reason)
        return reason

    async def _run(self, argv: list[str]) -> str:
        process = await asyncio.create_subprocess_exec(
            *attached(argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # `_end` kills its whole group at last (test_a_command_that_hangs_is_ended_with_all_that_it_has_started).
            start_new_session=True,
        )
        assert process.stdout is not None
        output = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                # To the end, since a command with a full pipe would stand still. Only its last line is shown.
                while data := await process.stdout.read(OUTPUT_BYTES_MAX):
                    output += data
                    del output[:-OUTPUT_BYTES_MAX]
                code = await process.wait()
        except TimeoutError:
            return f"has not ended within {self._limit_s:g} s"
        finally:
            await _end(process)
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if code == 0:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"{how}: {last}" if last else how


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command with all that it has started."""
    for order in (process.terminate, lambda: os.killpg(process.pid, signal.SIGKILL)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            order()
        # One that waits for a dead disk cannot be killed: nobody waits for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S_MAX):
                await process.wait()
