"""Decides when workers that are already running form the next generation, and which ones: those that are left after a
loss, at once; or with replacements that are ready, or without nodes that leave, at a common safe point.

The machine owns it, passes events to it and carries out the plans and commands it returns. It changes no phase.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.ending import Budget, GiveUp, killed_in_training
from holdfast.coordinator.incident import Incident, Incidents, how
from holdfast.coordinator.membership import Membership
from holdfast.coordinator.replacements import Replacements
from holdfast.coordinator.world import Draining, Member, Phase, World
from holdfast.protocol.extension import EndGeneration
from holdfast.protocol.messages import (
    CanGoOn,
    CannotRegroup,
    Notice,
    Replace,
    ReplacementFailed,
    ReplacementReady,
    StopReason,
)
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Grow, JobSpec, Limits, Note
from holdfast.protocol.train_contract import Survive
from holdfast.text import listed, plural, ranks_text, spans

ATTEMPTS_MAX = 3
"""Give up regrouping after this many attempts in a row from which not all ranks were able to go on."""
PAST_MAX = 8
"""Evidence of failures is taken for this many earlier generations."""


class Plan(Struct, frozen=True):
    """The next generation, formed of running workers."""

    order: tuple[str, ...]
    places: dict[str, tuple[int, ...]]
    text: str
    """What was lost or is new, for the console."""
    safe_point: int = 0
    """The safe point at which the workers stop for it; 0: at once."""
    fresh: tuple[int, ...] = ()
    """Ranks that take part for the first time."""


Order = Command | EndGeneration | Plan


@dataclass(frozen=True, slots=True)
class PastGeneration:
    """One that the workers have left together. Its world does not change any more; the incident may."""

    world: World
    incident: Incident
    """The newest one when the workers left. The generation after it may have the same."""


@dataclass(slots=True, eq=False, repr=False)
class Regrouping:
    """State of a regroup: the next generation is formed of running workers."""

    job: JobSpec
    limits: Limits
    budget: Budget
    membership: Membership
    replacements: Replacements
    incidents: Incidents
    rejoining: bool = False
    """The generation was formed of running workers, and not all of them are able to go on from it."""
    began_s: float = 0.0
    """The time at which that began."""
    past: dict[int, PastGeneration] = field(default_factory=dict)
    """Generations since the last one that was gathered, by number: the evidence of a failure may still arrive."""
    succeeded: Callable[[Collection[str]], bool] = lambda _: False
    """Whether another coordinator would continue the job without these agents, of which one has the coordinator."""
    longest_step_s: Callable[[], float] = lambda: 0.0
    """The longest step so far; 0: unknown."""
    joining: set[str] = field(default_factory=set)
    """Members that join the running generation without a worker in it, and are not prepared yet."""
    plan: Plan | None = None
    """The plan by which the newest generation was formed; None: it was gathered."""
    _wanted: int = 0
    """Number of ranks without which the next generation is not started, with --survive wait."""
    _attempts: int = 0
    """Generations formed of running workers since the last one from which all ranks were able to go on."""
    _rejoin_by_s: float = inf
    """The time at which all workers must have gone on in the newest generation."""
    _went_on: set[tuple[str, int]] = field(default_factory=set)
    """Those that have, by member and local rank."""
    _newcomers: set[str] = field(default_factory=set)
    """Members that have joined a running generation."""
    _used: bool = False
    """All workers ran in `ht.survive`, in this generation or an earlier one."""

    def reset(self) -> None:
        """All workers are stopped: the next generation is gathered."""
        self.plan, self.rejoining, self._wanted, self._attempts = None, False, 0, 0
        self.replacements.reset()
        self._rejoin_by_s = inf
        for each in (self.past, self.joining, self._newcomers):
            each.clear()

    # ---------------------------------------------------------------- a loss

    def without(self, now: float, world: World, phase: Phase, what: str) -> Plan | str:
        """Plan how the others go on without the lost ranks, or say why they cannot. Empty: nobody expects them to."""
        places = self._left(world, phase, ())
        if not any(places.values()):
            return ""
        # Charged only if they go on: a restart charges the loss by itself.
        problem = self._problem(world, phase, places) or self._charge(now, world)
        if problem:
            return problem
        if self.job.survive is Survive.WAIT:
            # A second loss finds a smaller world, and the first one is not replaced yet.
            self._wanted = max(world.size, self._wanted)
        self._attempts += 1
        return Plan(_with_ranks_first(places), places, f"{what}; {self._go_on(sum(map(len, places.values())))}")

    def can_go_on_without(self, world: World, phase: Phase, silent: Collection[str]) -> bool:
        """Whether the others could go on without these members."""
        places = self._left(world, phase, silent)
        return any(places.values()) and not self._problem(world, phase, places)

    def _left(self, world: World, phase: Phase, silent: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The ranks that are left, without these members; none: nobody expects them to go on."""
        drain = world.drain if phase is Phase.DRAINING else None
        # After other drains, or once the safe point is agreed, the workers end anyway
        # (test_a_worker_killed_by_the_stop_of_such_a_drain_is_no_loss_to_survive).
        goes_on = drain is not None and (drain.saves or (drain.regroups and drain.safe_point is None))
        between = phase is Phase.REGROUPING or goes_on
        expected = between or (phase is Phase.RUNNING and (world.can_go_on_count or self.rejoining))
        if self.job.survive is Survive.OFF or not expected:
            return {}
        members, leaving = self.membership.members.keys() - set(silent), set(self.leaving(world))
        stay = {name: world.places[name] if name not in leaving else () for name in world.order if name in members}
        return {
            name: tuple(each for each in ranks if each not in world.gone.get(name, ())) for name, ranks in stay.items()
        }

    def _problem(self, world: World, phase: Phase, places: Mapping[str, tuple[int, ...]]) -> str:
        """The reason why the workers at these places cannot go on alone. First match wins."""
        members = self.membership.members
        if own := self.incidents.newest.own_fault:
            return own
        if self._attempts >= ATTEMPTS_MAX:
            return f"{ATTEMPTS_MAX} losses in a row while regrouping"
        # A rank that has ended would be missing in the next collective (scenario survive_done).
        if world.done_count:
            return f"{ranks_text(world.done_ranks())} ended"
        leaving = [members[name] for name in self.leaving(world)]
        led = next((each for each in leaving if each.node.hosts_coordinator), None)
        # The others would stand without a coordinator (test_a_coordinator_that_nobody_succeeds_leaves_with_all).
        if led is not None and not self.succeeded([each.node.agent for each in leaving]):
            return f"{led.node.host} is leaving, it has the coordinator, and no other node can take over"
        # Workers that were told to leave their generation were able to, and report it again only in the next one.
        if phase is not Phase.REGROUPING and not self._all_come(world, places):
            return "not every rank runs in ht.survive"
        size = sum(map(len, places.values()))
        if size < self.job.min_ranks:
            return f"{size} of at least {self.job.min_ranks} ranks left"
        nodes = len(places) - len(leaving)
        if nodes < self.job.min_nodes:
            return f"{nodes} of at least {plural(self.job.min_nodes, 'node')} left"
        if self.job.fixed_ranks and () in places.values():
            return "with static rendezvous each node needs a rank"
        room = sum(members[name].node.nproc for name in places if not members[name].leaving)
        if self.job.survive is Survive.WAIT and room < max(world.size, self._wanted):
            return "the nodes that are left have no place for the lost ranks"
        return ""

    def _all_come(self, world: World, places: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether all workers at these places leave this generation when the order comes. Either they report that they
        can, or they are still entering it, and turn back (scenario `survive_second_loss`)."""
        can_go_on = world.can_go_on
        missing = [(name, each) for name, ranks in places.items() for each in set(ranks) - can_go_on.get(name, set())]
        # A worker that was able in this generation, and is not any more, has left its training function.
        return not missing or (self.rejoining and self._went_on.isdisjoint(missing))

    def _charge(self, now: float, world: World) -> str:
        """Charge the loss to the restart budget, once, as a restart is. A lost node is free. Why it cannot be."""
        incident = self.incidents.newest
        if world.costs_no_restart or incident.lost_nodes or not incident.failures:
            return ""
        # A loss after a start is another one, also if not all ranks were able since the one before. Else replacements
        # that are lost whenever they join would cost nothing (scenario `survive_join_lost`).
        another = self.rejoining and world.started_s is not None
        if incident.charged and not another:
            return ""
        failures = incident.failures[-1:] if another else incident.failures
        lived_s = inf if killed_in_training(world, failures) else world.lived_s(now)
        pause = self.budget.charge(failures[0].signature, lived_s)
        if isinstance(pause, GiveUp):
            return pause.reason
        # This loss was charged itself: no earlier charge covers it.
        incident.charged, incident.charged_before, self.replacements.not_before_s = True, False, now + pause.backoff_s
        return ""

    def evidence(self, incident: Incident, world: World) -> list[Order]:
        """The evidence of a failure in an earlier generation was read: the others may have to stop after all."""
        own = incident.own_fault
        if not own:
            return []
        self.incidents.reopen(incident)
        return self._refusal(world, own)

    def to_judge(self) -> PastGeneration | None:
        """The generation that lost ranks, once the evidence is complete; None: nothing to report."""
        past = self.past[max(self.past)] if self.past else None
        if past is None or past.incident.empty or past.incident.unread or past.incident.verdict is not None:
            return None
        return past

    # ---------------------------------------------------------------- the next generation

    def form(self, now: float, generation: int, plan: Plan, before: World) -> World:
        """The world of a plan. The incident stays the newest one until all ranks are able to go on from that world: if
        they are not, it is the reason for the restart."""
        if not self.rejoining:
            self.began_s = now
        self.rejoining, self.plan = True, plan
        self.past[before.generation] = PastGeneration(before, self.incidents.newest)
        self.incidents.carried_on()
        self.past.pop(before.generation - PAST_MAX, None)
        self.joining.clear()
        world = World(generation, plan.order, dict(plan.places))
        for name in self.leaving(before):
            gone = before.gone.get(name, set()) | before.done.get(name, set())
            world.leaving_workers[name] = tuple(each for each in before.workers_of(name) if each not in gone)
            self.forget(now, name)
        # Newcomers are no disturbance: a loss shortly after they joined is no quick failure
        # (test_a_replacement_that_joins_does_not_make_the_next_loss_a_quick_one).
        if plan.fresh:
            world.undisturbed_s = before.started_s if before.undisturbed_s is None else before.undisturbed_s
        world.short_lease_s = before.short_lease_s
        self.replacements.formed(now, world)
        return world

    def all_done(self, world: World) -> bool:
        """All ranks have ended with 0 instead of reaching the safe point at which others would have joined them."""
        return not self.at_once and world.done_count == self.past[max(self.past)].world.size

    @property
    def at_once(self) -> bool:
        """The workers were told to leave their generation at once, and not at a safe point."""
        return self.plan is None or not self.plan.safe_point

    def may_start(self, world: World) -> bool:
        return world.all_prepared and not self.waits(world) and not world.done_count

    def started(self, now: float, world: World) -> list[Note]:
        """The workers of this world were told to begin, or to go on."""
        # Nobody knows yet whether all can go on from here
        # (test_after_a_start_a_node_has_its_whole_lease_until_all_are_able_again).
        world.short_lease_s = 0.0
        self._wanted = 0
        self.replacements.look_for_missing(world)
        plan = self.plan
        self._went_on.clear()
        self._rejoin_by_s = inf if plan is None else now + self.limits.rejoin_s
        if plan is None:
            return []
        took_s = round(now - self.began_s, 3)
        notes = [Note("regrouped", {"generation": world.generation, "world_size": world.size, "took_s": took_s})]
        if plan.fresh:
            notes.append(Note("replaced", {"generation": world.generation, "ranks": list(plan.fresh)}))
        return notes

    def overdue(self, now: float, world: World) -> list[Order]:
        """The generation ends if a worker that was told to go on has not done so in time."""
        if now < self._rejoin_by_s:
            return []
        self._rejoin_by_s = inf
        ranks = enumerate((name, each) for name in world.order for each in world.places[name])
        late = [rank for rank, place in ranks if place not in self._went_on]
        # Workers that have ended training need not say that they go on
        # (test_workers_that_went_on_and_are_done_with_training_are_left_alone).
        if world.done_count or not late:
            return []
        return self._refusal(world, f"{ranks_text(late)} did not go on within {self.limits.rejoin_s:g} s")

    def advance(self, now: float, world: World, since_s: float) -> list[Order]:
        """Decide what follows while the workers leave their generation. They were told to at `since_s`."""
        due_s = self.due_s(world)
        if world.done_count and self.at_once:
            return self._refusal(world, f"{ranks_text(world.done_ranks())} ended")
        if self._waits_for_ended(world):
            ended = f"{ranks_text(world.done_ranks())} ended before the safe point"
            return self._refusal(world, f"{ended} at which others wait")
        if now >= since_s + due_s:
            what = "no replacement" if world.all_prepared else "not every worker"
            return self._refusal(world, f"{what} was ready within {due_s:g} s")
        if not self.waits(world):
            return []
        orders = self.replace(now, world)
        ready = sum(map(len, self.replacements.ready().values()))
        if world.all_prepared and world.size + ready >= self._wanted:
            plan = self._with_ready(world, 0)
            orders += [plan] if plan is not None else []
        return orders

    def _waits_for_ended(self, world: World) -> bool:
        """Whether ranks wait at the safe point for others that have ended before it. None waits if all end earlier."""
        if self.at_once or not world.done_count:
            return False
        places = self.past[max(self.past)].world.places
        # A node that has just joined is prepared without a worker at the safe point.
        return any(set(places.get(name, ())) - world.done.get(name, set()) for name in world.prepared)

    def due_s(self, world: World) -> float:
        """Time that the start of the next generation may take (s)."""
        if self.waits(world) and world.all_prepared:
            return self.limits.join_s
        # A worker in a long call of C code cannot be interrupted. With a fixed limit, jobs with steps of 3 s were all
        # started again; a safe point is even awaited until the limit of a hang.
        return self.limits.regroup_of(self.longest_step_s()) if self.at_once else self.limits.safe_point_s

    def _refusal(self, world: World, why: str) -> list[Order]:
        reason = StopReason.MEMBER_LOST if self.incidents.newest.lost_nodes else StopReason.WORKER_FAILED
        note = Note("regroup_refused", {"generation": world.generation, "reason": why})
        return [note, EndGeneration(reason, f"the workers cannot go on: {why}")]

    # ---------------------------------------------------------------- what agents report

    def heard(
        self,
        now: float,
        world: World,
        member: Member,
        message: CanGoOn | ReplacementReady | ReplacementFailed | CannotRegroup,
    ) -> list[Order]:
        match message:
            case CanGoOn(generation, local_ranks):
                # Also if the message is about an older generation: this agent suspends its workers since then.
                member.suspends = True
                if generation == world.generation:
                    world.set_can_go_on(member.name, local_ranks)
                    self._went_on.update((member.name, each) for each in local_ranks)
                    self._used = self._used or world.all_can_go_on
                    self._settle(world)
            case ReplacementReady(_, local_ranks):
                self.replacements.heard_ready(now, member.name, local_ranks)
            case ReplacementFailed(_, failures):
                return self._replacements_failed(now, world, member, failures)
            case CannotRegroup(generation, text):
                return self._refusal(world, text) if generation == world.generation else []
        return []

    def _settle(self, world: World) -> None:
        """If all ranks are able to go on again, what was lost before is over."""
        if world.all_can_go_on and not world.short_lease_s:
            members = self.membership.members
            present = [members[name] for name, ranks in world.places.items() if ranks and name in members]
            # One agent that suspends nothing is enough to need the whole lease: its workers would run beside the next
            # generation (test_an_agent_that_suspends_no_more_is_not_relied_on).
            known = [member.suspend_s if member.suspends else 0.0 for member in present]
            world.short_lease_s = self.limits.short_lease_of(max(known)) if known and all(known) else 0.0
        if self.rejoining and world.all_can_go_on:
            self.rejoining, self._attempts = False, 0
            self.incidents.over()

    def _replacements_failed(
        self, now: float, world: World, member: Member, failures: tuple[Failure, ...]
    ) -> list[Order]:
        failures = self.replacements.failed(now, member.name, failures)
        if not failures:
            return []
        local_ranks = [failure.local_rank for failure in failures]
        what = f"the replacement for local rank {spans(local_ranks)} on {member.node.host} failed ({how(failures[0])})"
        note = Note("replacement_failed", {"member": member.name, "local_ranks": local_ranks, "text": what})
        if not self.replacements.gave_up:
            return [note, *self._tell_world(world, Notice(f"{what}; it counts as {self.budget.newest}"))]
        # They train on with fewer ranks: only the replacement is given up.
        if not self.waits(world):
            left = f"no restart is left: {self._go_on(world.size)}"
            return [note, *self._tell_world(world, Notice(f"{what}; {left}"))]
        self.incidents.replacements_failed(failures)
        return [note, EndGeneration(StopReason.WORKER_FAILED, what)]

    # ---------------------------------------------------------------- replacements

    def replace(self, now: float, world: World) -> list[Order]:
        """Order the replacements that are due."""
        orders: list[Order] = []
        for member, local_ranks in self.replacements.order(now):
            orders.append(Tell(member.link, Replace(world.generation, local_ranks)))
            orders.append(Note("replacing", {"member": member.name, "local_ranks": list(local_ranks)}))
        return orders

    def grows(self, now: float, world: World) -> bool:
        """Whether the replacements that are ready join now: all others are able to go on with them."""
        return now >= self.replacements.join_at_s and world.all_can_go_on

    def at_safe_point(self, world: World, drain: Draining) -> Plan | None:
        """Plan how they join at the next safe point that all can reach. A worker in `ht.survive` reaches one after each
        step; it may have reached none yet."""
        if not drain.regroups or not world.all_can_go_on:
            return None
        return self._with_ready(world, drain.newest + 1)

    def leaving(self, world: World) -> list[str]:
        """The members of this world that leave."""
        members = self.membership.members
        return [name for name in world.order if name in members and members[name].leaving]

    def _with_ready(self, world: World, safe_point: int) -> Plan | None:
        ready, leaving = self.replacements.ready(), set(self.leaving(world))
        places = {
            name: () if name in leaving else tuple(sorted((*world.places[name], *ready.get(name, ()))))
            for name in world.order
        }
        if leaving and not self._others_may_go_on(world, places):
            return None
        order = _with_ranks_first(places)
        base, fresh, joined = 0, list[int](), False
        for name in order:
            fresh += [base + n for n, each in enumerate(places[name]) if each not in world.places[name]]
            joined = joined or (name in self._newcomers and not world.places[name])
            base += len(places[name])
        hosts = [self.membership.members[name].node.host for name in world.order if name in leaving]
        new = f"{listed(hosts)} {'leaves' if len(hosts) == 1 else 'leave'}; " if hosts else ""
        if fresh:
            replaced = "was replaced" if len(fresh) == 1 else "were replaced"
            new += f"{ranks_text(fresh)} {'joined' if joined else replaced}; "
        return Plan(order, places, f"{new}{self._go_on(base)}", safe_point, tuple(fresh))

    def _others_may_go_on(self, world: World, places: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the others can go on without the nodes that leave. With --survive wait they need as many ranks."""
        size = sum(map(len, places.values()))
        enough = size >= max(world.size, self._wanted) or self.job.survive is Survive.SHRINK
        return enough and size > 0 and not self._problem(world, Phase.REGROUPING, places)

    def next_change_s(self, now: float, world: World) -> float:
        """The time at which replacements have to be ordered, or join, while a generation runs."""
        joins_at_s = self.replacements.join_at_s if world.all_can_go_on else inf
        return min(self.replacements.order_at_s(now), joins_at_s, self._rejoin_by_s)

    def due_at_s(self, now: float, world: World, since_s: float) -> float:
        """The time at which `advance` has something to do unless an agent reports something before."""
        order_at_s = self.replacements.order_at_s(now) if self.waits(world) else inf
        return min(since_s + self.due_s(world), order_at_s)

    def waits(self, world: World) -> bool:
        """The survivors wait for replacements (--survive wait)."""
        return world.size < self._wanted

    def forget(self, now: float, member: str) -> None:
        """This member is lost, leaves, or has no process any more."""
        self.replacements.forget(now, member)
        self.joining.discard(member)
        self._newcomers.discard(member)

    # ---------------------------------------------------------------- nodes that arrive

    def admits(self, world: World) -> bool:
        """Whether a node may join the running generation without a worker in it, and start its workers there."""
        return (
            self.job.survive is not Survive.OFF
            and self.job.grow is Grow.DRAIN
            and world.all_can_go_on
            and world.master[1] > 0
        )

    def may_admit_later(self, world: World) -> bool:
        """Whether the workers are still starting, and will probably be able to go on with new ones then: to start them
        all again for a new node would cost more."""
        wanted = self.job.survive is not Survive.OFF and self.job.grow is Grow.DRAIN
        return wanted and self._used and not (world.all_can_go_on or world.stepped or world.done_count)

    def joined(self, world: World, member: Member) -> None:
        """This node has joined the running generation."""
        self.joining.discard(member.name)
        self._newcomers.add(member.name)
        world.places[member.name] = ()
        world.order = (*world.order, member.name)
        self.membership.changed()
        self.replacements.look_for_missing(world)

    # ---------------------------------------------------------------- small steps

    def _go_on(self, size: int) -> str:
        one = size == 1
        if size < self._wanted:
            return f"{plural(size, 'rank')} {'waits' if one else 'wait'} for the replacement"
        return f"{plural(size, 'rank')} {'goes' if one else 'go'} on"

    def _tell_world(self, world: World, message: Notice) -> list[Order]:
        members = self.membership.members
        return [Tell(members[name].link, message) for name in world.order if name in members]


def _with_ranks_first(places: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Rank 0's node hosts the store, so nodes without a rank come last."""
    return tuple(sorted(places, key=lambda name: not places[name]))
