"""Golden scenarios: a tiny language whose lines make things happen, and the trace of what follows from them.

    job 2:3 restarts=1          one job; also fixed, grow=never, exclude=3, seconds join=60 last_call=30 grace=5 drain=20
                                hang=300 survive=wait min_ranks=2; then, in any order:
    boot a b c nproc=2          start agents (the first host is the endpoint's); also rank=1 role=x slow stubborn
    advance 2s                  let time pass
    done a                      all workers of a end with 0; `done a 1`: local rank 1 alone
    fail a 0 exit=3             local rank 0 of a ends so; also type=ValueError
    prepared a                  phase one is done on a, which was booted `slow`
    cannot a disk full          phase one fails there
    kill b / power b            its agent is killed / the machine loses power and nobody is told
    silence c / heal            nothing passes to and from c / what was held back arrives
    reset c                     its connection breaks
    reached a 7                 the workers of a ask for safe points and have reached the 7th
    drained a                   they leave at the one they were told
    steps a b 12                the workers of a and b have made 12 steps, the newest one just now
    meets a                     they wait for their process group
    place a 1 sleep             local rank 1 of a is in sleep() from now on (the others wait for it in all_reduce())
    reach a timed out           a cannot reach the store
    can_go_on a                 the workers of a run in `ht.survive`: they can go on after a loss
    ready a                     the replacements that a starts wait for their place
    spoil a 0 exit=1            the replacement for local rank 0 of a ends so
    refuse a its memory grew    a worker of a cannot go on
    signal a SIGTERM            the agent gets a signal; also preempt
    stop / end                  `holdfast stop` / `holdfast kill` on some node: the whole job is to end
    store a                     the store host on a dies
    coordinator                 the coordinator ends and no agent does; the next one is on the same host
    # a comment

A scenario file holds these lines, and below each, indented, what came of it: messages that arrive (`a <`) or are sent
(`a >`), phases and acts. Pings are left out. `@2.5` says that time has passed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from holdfast.agent import commands as do
from holdfast.agent.events import Signalled, StoreDied
from holdfast.coordinator import coordinator_commands as cdo
from holdfast.coordinator.world import Phase
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol import messages as msg
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import Grow, JobSpec, Limits, Note
from holdfast.protocol.rank_progress import Stage
from holdfast.protocol.train_contract import Survive
from holdfast.text import spans
from tests.support.simulator.scripted import ScriptedAgent, ScriptedWorld

INDENT = "    "
TOLD = ("kind", "code", "culprits", "still_s", "text")
"""Fields of the coordinator's notes about hangs that are shown."""


class ScenarioError(ValueError):
    """A line that is not of the language; says which."""


def inputs(text: str) -> list[str]:
    """The lines of a scenario file without the trace."""
    return [line for line in text.splitlines() if not line.startswith(INDENT)]


def play(lines: list[str]) -> str:
    """Run the lines; returns them with the trace below each."""
    scenario = _Scenario()
    for line in lines:
        scenario.play(line)
    return "\n".join(scenario.text) + "\n"


class _Scenario:
    def __init__(self) -> None:
        self.text: list[str] = []
        self._world: ScriptedWorld | None = None
        self._said_s = 0.0

    def play(self, line: str) -> None:
        self.text.append(line)
        words = line.partition("#")[0].split()
        if not words:
            return
        verb, plain = words[0], [word for word in words[1:] if "=" not in word]
        named = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        try:
            if verb == "job":
                self._world = _job(plain, named, self._trace)
            else:
                self._act(verb, plain, named)
        except (KeyError, IndexError, ValueError, AssertionError) as error:
            raise ScenarioError(f"{line!r}: {error!r}\n" + "\n".join(self.text)) from error

    def _act(self, verb: str, plain: list[str], named: dict[str, str]) -> None:
        world = self._world
        if world is None:
            raise ScenarioError("a scenario begins with `job MIN:MAX`")
        match verb:
            case "boot":
                _boot(world, plain, named)
            case "advance":
                world.advance(float(plain[0].removesuffix("s")))
            case "kill" | "power":
                world.crash(plain[0], silent=verb == "power")
            case "silence":
                world.network.partition({plain[0]}, {world.hosts[0]})
            case "heal":
                world.network.heal()
            case "reset":
                world.network.reset(plain[0], world.hosts[0])
            case "coordinator":
                world.end_coordinator()
            case "stop" | "end":
                world.quit(drain=verb == "stop")
            case "steps":
                for host in plain[:-1]:
                    world.agents[host].progress(Stage.STEPPING, int(plain[-1]))
                    world.settle()
            case "meets":
                for host in plain:
                    world.agents[host].progress(Stage.MEETING)
                    world.settle()
            case "can_go_on":
                for host in plain:
                    world.agents[host].can_go_on()
                    world.settle()
            case _:
                _agent_acts(world.agents[plain[0]], verb, plain[1:], named, world.settle)
        world.settle()

    def _trace(self, who: str, what: object) -> None:
        line = _describe(who, what)
        if not line or self._world is None:
            return
        if self._world.clock.now > self._said_s:
            self._said_s = self._world.clock.now
            self.text.append(f"{INDENT}@{self._said_s:g}")
        self.text.append(INDENT + line.replace("\n", " | "))


def _job(plain: list[str], named: dict[str, str], trace: Callable[[str, object], None]) -> ScriptedWorld:
    least, _, most = plain[0].partition(":")
    fixed = "fixed" in plain
    job = JobSpec(
        run_id="scenario",
        min_nodes=int(least),
        max_nodes=int(most or least),
        backend="static" if fixed else "c10d",
        max_restarts=int(named.get("restarts", "0")),
        fixed_ranks=fixed,
        grow=Grow(named.get("grow", "drain")),
        exclude_after=int(named.get("exclude", "0")),
        survive=Survive(named.get("survive", "shrink")),
        min_ranks=int(named.get("min_ranks", "1")),
    )
    limits = Limits(
        join_s=float(named.get("join", "60")),
        last_call_s=float(named.get("last_call", "30")),
        stop_grace_s=float(named.get("grace", "5")),
        drain_s=float(named.get("drain", "20")),
        hang_timeout_s=float(named.get("hang", "300")),
    )
    return ScriptedWorld(job, limits, trace)


def _boot(world: ScriptedWorld, plain: list[str], named: dict[str, str]) -> None:
    for host in plain:
        if host not in ("slow", "stubborn"):
            world.boot(
                host,
                nproc=int(named.get("nproc", "1")),
                node_rank=int(named["rank"]) if "rank" in named else None,
                role=named.get("role", "default"),
                holds_prepare="slow" in plain,
                stubborn="stubborn" in plain,
            )
            world.settle()


def _agent_acts(
    agent: ScriptedAgent, verb: str, plain: list[str], named: dict[str, str], settle: Callable[[], None]
) -> None:
    """What one agent and its workers do and where they are."""
    match verb:
        case "done":
            for local_rank in [int(plain[0])] if plain else sorted(agent.workers):
                agent.worker_ends(local_rank, 0)
                settle()
        case "fail":
            agent.worker_ends(int(plain[0]), int(named["exit"]), named.get("type", ""))
        case "ready":
            agent.ready()
        case "spoil":
            agent.replacement_ends(int(plain[0]), int(named["exit"]))
        case "refuse":
            agent.refuses(" ".join(plain))
        case "prepared":
            assert agent.assign is not None
            agent.prepared(agent.assign)
        case "cannot":
            agent.prepare_fails(" ".join(plain))
        case "signal":
            signum = signal.Signals[plain[0]]
            agent.handle(Signalled(signum, signum.name, "preempt" in plain))
        case "reached":
            agent.reached = int(plain[0])
        case "drained":
            agent.drained()
        case "store":
            agent.handle(StoreDied(agent.generation))
        case "place":
            agent.places[int(plain[0])] = plain[1]
        case "reach":
            agent.reach = (f"{agent.host} cannot reach the store: {' '.join(plain)}",)
        case _:
            raise ScenarioError(f"no such verb: {verb}")


def _describe(who: str, what: object) -> str:
    """One line of the trace; empty for what is not shown."""
    match what:
        case Phase():
            return f"coordinator: {what.value}"
        case cdo.DropLink(_, reason):
            return f"coordinator: drops a link: {reason}"
        case do.Send(message):
            return f"{who} > {text}" if (text := _message(message)) else ""
        case Look(generation, number, store):
            return f"{who} < look {generation} #{number}" + " and try the store" * store
        case Looked(generation, number, samples, reach):
            places = " ".join(sample.frames[0].function for sample in samples)
            about = f"{places or 'nobody'}" + "".join(f"; {text}" for text in reach)
            return f"{who} > looked {generation} #{number}: {about}"
        case do.StartWorkers(assign):
            return f"{who}: starts workers of {_place(assign)}"
        case do.RegroupWorkers(assign, safe_point):
            when = f"at safe point {safe_point}" if safe_point else "at once"
            return f"{who}: regroups workers {when} for {_place(assign)}"
        case do.ContinueWorkers(assign):
            return f"{who}: the workers go on in {_place(assign)}"
        case do.StartReplacements(_, local_ranks):
            return f"{who}: starts replacements for local ranks {_ranks(local_ranks)}"
        case do.SignalWorkers(signum):
            return f"{who}: {signal.Signals(signum).name} to the workers"
        case Note(event, fields) if event.startswith(("hang", "straggler", "look")):
            return f"coordinator: {event} {' '.join(f'{name}={fields[name]}' for name in TOLD if name in fields)}"
        case do.HoldWorkers():
            return f"{who}: holds the workers"
        case do.ReleaseWorkers(_, safe_point):
            return f"{who}: the workers go on" + (f" to {safe_point}" if safe_point else "")
        case do.KillTree(generation):
            return f"{who}: kills what is left of generation {generation}"
        case do.HangUp(reason):
            return f"{who}: hangs up: {reason}"
        case do.Say(text):
            return f"{who}: says: {text}"
        case do.Exit(outcome):
            return f"{who}: exits {_outcome(outcome)}"
        case cdo.Tell() | Note() | cdo.Conclude() | do.Dial() | do.Prepare() | Note():
            return ""
    return f"{who} < {text}" if (text := _message(what)) else ""


def _message(message: object) -> str:
    if isinstance(message, msg.Ping | msg.Pong):
        return ""
    return _from_agent(message) or _from_coordinator(message)


def _from_agent(message: object) -> str:
    match message:
        case msg.Join(node, _, _, running):
            return f"join {node.member}" + (f" running {running.generation}" if running is not None else "")
        case msg.Prepared(generation, port):
            return f"prepared {generation}" + (f" port={port}" if port else "")
        case msg.WorkerDone(generation, local_rank):
            return f"done {generation} local_rank={local_rank}"
        case msg.WorkersFailed(generation, failures, evidence_follows):
            text = " ".join(f"rank={f.rank} exit={f.exit_code}" for f in failures)
            return f"failed {generation} {text}" + ", evidence follows" * evidence_follows
        case msg.Stopped(generation):
            return f"stopped {generation}"
        case msg.StoreLost(generation):
            return f"store lost {generation}"
        case msg.Leave(reason, drain):
            return f"leave: {reason}" + (", to drain" if drain else "")
        case msg.Held(generation, reached):
            return f"held {generation} at {reached}"
        case msg.Progress(generation, ranks):
            return f"progress {generation} {ranks[0].stage.value} {ranks[0].steps}"
        case msg.CanGoOn(generation, local_ranks):
            return f"can_go_on {generation} {_ranks(local_ranks)}"
        case msg.ReplacementReady(generation, local_ranks):
            return f"ready {generation} {_ranks(local_ranks)}"
        case msg.ReplacementFailed(generation, failures):
            return f"replacement failed {generation} {_ranks(failure.local_rank for failure in failures)}"
        case msg.CannotRegroup(generation, text):
            return f"cannot regroup {generation}: {text}"
    return ""


def _from_coordinator(message: object) -> str:
    match message:
        case msg.Drain(generation, text):
            return f"drain {generation}: {text}"
        case msg.DrainTo(generation, safe_point):
            return f"drain {generation} to {safe_point}"
        case msg.Notice(text):
            return f"notice: {text.splitlines()[0]}"
        case msg.Quit(drain, by):
            return f"quit, {'saving first' if drain else 'at once'}: {by}"
        case msg.Regroup(assign, safe_point, text):
            return f"regroup {_place(assign)} at {safe_point}: {text}" + (" store" * assign.hosts_store)
        case msg.Replace(generation, local_ranks):
            return f"replace {generation} {_ranks(local_ranks)}"
        case msg.Resume(generation):
            return f"resume {generation}"
        case msg.Abandon(generation):
            return f"abandon {generation}"
        case msg.Joined():
            return "joined"
        case msg.Waiting(text):
            return text
        case msg.Assign():
            return f"assign {_assigned(message)}"
        case msg.Start(generation, address, port):
            return f"start {generation} at {address}:{port}"
        case msg.Stop(generation, reason, text, following):
            then = f"; then {_assigned(following)}" if following is not None else ""
            return f"stop {generation} {reason.value}: {text}{then}"
        case msg.Finish(outcome):
            return f"finish {_outcome(outcome)}"
        case msg.Refuse(code, text):
            return f"refuse {code}: {text}"
    raise ScenarioError(f"no text for {message!r}")


def _assigned(assign: msg.Assign) -> str:
    return f"{_place(assign)} restarts={assign.restart_count}" + " store" * assign.hosts_store


def _place(assign: msg.Assign) -> str:
    return (
        f"generation {assign.generation}: node {assign.group_rank} of {assign.group_world_size}, "
        f"ranks from {assign.rank_base} of {assign.world_size}"
        + (f", local ranks {_ranks(assign.local_ranks)}" if assign.local_ranks is not None else "")
    )


def _ranks(local_ranks: Iterable[int]) -> str:
    return spans(local_ranks) or "none"


def _outcome(outcome: Outcome) -> str:
    text = f"{outcome.exit_code} {outcome.kind.value}"
    if outcome.verdict is not None and outcome.verdict.gave_up:
        text += f", {outcome.verdict.cause}, {outcome.verdict.gave_up}"
    return text + (f": {outcome.message}" if outcome.message else "")
