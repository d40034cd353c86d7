"""The saver: a process that writes memory slots to disk, so that the death of a worker never aborts a save.

    python -I -S -c … FOLDER LISTENING CONTROL ANCHOR         as train_contract.saver_argv builds it

FOLDER is the shared-memory folder. LISTENING is a socket on which workers connect. CONTROL is a socket to the agent, or
-1: then this process detaches itself, and the job ends with the process ANCHOR (torchrun, or the only worker).

Its promises:
- A save whose packet was sent is carried out, even when the sender dies: the packet waits in the socket, together with
  the descriptor, whose lock protects the slot against staging.
- When a worker of this node has died without "bye" and no other worker of its generation is left, the saver also writes
  the newest step that all ranks of the job have in memory, for each snapshot folder, if it is newer than the disk
  (flush.py).
- Where retention needs it, a save is then read back; only rank 0's process waits for that (read_back.py).
- On "finish" from the agent it completes the saves in flight and ends. The agent waits train_contract.FINISH_LIMIT_S.
- If the workers ask for it, it sends their slots to another node's saver, and receives others' (copy_service.py).
- If the agent orders it, it fetches slots from other nodes before the workers ask for them (copy_service.py).
- When the agent is gone without "finish", it ends at once, and a save in flight stays an uncommitted attempt.
- Without an agent it ends, and removes the shared-memory folder, when the anchor is gone, no worker is left and no save
  is in flight.

One thread handles sockets and processes; each save has its own thread, which can block on the disk. Signals that end
whole sessions are ignored, because the saver's work is finite.

A rescue is the save that the saver makes by itself after a crash. Imports the standard library and our snapshots only;
for an object store also the worker's packages (remote.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import memory_folder, seqpacket
from holdfast.protocol.train_contract import FINISH_LIMIT_S
from holdfast.train.snapshots import slots
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.copy_service import CopyService, Prefetch
from holdfast.train.snapshots.flush import Save, carry_out, pending_flush, read_back
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.read_back import ReadBacks
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.remote import adopt, location_of
from holdfast.train.snapshots.saver_connection import STALL, Packet, Tell, field_of

SAVES_PER_WORKER_MAX = 8
"""Limit of one worker's saves in flight. There are only three slots, so more is a fault of the caller."""
METRICS_MAX = 16
"""Limit of the metrics that the agent gets with each snapshot."""
METRIC_CHARACTERS_MAX = 64
NEWS_MAX = 16
"""Number of the newest failures that are kept for the next worker of a rank, when the worker of a save is gone."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a connection could not be accepted because this process has no descriptor left (s)."""
START_AGAIN_S = 0.5
"""Pause after a thread could not be started, because the machine allows no more of them now (s)."""
NICENESS = 5
"""Training has priority. Where the kernel schedules by sessions (autogroup), our session has the same share as the
worker's and is not lowered: a save that is too slow makes the next one wait for a slot."""


@dataclass(eq=False)
class SaverConnection:
    """A worker's connection."""

    sock: socket.socket
    pidfd: int = -1
    """A descriptor of the process; it becomes readable when the worker dies, even if a data loader that the worker
    forked keeps the socket open. -1: none."""
    local_rank: int = -1
    """The worker's local rank; -1: it has not sent "hello"."""
    generation: int = 0
    left: bool = False
    """Whether it has sent "bye"."""
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=NEWS_MAX))
    """The newest failures and warnings that were sent to the worker; if it dies, it may not have read them."""


@dataclass
class InFlight:
    """Unfinished saves of one local rank, and the calls that wait until none is being written."""

    saves: int = 0
    """The number of saves without a final answer."""
    writing: int = 0
    """The number of these whose file is not written yet; the others wait for other ranks."""
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this as soon as no save is being written."""
        self.waiting.append(call)
        self.changed()

    def changed(self) -> None:
        """Make the calls that wait, if no save is being written any more."""
        if not self.writing:
            due, self.waiting = self.waiting, []
            for call in due:
                call()


class Saver:
    """One node's saver. All its methods run in one thread; the work of saves and copies runs in others."""

    def __init__(
        self, folder: Path, listening: socket.socket, control: socket.socket | None, anchor_fd: int | None = None
    ) -> None:
        """`control`: the agent's socket; None: there is no agent. `anchor_fd`: pidfd of the anchor; None: it is gone
        already, or there is an agent."""
        self._folder = folder
        self._listening = listening
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls that the threads leave for this one."""
        self._woken, self._wake = socket.socketpair()
        """A byte in this pair wakes this thread when `_done` has a call."""
        self._to_start: deque[Callable[[], None]] = deque()
        """The work of threads that could not be started yet."""
        self._workers: set[SaverConnection] = set()
        self._gone: dict[int, int] = {}
        """Local rank -> generation, of workers that left or died since their generation ended last."""
        self._crashed = False
        """Whether one of these died without "bye"."""
        self._mappings = Mappings()
        self._copies = CopyService(folder, self._mappings)
        self._prefetch = Prefetch(folder, self._in_thread)
        self._read_backs = ReadBacks(self._is_busy)
        self._refusals = Refusals()
        self._needless: dict[str, threading.Event] = {}
        """The event that ends the wait of a folder's rescues for other nodes (`Save.needless`), by snapshot folder."""
        self._left: dict[int, threading.Event] = {}
        """The event that is set when workers have left a generation together (`Save.left`), by generation."""
        self._in_flight: dict[int, InFlight] = {}
        """Saves by local rank."""
        self._newest_asked: dict[tuple[str, int], int] = {}
        """Snapshot folder, local rank -> newest step that was handed over since the last rescue, and did not fail."""
        self._news: dict[int, list[str]] = {}
        """Failures by local rank, for the next worker of that rank."""
        self._finishing = control is None and anchor_fd is None
        """Whether the process ends as soon as its work is done."""
        self._ended = False
        """Whether the process ends now, whatever is in flight."""

        for sock in (listening, self._woken, *([control] if control is not None else [])):
            sock.setblocking(False)
        self._watch(listening, self._accept)
        self._watch(self._woken, self._make_calls)
        if control is not None:
            self._watch(control, partial(self._obey, control))
            self._tell_agent({"is": "up"})
        if anchor_fd is not None:
            self._watch(anchor_fd, partial(self._anchor_gone, anchor_fd))

    def run(self) -> None:
        """Serve until there will be no more work."""
        while not self._ended and not (self._finishing and self._idle()):
            for key, _ in self._selector.select(START_AGAIN_S if self._to_start else None):
                key.data()
            self._start_threads()
            if self._gone and not self._has_others():
                self._accept_all()  # a worker whose connection was not accepted yet counts, too
                if not self._has_others():
                    self._generation_gone()

    def _idle(self) -> bool:
        """Whether no worker has more work for the saver. With an agent, connections do not count: it ends its workers
        before it sends "finish"."""
        self._accept_all()
        return not any(each.saves for each in self._in_flight.values()) and (
            self._control is not None or not self._workers
        )

    def _watch(self, what: socket.socket | int, ready: Callable[[], object]) -> None:
        self._selector.register(what, selectors.EVENT_READ, ready)

    # --- the agent, or the anchor -------------------------------------------------------------------------------------

    def _obey(self, control: socket.socket) -> None:
        """Carry out one order of the agent."""
        got = seqpacket.receive(control)
        if got is None:  # the agent was killed: the supervisor ends this process too
            self._ended = True
            return
        if got[0].get("do") == "prefetch":
            self._prefetch.begin(got[0])
        elif got[0].get("do") == "finish":
            # The workers are dead. Their packets are read now: a save that was handed over is carried out.
            self._accept_all()
            for worker in list(self._workers):
                if worker.pidfd < 0 or seqpacket.is_readable(worker.pidfd):
                    self._worker_gone(worker)
            self._finishing = True

    def _anchor_gone(self, anchor_fd: int) -> None:
        self._selector.unregister(anchor_fd)
        self._finishing = True

    # --- workers ------------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        while self._accept():
            pass

    def _accept(self) -> bool:
        """Accept one connection; False: there is none."""
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError:  # no descriptor is left: the socket stays readable, and the loop would spin
            time.sleep(ACCEPT_AGAIN_S)
            return False
        pid, uid = seqpacket.peer(sock)
        if uid != os.geteuid():
            sock.close()
            return True
        sock.setblocking(False)
        worker = SaverConnection(sock)
        self._workers.add(worker)
        self._watch(sock, partial(self._read, worker))
        if pid:
            try:
                worker.pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._worker_gone(worker)  # it died before its connection was handled
            except OSError:
                pass  # no descriptor is left: the end of its connection must do
            else:
                self._watch(worker.pidfd, partial(self._worker_gone, worker))
        return True

    def _read(self, worker: SaverConnection) -> bool:
        """Read one packet. False: the connection has ended, or has no packet now."""
        if worker not in self._workers:
            return False  # another event of the same round has dropped the connection
        try:
            got = seqpacket.receive(worker.sock)
            if got is not None:
                self._serve(worker, *got)
                return True
        except BlockingIOError:
            return False
        except ValueError as error:
            self._news_to_agent(f"the saver got a request that it does not understand: {error}")
        self._drop(worker)
        return False

    def _serve(self, worker: SaverConnection, packet: Packet, fds: list[int]) -> None:
        """Carry out one request of a worker; saver_connection.py lists them. It closes the descriptors that the request
        does not keep. Raises ValueError."""
        try:
            match packet.get("do"):
                case "hello":
                    before = worker.generation if worker.local_rank >= 0 else None
                    if "packages" in packet:
                        adopt(
                            field_of(packet, "packages", list),
                            field_of(packet, "environ", dict),
                        )
                    worker.local_rank = field_of(packet, "local_rank", int)
                    worker.generation = field_of(packet, "generation", int)
                    if before is None:
                        self._tell_news(worker)
                    else:  # a replacement may have been started for the generation that it joins: equal numbers
                        self._regrouped(worker.generation)
                case "persist" if fds and worker.local_rank >= 0:
                    self._persist(worker, packet, fds)
                case "serve":
                    # This life has its states in memory: no rescue of the life before is needed any more.
                    self._needless.pop(field_of(packet, "folder", str), threading.Event()).set()
                    answer = self._copies.served(packet)
                    _send(worker, answer)
                    self._tell_agent({**packet, **answer})
                case "prefetched":
                    self._prefetch.when_over(worker.local_rank, partial(_send, worker))
                case "copy" if fds:
                    self._copy(worker, packet, fds)
                case "tell":
                    self._tell_agent(field_of(packet, "packet", dict))
                case "forget":
                    above_step = field_of(packet, "above_step", int)
                    self._in_thread(partial(self._copies.forget, above_step), tell=partial(_send, worker))
                case "wait":
                    idle = partial(_send, worker, {"is": "idle", "id": packet.get("id")})
                    self._flights(worker.local_rank).when_written(idle)
                case "read back":
                    path = location_of(field_of(packet, "path", str))
                    # If the saver ends first, the requester checks the snapshot itself.
                    self._in_thread(partial(read_back, path, self._read_backs), tell=partial(_send, worker))
                case "bye":
                    worker.left = True
                case other:
                    raise ValueError(f"do: {other!r}"[:200])
        finally:
            for fd in fds:
                os.close(fd)

    def _persist(self, worker: SaverConnection, packet: Packet, fds: list[int]) -> None:
        """Begin a save for a worker."""
        number = field_of(packet, "id", int)
        if self._flights(worker.local_rank).saves >= SAVES_PER_WORKER_MAX:
            raise ValueError(f"more than {SAVES_PER_WORKER_MAX} saves at once")
        sequence = field_of(packet, "sequence", int)
        patience_s = field_of(packet, "patience_s", float)
        request = SaveRequest.from_json(field_of(packet, "request", dict))
        stage = str(packet.get("stage", ""))
        left = self._left.setdefault(worker.generation, threading.Event())
        save = Save(
            fds.pop(),
            sequence,
            request,
            patience_s,
            worker.local_rank,
            self._mappings,
            self._refusals,
            stage=stage,
            left=left,
        )
        self._begin(save, lambda answer: self._answer(worker, save, {**answer, "id": number}))

    def _copy(self, worker: SaverConnection, packet: Packet, fds: list[int]) -> None:
        """Send this slot to another node, in a thread."""
        number = field_of(packet, "id", int)
        work = self._copies.sending(packet, fds)

        def report(copy: Packet) -> None:
            _send(worker, {"is": "copied", "id": number, "text": copy["why"]})
            self._tell_agent(copy)

        self._in_thread(work, tell=report)

    def _answer(self, worker: SaverConnection, save: Save, answer: Packet) -> None:
        """Send the answer to the worker that asked for the save; if it is gone, report a failure to others."""
        if worker in self._workers:
            _send(worker, answer)
            if text := _what_users_need(answer):
                worker.failures.append(_of_rank(save, text))
        else:
            self._report(save, answer)

    def _worker_gone(self, worker: SaverConnection) -> None:
        """Drop the connection of a worker that died. The packets that it sent before are read first."""
        while self._read(worker):
            pass
        if worker in self._workers:
            self._drop(worker)

    def _drop(self, worker: SaverConnection) -> None:
        self._workers.discard(worker)
        self._selector.unregister(worker.sock)
        worker.sock.close()
        if worker.pidfd >= 0:
            self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
        if worker.local_rank >= 0:
            self._gone[worker.local_rank] = worker.generation
        if worker.local_rank >= 0 and not worker.left:
            self._crashed = True
            # Only the last failure is news for the agent: the worker has read the earlier ones before it asked for
            # another save.
            if worker.failures:
                self._news_to_agent(worker.failures[-1])
            self._keep_news(worker.local_rank, *worker.failures)

    def _regrouped(self, generation: int) -> None:
        """Forget the workers that died before this generation: the survivors go on in it, so no rescue is needed. One
        that waits for other nodes would wait in vain, since survivors rescue nothing, and would report that as an
        error."""
        while self._needless:
            self._needless.popitem()[1].set()
        self._gone = {rank: theirs for rank, theirs in self._gone.items() if theirs >= generation}
        self._crashed = self._crashed and bool(self._gone)
        for each in [each for each in self._left if each < generation]:
            self._left.pop(each).set()

    # --- after a crash ------------------------------------------------------------------------------------------------

    def _has_others(self) -> bool:
        """Whether another worker of the ending generation is left. A worker that connects later does not count: it
        belongs to a restart, or to a job that has closed one snapshot folder and opens another."""
        generation = max(self._gone.values())
        return any(
            worker.local_rank < 0 or (worker.generation <= generation and worker.local_rank not in self._gone)
            for worker in self._workers
        )

    def _generation_gone(self) -> None:
        """Rescue what has to be rescued: the last worker of a generation has left or died."""
        if self._crashed:
            try:
                self._rescue()
            except (OSError, ValueError) as error:
                self._news_to_agent(f"the newest state in memory was not saved: {error}")
        self._crashed = False
        self._gone.clear()
        # The next life may resume from an older step: then its states are new, though their steps are not.
        self._newest_asked.clear()

    def _rescue(self) -> None:
        """Write the newest step of each snapshot folder that all ranks have in memory, if it is newer than the disk."""
        generation = max(self._gone.values())
        ranks = [rank for rank, theirs in self._gone.items() if theirs == generation]
        by_rank = {
            rank: [
                (slot, slot.request)
                for slot in slots.committed_slots(self._folder, rank)
                if slot.request is not None and slot.generation == generation
            ]
            for rank in ranks
        }
        for each in pending_flush(by_rank, self._newest_asked):
            slot, request = each.held[each.alone or max(each.held)]
            save = Save(
                slots.lend(slot),
                slot.sequence,
                request,
                FINISH_LIMIT_S,
                slot.local_rank,
                self._mappings,
                self._refusals,
                each,
                needless=self._needless.setdefault(request.folder, threading.Event()),
            )
            self._begin(save, partial(self._report, save))

    # --- saving -------------------------------------------------------------------------------------------------------

    def _flights(self, local_rank: int) -> InFlight:
        return self._in_flight.setdefault(local_rank, InFlight())

    def _begin(self, save: Save, tell: Tell) -> None:
        """Begin a save in its own thread. `tell` gets its answers, in this thread."""
        flights = self._flights(save.local_rank)
        # A rescue of several nodes does not count as writing: it may wait in vain for the others before it writes.
        writing = save.pending_flush is None or save.pending_flush.alone is not None
        flights.saves += 1
        flights.writing += writing
        asked = (save.request.folder, save.local_rank)
        before = self._newest_asked.get(asked, -1)
        self._newest_asked[asked] = max(before, save.request.step)
        began_s = time.monotonic()

        def handle(answer: Packet) -> None:
            nonlocal writing
            flights.writing -= writing
            writing = False
            if answer["is"] != "written":
                flights.saves -= 1
            if answer["is"] == "failed" and self._newest_asked.get(asked) == save.request.step:
                self._newest_asked[asked] = before
            if answer["is"] == "saved" and answer["path"]:
                took_s = time.monotonic() - began_s
                path = os.path.abspath(answer["path"])
                note = save.request.note
                stall = {STALL: note[STALL]} if STALL in note else {}  # training waited for no rescue
                numbers = _numbers_of(save.request.metadata)
                about = {"path": path, "step": save.request.step, "took_s": round(took_s, 3), **stall, **numbers}
                self._tell_agent({"is": "saved", **about})
            flights.changed()
            tell(answer)

        self._in_thread(partial(carry_out, save, self._read_backs), tell=handle)

    def _is_busy(self) -> bool:
        """Whether a state is being staged or written: that has priority. Any thread may call it."""
        if any(each.writing for each in list(self._in_flight.values())):
            return True
        return slots.is_any_staged(self._folder, {worker.local_rank for worker in list(self._workers)})

    def _in_thread(self, work: Callable[[Tell], None], *, tell: Tell) -> None:
        """Run the work in its own thread, since the disk may block it for ever. What it reports is passed to `tell`, in
        this thread."""

        def in_main(answer: Packet) -> None:
            self._done.put(partial(tell, answer))
            self._wake.send(b"!")

        self._to_start.append(partial(work, in_main))
        self._start_threads()

    def _start_threads(self) -> None:
        """Start the threads that are due. Where the machine allows no more threads now, their work waits: a save that
        was handed over is carried out."""
        while self._to_start:
            try:
                threading.Thread(target=self._to_start[0], daemon=True).start()
            except RuntimeError:
                return
            self._to_start.popleft()

    def _make_calls(self) -> None:
        """Make the calls that other threads have left for this one."""
        self._woken.recv(4096)
        while True:
            try:
                call = self._done.get_nowait()
            except queue.Empty:
                return
            call()

    def _report(self, save: Save, answer: Packet) -> None:
        """Report a failure or warning for which no living worker is waiting to the agent, and to the next worker."""
        if (text := _what_users_need(answer)) and not answer.get("made_good"):
            text = _of_rank(save, text)
            self._news_to_agent(text)
            self._keep_news(save.local_rank, text)

    def _keep_news(self, local_rank: int, *texts: str) -> None:
        """Keep the texts for the next worker of this rank, which may be connected already."""
        self._news[local_rank] = [*self._news.get(local_rank, ()), *texts][-NEWS_MAX:]
        for worker in self._workers:
            if worker.local_rank == local_rank:
                self._tell_news(worker)

    def _tell_news(self, worker: SaverConnection) -> None:
        for text in self._news.pop(worker.local_rank, []):
            _send(worker, {"is": "news", "text": text})

    def _news_to_agent(self, text: str) -> None:
        self._tell_agent({"is": "news", "text": text})

    def _tell_agent(self, packet: Packet) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                seqpacket.send(self._control, packet)


def _what_users_need(answer: Packet) -> str:
    """The failure or warning in an answer; empty: there is none."""
    return str(answer.get("text" if answer["is"] == "failed" else "warning", ""))


def _of_rank(save: Save, text: str) -> str:
    return f"rank {save.request.rank}, after its end: {text}"


def _numbers_of(metadata: Mapping[str, Any]) -> Packet:
    """The metrics of a save as part of a message; empty: there are none. A number that is not finite is left out: JSON
    has none of these."""
    metrics = metadata.get("metrics")
    every = list(metrics.items() if isinstance(metrics, Mapping) else ())
    known = [(name[:METRIC_CHARACTERS_MAX], value) for name, value in every if isinstance(value, (int, float))]
    finite = [(name, float(value)) for name, value in known if math.isfinite(value)]
    return {"metrics": dict(finite[:METRICS_MAX])} if finite else {}


def _send(worker: SaverConnection, packet: Packet) -> None:
    """Send a packet to a worker. Errors are ignored: it is gone, or does not read."""
    with contextlib.suppress(OSError):
        seqpacket.send(worker.sock, packet)


def main() -> None:
    """Run the saver. See the top of this file for its arguments."""
    folder, listening_fd, control_fd, anchor = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    anchor_fd = None
    if control_fd < 0:
        with contextlib.suppress(ProcessLookupError):
            anchor_fd = os.pidfd_open(anchor)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("holdfast-saver")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICENESS)
    control = socket.socket(fileno=control_fd) if control_fd >= 0 else None
    saver = Saver(folder, socket.socket(fileno=listening_fd), control, anchor_fd)
    saver.run()
    if control is None:
        with contextlib.suppress(OSError):
            memory_folder.remove_folder(folder)
    sys.stdout.flush()
    os._exit(os.EX_OK)  # threads that are blocked on a disk are not joined
