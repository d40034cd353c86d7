"""A simulated job whose nodes elect a successor when its coordinator is lost: several coordinators may exist at once.

Hosts, witnesses, endpoints, who reaches whom, and what must go on. Their processes: `electing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import combinations

from msgspec import structs

from holdfast.agent import voter as vote
from holdfast.authority.voters import Voters
from holdfast.coordinator.world import Phase
from holdfast.protocol.charter import VOTERS_MIN, Charter, Poll, Polled, Succession
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import NodeSpec, Note
from tests.support.simulator.checkers import SuccessionChecker
from tests.support.simulator.cluster import SimCluster, SimOptions
from tests.support.simulator.drawn import DrawnAgent
from tests.support.simulator.electing import ENDPOINT_PORT, ElectingAgent, Place, Process, SimReplicated, SimWitness
from tests.support.simulator.nodes import LINGER_S

NO_ANSWER_S = 1.0
"""An attempt to connect that nobody answers fails after this time."""
DECISIONS = frozenset({"assigned", "charter", "elected", "regroup_begun", "started", "stopping"})
LOOK_S = 1.0
CALM_S, PAUSE_S = 10.0, 20.0
"""A majority that was not disturbed for so long together has a job that runs, but for a pause: to take in a node, or to
stop workers that cannot go on."""


@dataclass(frozen=True)
class Weather:
    """What attempts to connect suffer, all the time."""

    loss: float = 0.0
    """Share of those that are not answered."""
    twice: float = 0.0
    """Share of the questions to voters that arrive a second time, later."""


class SuccessionCluster(SimCluster):
    """Nodes `n0` … and witnesses `w0` …; the endpoint is on n0, others may be listed after it."""

    voter_class = vote.Voter
    authority_class = Voters

    def __init__(
        self,
        seed: int,
        nodes: int,
        options: SimOptions,
        *,
        endpoints: int = 1,
        witnesses: int = 0,
        fixed_ports: bool = False,
        weather: Weather = Weather(),
        story_lines_max: int | None = 60,
    ) -> None:
        self.weather = weather
        self.endpoints = [f"n{i}" for i in range(endpoints)]
        self.fixed_ports = fixed_ports
        self.processes: dict[str, Process] = {}
        """By host; also while a coordinator lingers after its agent."""
        self.witnesses: list[str] = []
        self.dark: set[str] = set()
        """Hosts without power."""
        self.frozen: dict[str, float] = {}
        """Until when the processes of a host stand still."""
        self.torn: dict[str, float] = {}
        """When a host's link was broken while both ends lived, or its agent was killed."""
        self.calm_since_s = self._ran_s = 0.0
        self.jobs = SuccessionChecker(self._apart, self._could_go_on, self._leads)
        self.leaders: dict[int, SimReplicated] = {}
        super().__init__(seed, nodes, options, story_lines_max=story_lines_max)
        self.checker = self.jobs
        for number in range(witnesses):
            self.witnesses.append(f"w{number}")
            self.boot_witness(f"w{number}")
        self.agenda.at(LOOK_S, self._look)
        self._strikes = options.faults.leader_moments

    def trace(self, who: str, what: object) -> None:
        super().trace(who, what)
        decided = isinstance(what, Note) and what.event in DECISIONS
        if decided and self._strikes and self.clock.now < self.options.faults.span_s:
            self._strikes -= 1
            self.faults.strike()

    # ---------------------------------------------------------------- who reaches whom

    def address(self, host: str) -> str:
        return f"10.0.1.{host[1:]}" if host in self.witnesses else f"10.0.0.{host[1:]}"

    def host_at(self, address: str) -> str:
        network, _, number = address.removeprefix("10.0.").partition(".")
        return ("w" if network == "1" else "n") + number

    def on_host(self, host: str, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """Do this in a process of the host, which may stand still."""

        def act() -> None:
            until_s = self.frozen.get(host, 0.0)
            if until_s > self.clock.now:
                self.agenda.at(until_s, act)
            else:
                action()

        self.agenda.after(delay_s, act)

    def reach(self, host: str, place: Place, done: Callable[[Process | str], None]) -> None:
        """Connect. `done` gets the process that listens there, "refused" or "no answer"."""
        to = self.host_at(place[0])
        lost = bool(self.weather.loss) and self.random.random() < self.weather.loss

        def arrive() -> None:
            silent = lost or not self.network.connected(host, to) or to in self.dark or to in self.frozen
            if silent:
                self.on_host(host, lambda: done("no answer"), NO_ANSWER_S)
                return
            process = self.processes.get(to)
            found = process if process is not None and process.listens_at(place[1]) else "refused"
            self.on_host(host, lambda: done(found), self.network.delay(host, to))

        self.agenda.after(self.network.delay(host, to), arrive)

    def call(self, host: str, to: str, found: Callable[[Process], None]) -> None:
        """Connect to the endpoint on another host; nothing follows if it does not answer. Its times are not drawn: these
        calls are frequent, and most find nothing."""
        way_s = self.network.delay_s_max + max(self.network.lags.get(each, 0.0) for each in (host, to))

        def arrive() -> None:
            process = self.processes.get(to)
            away = not self.network.connected(host, to) or to in self.dark or to in self.frozen
            if process is not None and not away and process.listens_at(ENDPOINT_PORT):
                self.on_host(host, lambda: found(process), way_s)

        self.agenda.after(way_s, arrive)

    def ask(self, host: str, question: vote.AskVote, answered: Callable[[vote.Event], None]) -> None:
        """One question to a voter."""
        seat, poll = question.seat, question.poll
        ended = False

        def end(polled: Polled | None, *, gone: bool = False) -> None:
            nonlocal ended
            if not ended:
                ended = True
                failed = vote.PollFailed(seat.name, poll, gone)
                answered(failed if polled is None else vote.PolledCame(seat.name, poll, polled))

        def found(process: Process | str) -> None:
            if isinstance(process, str):
                end(None, gone=process == "refused")
                return
            self.deliver(host, process, poll, end)
            if self.random.random() < self.weather.twice:
                self.agenda.after(self.random.uniform(0.0, 2.0), lambda: self.deliver(host, process, poll, end))

        self.reach(host, (seat.address, seat.port), found)
        self.on_host(host, lambda: end(None), self.limits.poll_s)

    def deliver(self, host: str, process: Process, poll: Poll, answer: Callable[[Polled], None]) -> None:
        def reply(polled: Polled) -> None:
            if self.network.connected(host, process.host):
                self.on_host(host, lambda: answer(polled), self.network.delay(host, process.host))

        def arrive() -> None:
            if process.listening and self.network.connected(host, process.host):
                process.voter.poll_came(poll, reply)

        self.on_host(process.host, arrive, self.network.delay(host, process.host))

    # ---------------------------------------------------------------- life of hosts

    def new_agent(self, node: NodeSpec) -> DrawnAgent:
        old = self.processes.pop(node.host, None)
        if old is not None:
            old.end()
        self.dark.discard(node.host)
        agent = ElectingAgent(self, structs.replace(node, hosts_coordinator=False))
        self.processes[node.host] = agent
        return agent

    def boot_witness(self, host: str) -> None:
        self.dark.discard(host)
        if host not in self.processes:
            self.processes[host] = SimWitness(self, host)

    def crash(self, host: str, *, silent: bool) -> None:
        process = self.processes.pop(host, None)
        if process is None:
            return
        self.log(host, "loses power" if silent else "its process is killed")
        self.agents.pop(host, None)
        self.frozen.pop(host, None)
        if silent:
            self.dark.add(host)
        else:
            self.torn[host] = self.clock.now
        process.crash(silent=silent)

    def freeze(self, host: str, for_s: float) -> None:
        process = self.processes.get(host)
        if process is None or host in self.frozen:
            return
        self.log(host, f"stands still for {for_s} s")
        until_s = self.frozen[host] = self.clock.now + for_s
        process.freeze(for_s)

        def thaw() -> None:
            if self.frozen.get(host) == until_s:
                del self.frozen[host]
                self.disturbed()

        self.agenda.at(until_s, thaw)

    def reset(self, host: str) -> None:
        self.torn[host] = self.clock.now
        self.network.reset(host, self.leader_host())

    def agent_ended(self, host: str, outcome: Outcome) -> None:
        """Without a coordinator the process ends too."""
        self.log(host, f"ends: {outcome.kind.value} {outcome.exit_code}")
        self.kinds[outcome.kind] += 1
        self.outcomes[host] = outcome
        self.agents.pop(host)
        agent = self.processes[host]
        agent.voter.alive = False
        coordinator = agent.coordinator

        def end() -> None:
            if host in self.processes and self.processes[host] is agent:
                del self.processes[host]
                agent.end()

        if coordinator is not None and coordinator.machine.outcome is not None:
            self.agenda.after(LINGER_S, end)
        else:
            end()

    # ---------------------------------------------------------------- coordinators

    def lead(self, agent: ElectingAgent, node: NodeSpec, succession: Succession) -> SimReplicated:
        self.coordinators += 1
        now = self.clock.now
        places = [(host, ENDPOINT_PORT) for host in (*self.endpoints, *self.witnesses) if host != node.host]
        voters = self.authority_class(self.limits, now, node, succession, places=places)
        machine = self.new_coordinator(voters)
        coordinator = self.leaders[self.coordinators] = SimReplicated(self, agent, self.coordinators, machine, voters)
        self.jobs.leads(coordinator.number, succession.charter, succession.term)
        self.log(coordinator.who, f"begins: term {succession.term}, {succession.silent_s:.3f} s, {succession.closed}")
        self.coordinator = coordinator
        return coordinator

    def new_voter(self, name: str, *, stands: bool) -> vote.Voter:
        return self.voter_class(name, self.limits, self.clock.now, stands=stands)

    def leader_host(self) -> str:
        """Of one of the coordinators that live."""
        leading = [coordinator.host for coordinator in self.leaders.values() if coordinator.alive]
        return self.random.choice(leading) if leading else self.hosts[0]

    def link_lost(self, host: str) -> None:
        """Counts only where a fault broke it."""

    def cut_off(self, coordinator: int) -> set[str]:
        """Hosts whose agent or link a fault has ended: their workers die within a fence. The end of a coordinator is no
        excuse: its successor waits."""
        fence_s = self.limits.fence_s + self.limits.kill_s
        return {host for host, when in self.torn.items() if self.clock.now - when <= fence_s}

    def _apart(self, a: str, b: str) -> bool:
        return not self.network.connected(a, b) or self.clock.now < self.calm_since_s + CALM_S

    def _leads(self, coordinator: int) -> bool:
        leader = self.leaders[coordinator]
        here = any(getattr(process, "coordinator", None) is leader for process in self.processes.values())
        return here and not leader.machine.stepped_down

    def disturbed(self) -> None:
        self.calm_since_s = self.clock.now

    # ---------------------------------------------------------------- what must go on

    def _look(self) -> None:
        """A majority of voters that is left in peace has a job that runs or is over. The time before there was one does
        not count: a founder without the voters of before waits until they cannot elect any more."""
        charter, together = self.jobs.newest, set[str]()
        calm = self.clock.now - self.calm_since_s >= CALM_S
        if calm and charter is not None and charter.outcome is None and len(charter.seats) >= VOTERS_MIN:
            together = self._together(charter)
        if not together or any(self._goes_on(self.processes[host]) for host in together):
            self._ran_s = self.clock.now
        else:
            text = f"{sorted(together)} hear each other for {CALM_S + PAUSE_S:g} s, and no job runs there"
            self.jobs.goes_on(text, running=self.clock.now - self._ran_s < PAUSE_S)
        if self.clock.now - self.calm_since_s >= CALM_S + PAUSE_S:
            at_work = [host for host, process in self.processes.items() if self._runs(process)]
            if self._hear_each_other(at_work):
                self.jobs.alone([self.processes[host].coordinator.number for host in at_work])
        if self.agents or self.clock.now <= self.last_fault_s:
            self.agenda.after(LOOK_S, self._look)

    def living(self, charter: Charter, but: int = 0) -> dict[str, str]:
        """Hosts of the voters that know of the job and have not given it up, by name. `but`: for a coordinator of this
        term."""
        patient_s = self.clock.now - self.limits.elect_s
        awake = [(host, process.voter.machine) for host, process in self.processes.items() if host not in self.frozen]
        names = {
            voter.name: host
            for host, voter in awake
            if voter.charter is not None
            and (voter._lost_s > patient_s or (voter.stage is vote.VoterState.FOLLOWING and voter._followed != but))
        }
        return {seat.name: names[seat.name] for seat in charter.seats if seat.name in names}

    def _could_go_on(self, founder: int) -> Collection[str]:
        """Voters that could go on with the newest charter without this founder, as far as they know who votes."""
        newest = self.jobs.newest
        assert newest is not None
        living = self.living(newest, self.leaders[founder].voters.term)
        agents = [self.processes[host].voter.machine for host in living.values() if host in self.hosts]
        known = max((voter.charter for voter in agents), key=lambda charter: charter.position, default=None)
        # Where the newest charter has the outcome, they could only end the job once more (succession seed 24764).
        able = known is not None and known.outcome is None and known.carried_by(living)
        return living if able and any(self._heard(host, founder) for host in living.values()) else ()

    def _heard(self, host: str, founder: int) -> bool:
        """Whether this host was able to tell the founder what it knows: an attempt to connect may just have failed, and
        then there, back, and there again."""
        coordinator, network = self.leaders[founder], self.network
        way_s = network.delay_s_max + max(network.lags.get(each, 0.0) for each in (host, coordinator.host))
        connected = network.connected(host, coordinator.host)
        since_s = max(coordinator.began_s, self.calm_since_s)
        return connected and self.clock.now - since_s > NO_ANSWER_S + 3 * way_s

    def _together(self, charter: Charter) -> set[str]:
        """Hosts that hear a majority of the voters, and each other; none: there are too few for the job."""
        living = self.living(charter)
        for size in range(len(living), 0, -1):
            for names in combinations(living, size):
                hosts = {living[name] for name in names}
                if charter.carried_by(names) and self._hear_each_other(hosts):
                    hosts |= {host for host in self.agents if self._finds(host, hosts)}
                    if len(hosts & self.agents.keys()) >= self.job.min_nodes and self._hear_each_other(hosts):
                        return hosts
        return set()

    def _finds(self, host: str, hosts: set[str]) -> bool:
        """Whether this agent can find the job of these hosts: by what it knows, or by an endpoint."""
        voter = self.processes[host].voter.machine
        ways = [each for each in (*self.endpoints, *self.witnesses) if each in self.processes]
        known = voter.charter is not None or any(self._hear_each_other({*hosts, host, way}) for way in ways)
        return known and self._hear_each_other({*hosts, host})

    def _hear_each_other(self, hosts: Iterable[str]) -> bool:
        return all(self.network.connected(a, b) for a, b in combinations(sorted(hosts), 2)) and not any(
            host in self.frozen for host in hosts
        )

    def _goes_on(self, process: Process) -> bool:
        """It runs, or only waits because it was restarted often: for up to `backoff_max_s`."""
        coordinator = getattr(process, "coordinator", None)
        if coordinator is None or self._runs(process):
            return coordinator is not None
        gathering = coordinator.machine.gathering
        enough = gathering.present >= self.options.min_nodes
        return bool(enough and not gathering.pause and self.clock.now < gathering.not_before_s)

    @staticmethod
    def _runs(process: Process) -> bool:
        coordinator = getattr(process, "coordinator", None)
        return coordinator is not None and coordinator.machine.phase in (Phase.RUNNING, Phase.DRAINING, Phase.OVER)
