"""Runs a job on several hosts from this machine: starts an agent on each, and decides when the job is over.

Each wanted host is a RemoteHost. At the start all log in together, because the first host decides the endpoint. Later
each host is handled alone: a lost one is tried again, a new one is started, a removed one is asked to leave. The agents
decide among themselves which nodes form a generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import secrets
import signal
from collections.abc import Sequence

from holdfast.launchers.ssh.hosts import (
    DISCOVERY_EVERY_S,
    AgentExit,
    Discovery,
    Expected,
    HostFacts,
    HostSpec,
    LaunchSpec,
    expected_from,
    problems,
    remarks,
    rendezvous_address,
    same_machine,
)
from holdfast.launchers.ssh.session import BEAT_S, Screen, SshSession
from holdfast.protocol.charter import VOTERS_MIN
from holdfast.protocol.errors import HostDiffersError, HostsError
from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_SIGNAL_BASE
from holdfast.protocol.options import Endpoint
from holdfast.protocol.outcome import OutcomeKind

LOGINS_MAX = 64
"""Logins at the same time: each costs processor time for cryptography."""
TOO_MANY_LOGINS_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a login is repeated that sshd or a jump host refused because it had too many; varied at random."""
RETRY_FIRST_S, RETRY_MAX_S = 2.0, 60.0
"""Pause before a lost host is tried again: the first one, which doubles up to the second."""
KILL_S = 5.0
"""Limit after the second Ctrl-C for the far sides to kill everything and report it."""
CONSOLE_STALL_S_MAX = 10.0
"""Limit at the end, also after Ctrl-C, for a console that accepts no output."""
PROBLEMS_SHOWN_MAX = 12
"""Lines about hosts that cannot take part; more are counted."""
ENDPOINTS_MAX = 3
"""Hosts that the endpoint lists if the coordinator can move: a host that comes later finds the job at one of them."""
JOB_ENDS = (OutcomeKind.SUCCEEDED.value, OutcomeKind.FAILED.value, OutcomeKind.NO_QUORUM.value)
"""Outcomes of the whole job, not of one node's part of it."""


def run(launch: LaunchSpec, run_id: str) -> int:
    """Run the job. Returns its exit code. Raises HostsError before any start."""
    return asyncio.run(_run(launch, run_id))


async def _run(launch: LaunchSpec, run_id: str) -> int:
    allow_descriptors()
    screen = Screen(f"\x1eholdfast {secrets.token_hex(8)} ")
    try:
        return await Launcher(launch, run_id, screen).run()
    finally:
        screen.close(CONSOLE_STALL_S_MAX)


def allow_descriptors() -> None:
    """Raise the limit of descriptors: each host needs three, and shells often start with 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class RemoteHost:
    """One host of the job, and what this launcher does about it.

    A host is logged in (`session`), followed until its agent ends (`task` is `_follow`), and if it was lost, tried
    again (`task` is `_start_again`). `Launcher._reconcile` starts the next of these tasks.
    """

    def __init__(self, spec: HostSpec, index: int | None) -> None:
        self.spec = spec
        self.index = index
        """The preferred group rank of this host's node; None: none, discovery named it."""
        self.session: SshSession | None = None
        """The connection; None: not logged in."""
        self.task: asyncio.Task[None] | None = None
        """What runs for this host; None: nothing, so it can be started or removed."""
        self.wanted = True
        """Whether the job wants this host; False: discovery no longer names it."""
        self.must_stay = False
        """Whether the host stays although discovery no longer names it: the coordinator is there."""
        self.over = False
        """Whether the host's agent has ended for a reason of its own. It is not started again."""
        self.retry_s = 0.0
        """Pause before the next attempt; 0 before the first one."""
        self.trouble = ""
        """The problem of the last attempt, which is not reported again; empty: it succeeded."""

    @property
    def facts(self) -> HostFacts | None:
        return None if self.session is None else self.session.facts


class Launcher:
    """Runs one job."""

    def __init__(self, launch: LaunchSpec, run_id: str, screen: Screen) -> None:
        self._launch = launch
        self._run_id = run_id
        self._screen = screen
        self._remotes: dict[str, RemoteHost] = {}
        """The hosts of the job by host name: all that are wanted, and others until their agents have ended."""
        self._ends: list[tuple[HostSpec, AgentExit]] = []
        """The ends of agents that say something about the job, in order."""
        self._expected: Expected = launch.expected
        self._endpoint = launch.endpoint
        """The rendezvous endpoint for all agents; empty until it is chosen, and for a job of one node."""
        self._coordinator_host = ""
        """The host whose agent hosts the coordinator, if this launcher chose it."""
        self._shown: set[str] = set()
        """Messages of the start that were shown."""
        self._changed = asyncio.Event()
        """Set when `_reconcile` may have something to do."""
        self._logins = asyncio.Semaphore(LOGINS_MAX)
        self._discovery = Discovery(launch.discovery, screen.say) if launch.discovery else None
        self._signalled = 0
        """The first signal that ends the job; 0: none came."""
        self._cause: AgentExit | None = None
        """The end of the agent because of which the launcher stopped the others."""
        self._over = asyncio.Event()
        """Set when the job has ended, or must end: no further agent is started."""
        self._main: asyncio.Task[int] | None = None
        """The task of `run`, which `_give_up` cancels."""

    async def run(self) -> int:
        """Run the job to its end. Returns its exit code. Raises HostsError before any start."""
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        handled = self._install_signals(loop)
        try:
            async with asyncio.TaskGroup() as tasks:
                beats = tasks.create_task(self._beat())
                await self._begin()
                await self._attend(tasks)
                beats.cancel()
            return self._show_end()
        except asyncio.CancelledError:
            if not self._signalled:
                raise
            return EXIT_SIGNAL_BASE + self._signalled
        except BaseExceptionGroup as group:  # the task group packs every error; callers expect a HostsError
            raise group.exceptions[0] from None
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)
            await asyncio.gather(*(session.close() for session in self._sessions()))

    def _sessions(self) -> list[SshSession]:
        return [each.session for each in self._remotes.values() if each.session is not None]

    # ---------------------------------------------------------------- the beginning

    async def _begin(self) -> None:
        """Log in to all hosts at once, compare them, send the first host's port to all. Raises HostsError."""
        for index, spec in enumerate(self._launch.hosts):
            self._remotes[spec.host] = RemoteHost(spec, index)
        while True:
            if self._discovery is not None:
                await self._discover(first=True)

            waiting = [each for each in self._remotes.values() if each.session is None]
            errors = await asyncio.gather(*map(self._log_in, waiting))
            for remote, error in zip(waiting, errors, strict=True):
                remote.trouble = str(error or "")
            errors += self._compare()

            ready = [each for each in self._remotes.values() if each.session is not None]
            self._judge([error for error in errors if error is not None], len(ready))
            if len(ready) >= self._launch.min_nodes:
                break
            self._say_once(f"{len(ready)} of at least {self._launch.min_nodes} hosts are ready; waiting for more")
            await asyncio.sleep(DISCOVERY_EVERY_S)

        self._choose_endpoint(ready)
        for remote in ready:
            assert remote.session is not None
            remote.session.go(remote.index, self._endpoint)

    async def _log_in(self, remote: RemoteHost) -> HostsError | None:
        """Open the host's session. Returns the error if there is none after all attempts."""
        for pause_s in (*TOO_MANY_LOGINS_PAUSES_S, None):
            session = SshSession(remote.spec, self._launch, self._screen, self._run_id)
            try:
                async with self._logins:
                    await session.start()
            except HostsError as error:
                if pause_s is None or not session.too_many_logins:
                    return error
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            else:
                remote.session = session
                break
        return None

    def _compare(self) -> list[HostsError | None]:
        """Compare the hosts, and close the connections to those with a problem, so that they are tried again."""
        with_facts = [(each, each.facts) for each in self._remotes.values() if each.facts]
        if not with_facts:
            return []
        # A host that cannot enter the folder or read the script is no measure for the others.
        sound = next((facts for _, facts in with_facts if not facts.trouble), with_facts[0][1])
        self._expected = expected_from(self._expected, sound)
        errors: list[HostsError | None] = []
        for remote, facts in with_facts:
            found = problems(remote.spec, facts, self._expected, self._nproc(remote.spec))
            if found:
                remote.trouble = "\n".join(found)
                errors.append(HostDiffersError(remote.trouble))
                self._release(remote)
            for text in remarks(remote.spec, facts, self._nproc(remote.spec)):
                self._screen.say(text)
        for remote, text in self._same_machine(list(self._remotes.values())):
            errors.append(HostsError(text))
            self._release(remote)
        return errors

    def _same_machine(self, remotes: Sequence[RemoteHost]) -> list[tuple[RemoteHost, str]]:
        """Hosts that are the same machine as an earlier one: a machine can have only one agent of a run."""
        with_facts = [(each.spec, each.facts) for each in remotes if each.facts]
        return [(self._remotes[spec.host], text) for spec, text in same_machine(with_facts)]

    def _release(self, remote: RemoteHost) -> None:
        session, remote.session = remote.session, None
        if session is not None:
            remote.task = asyncio.ensure_future(session.close())
            # The host is tried again, and the end of the run is seen, only when somebody looks.
            remote.task.add_done_callback(lambda _: self._changed.set())

    def _nproc(self, spec: HostSpec) -> int | None:
        return spec.slots if spec.slots is not None else self._launch.nproc

    def _judge(self, errors: Sequence[HostsError], ready: int) -> None:
        """Raise the errors unless the job may start, or wait, without those hosts."""
        if not errors:
            return
        lines = [line for error in errors for line in str(error).splitlines()]
        if len(lines) > PROBLEMS_SHOWN_MAX:
            lines = [*lines[:PROBLEMS_SHOWN_MAX], f"and {len(lines) - PROBLEMS_SHOWN_MAX} more"]
        elastic = self._launch.min_nodes < self._launch.max_nodes
        if self._discovery is not None or (elastic and ready >= self._launch.min_nodes):
            for line in lines:
                self._say_once(f"{line}; continuing without it")
            return
        raise type(errors[0])("\n".join(lines))

    def _say_once(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._screen.say(line)

    def _choose_endpoint(self, ready: Sequence[RemoteHost]) -> None:
        if self._endpoint or self._launch.alone:
            return
        facts = [each.facts for each in ready if each.facts]
        named = facts[: ENDPOINTS_MAX if self._launch.succession else 1]
        addresses = [rendezvous_address(one, [each for each in facts if each is not one]) for one in named]
        endpoints = [Endpoint(host=host, port=one.port) for one, host in zip(named, addresses, strict=True) if host]
        if not addresses[0] or not all(each.port for each in endpoints):
            raise HostsError(
                f"host {ready[0].spec} does not know its address for the other hosts; give one: --rdzv-endpoint"
            )
        self._endpoint = ",".join(map(str, endpoints))
        self._coordinator_host = ready[0].spec.host

    # ---------------------------------------------------------------- while it runs

    async def _attend(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the hosts until no host has anything left to do."""
        finding = tasks.create_task(self._find()) if self._discovery is not None else None
        while True:
            self._changed.clear()
            self._reconcile(tasks)
            if not any(each.task is not None for each in self._remotes.values()):
                break
            await self._changed.wait()
        if finding is not None:
            finding.cancel()

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        """Start the next task of every host that has none, and forget hosts that discovery has removed."""
        running = sum(each.task is not None for each in self._remotes.values())
        for remote in list(self._remotes.values()):
            if remote.task is not None and remote.task.done():
                remote.task = None
                running -= 1
            if remote.task is not None:
                continue
            if remote.session is not None:
                remote.task = tasks.create_task(self._follow(remote))
            elif not remote.wanted:
                del self._remotes[remote.spec.host]
            elif not self._over.is_set() and not remote.over and running < self._launch.max_nodes:
                running += 1
                remote.task = tasks.create_task(self._start_again(remote))

    async def _follow(self, remote: RemoteHost) -> None:
        """Wait until this host's agent, or the connection to it, has ended."""
        session = remote.session
        assert session is not None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        end = await session.wait()
        remote.session = None

        # A host that ran for a while is tried soon again; one that is lost at once each time, ever later.
        if remote.retry_s == 0 or loop.time() > began_s + RETRY_MAX_S:
            remote.retry_s = RETRY_FIRST_S

        if end.code is None and not self._over.is_set() and remote.wanted:
            then = "continues" if self._launch.detach else "ends by itself"
            self._screen.say(f"lost the ssh connection to {remote.spec} ({end.text}); what runs there {then}")
        elif end.code is not None and self._was_killed(end) and remote.wanted:
            self._screen.say(f"the agent on {remote.spec} was killed (exit code {end.code}); it is started again")
        elif end.code is not None:
            if remote.wanted or end.kind in JOB_ENDS:
                self._ends.append((remote.spec, end))
            remote.over = remote.wanted or end.kind in JOB_ENDS
            if end.kind in JOB_ENDS:
                self._over.set()
            self._stop_if_too_few(remote.spec, end)

        # A detached agent goes on without its launcher: another one must not be started beside it.
        if self._launch.detach and end.code is None:
            remote.over = True
        remote.task = None
        self._changed.set()

    def _was_killed(self, end: AgentExit) -> bool:
        """Whether a user on that host or the kernel (out of memory) killed it, and not the job."""
        return not self._over.is_set() and not end.kind and (end.code or 0) > EXIT_SIGNAL_BASE

    async def _start_again(self, remote: RemoteHost) -> None:
        """Try once, after the host's pause, to start it while others run. `_reconcile` makes the next attempt."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), remote.retry_s)
        remote.retry_s = min(max(remote.retry_s * 2, RETRY_FIRST_S), RETRY_MAX_S)

        if not self._over.is_set() and remote.wanted:
            error = await self._log_in(remote)
            if error is None:
                assert remote.facts is not None
                found = problems(remote.spec, remote.facts, self._expected, self._nproc(remote.spec))
                others = [each for each in self._remotes.values() if each is not remote]
                found += [text for same, text in self._same_machine([*others, remote]) if same is remote]
                error = HostDiffersError("\n".join(found)) if found else None

            if error is not None:
                if str(error) != remote.trouble:
                    self._screen.say(f"{error}; retrying")
                remote.trouble = str(error)
                await self._close(remote)
            elif self._over.is_set() or not remote.wanted:  # the job ended, or the host was removed, during the login
                await self._close(remote)
            elif remote.session is not None:
                self._screen.say(f"{remote.spec} joins")
                remote.trouble = ""
                remote.session.go(remote.index, self._endpoint)
        remote.task = None
        self._changed.set()

    async def _close(self, remote: RemoteHost) -> None:
        session, remote.session = remote.session, None
        if session is not None:
            await session.close()

    def _stop_if_too_few(self, spec: HostSpec, end: AgentExit) -> None:
        """Stop the job if too few hosts are left: an agent that ended for its own reason is not started again."""
        left = sum(not each.over for each in self._remotes.values())
        if self._over.is_set() or self._discovery is not None or not 0 < left < self._launch.min_nodes:
            return
        self._screen.say(
            f"{spec} has ended ({end.code}), and {left} of {self._launch.min_nodes} hosts are too few: stopping"
        )
        self._cause = end
        self._over.set()
        self._signal_all(signal.SIGTERM)

    async def _beat(self) -> None:
        while True:
            for session in self._sessions():
                session.beat()
            await asyncio.sleep(BEAT_S)

    # ---------------------------------------------------------------- hosts that come and go

    async def _find(self) -> None:
        while not self._over.is_set():
            await asyncio.sleep(DISCOVERY_EVERY_S)
            await self._discover(first=False)

    async def _discover(self, *, first: bool) -> None:
        assert self._discovery is not None
        hosts = await self._discovery.ask()
        if hosts is None:
            if first and not self._remotes:
                raise HostsError("--host-discovery must succeed once before the job can start")
            return
        found = {spec.host: spec for spec in hosts}
        for host, remote in list(self._remotes.items()):
            if found.get(host) != remote.spec:
                self._dismiss(remote)
            else:
                remote.must_stay = False
        for host, spec in found.items():
            known = self._remotes.get(host)
            if known is None and (not first or len(self._remotes) < self._launch.max_nodes):
                self._remotes[host] = RemoteHost(spec, None)
        self._changed.set()

    def _dismiss(self, remote: RemoteHost) -> None:
        """Discovery no longer names this host, or names it differently: its workers save and leave."""
        if not remote.wanted or remote.must_stay:
            return
        coordinator_is_there = remote.spec.host == self._coordinator_host and remote.session is not None
        coordinator_can_move = self._launch.succession and len(self._sessions()) >= VOTERS_MIN
        if coordinator_is_there and not coordinator_can_move:
            remote.must_stay = True
            self._screen.say(
                f"{remote.spec} is no longer among the hosts, but the coordinator is there: it stays until the job "
                "ends (with --rdzv-backend etcd it could leave)"
            )
            return
        remote.wanted = False
        if remote.session is None:
            if remote.task is None:
                del self._remotes[remote.spec.host]
            return
        self._screen.say(f"{remote.spec} is no longer among the hosts: it is asked to leave")
        remote.session.signal(signal.SIGTERM)

    # ---------------------------------------------------------------- signals

    def _install_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        """Install the handlers. Signals that were ignored at our start (SIGHUP with nohup) stay ignored."""
        handled = []
        for signum in {*self._launch.signals, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                ends = signum in self._launch.signals or signum in (signal.SIGINT, signal.SIGTERM)
                loop.add_signal_handler(signum, self._on_end_signal if ends else self._signal_all, signum)
                handled.append(int(signum))
        return handled

    def _on_end_signal(self, signum: int) -> None:
        detaching = self._launch.detach and signum == signal.SIGHUP
        first, self._signalled = not self._signalled, self._signalled or signum
        self._over.set()

        name = signal.Signals(signum).name
        going = any(each.session is not None and each.task is not None for each in self._remotes.values())
        if not going or detaching:
            self._give_up()
        elif first:
            self._screen.say(f"{name}: stopping on all hosts; a second one kills at once")
            self._signal_all(signum)
            self._drop_when_stalled(-1)
        else:
            self._screen.say(f"{name} again: killing on all hosts")
            for session in self._sessions():
                session.kill()
            asyncio.get_running_loop().call_later(KILL_S, self._give_up)

    def _drop_when_stalled(self, before: int) -> None:
        """Drop output if the console accepts none, so that it does not delay the reports of the agents' ends."""
        now = self._screen.written_bytes
        if now == before:
            self._screen.drop()
        else:
            asyncio.get_running_loop().call_later(CONSOLE_STALL_S_MAX, self._drop_when_stalled, now)

    def _signal_all(self, signum: int) -> None:
        for session in self._sessions():
            session.signal(signum)

    def _give_up(self) -> None:
        """Wait for no host any more. The end of ssh ends what runs there, if it can."""
        assert self._main is not None
        self._main.cancel()

    # ---------------------------------------------------------------- the end

    def _show_end(self) -> int:
        """Show how the job ended, once for all hosts. Returns the job's exit code."""
        chosen = chosen_end(self._ends, [spec.host for spec in self._launch.hosts])
        if chosen is None:
            if self._signalled:
                return EXIT_SIGNAL_BASE + self._signalled
            self._screen.say("lost the ssh connection to every host")
            return EXIT_FAILURE
        shown = {chosen[1].text}
        for spec, end in self._ends:
            if end.text and end.kind not in JOB_ENDS and end.text not in shown:
                shown.add(end.text)
                self._screen.say(f"{spec.host}: {end.text.removeprefix('holdfast: ').splitlines()[0]}")
        if chosen[1].text:
            self._screen.console.say(chosen[1].text, prefix="")

        # If this launcher stopped the others, their exit codes only say that they were stopped.
        code = chosen[1].code if self._cause is None or chosen[1].kind in JOB_ENDS else self._cause.code
        return EXIT_FAILURE if code is None else code


def chosen_end(ends: Sequence[tuple[HostSpec, AgentExit]], order: Sequence[str]) -> tuple[HostSpec, AgentExit] | None:
    """The end that stands for the job: an outcome of the whole job if there is one, else a failure before a success;
    the first of these in the order of the hosts."""

    def preference(entry: tuple[HostSpec, AgentExit]) -> tuple[bool, bool, int]:
        spec, end = entry
        number = order.index(spec.host) if spec.host in order else len(order)
        return end.kind not in JOB_ENDS, not end.code, number

    return min(ends, key=preference, default=None)
