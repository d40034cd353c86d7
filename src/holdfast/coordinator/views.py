"""The view of the job for users: what `holdfast status` shows of it. It reads the state and changes none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.coordinator.membership import Membership
from holdfast.coordinator.training import Training
from holdfast.coordinator.world import Member, Phase, World
from holdfast.protocol.policy import Grow, JobSpec
from holdfast.protocol.rank_progress import JobView, NodeView, RankView
from holdfast.protocol.throughput import RankThroughput, Throughput
from holdfast.text import spans


def job_view(
    now: float,
    *,
    job: JobSpec,
    phase: Phase,
    generation: int,
    world: World | None,
    restarts: int,
    since_s: float,
    job_s: float,
    why: str,
    membership: Membership,
    training: Training,
) -> JobView:
    """`since_s`: since the phase began; `job_s`: since the job began; `why`: why the last generation ended."""
    throughput = training.throughput
    at_work = throughput is not None and phase in (Phase.RUNNING, Phase.DRAINING)
    spares = tuple(pace.rank for pace in throughput.spares()) if throughput is not None and at_work else ()
    return JobView(
        run_id=job.run_id,
        phase=phase.value,
        generation=generation,
        restarts=restarts,
        restarts_max=job.max_restarts,
        world_size=world.size if world is not None else 0,
        since_s=since_s,
        job_s=job_s,
        training_s=training.training_s,
        why=world.stop_text if world is not None and phase is Phase.STOPPING else why,
        nodes=_node_views(membership.members.values(), world, phase, throughput, membership, now),
        nodes_min=job.min_nodes,
        nodes_max=job.max_nodes,
        nodes_wanted=_nodes_wanted(job, world, membership, now),
        job_step=throughput.job.steps if throughput is not None else 0,
        job_steps=throughput.job_steps if throughput is not None else 0,
        left_s=throughput.left_s if throughput is not None and phase is Phase.RUNNING else 0.0,
        spares=spares,
        spares_why=_spares_why(spares, len(throughput.ranks)) if throughput is not None and spares else "",
    )


def _nodes_wanted(job: JobSpec, world: World | None, membership: Membership, now: float) -> int:
    """Number of nodes for an autoscaler. A node that takes no part for a time needs another one in its place."""
    usable, places = job.max_nodes, frozenset[str]()
    if world is not None:
        places = frozenset(world.order)
        if job.grow is Grow.NEVER or world.done:
            usable = len(world.order)
    waiting = {member.name for member, _ in membership.waiting(now)}
    waiting |= {member.name for member in membership.members.values() if member.parked or member.leaving}
    return usable + len(waiting.difference(places))


def _spares_why(spares: Sequence[int], world_size: int) -> str:
    waits = f"rank {spares[0]} waits as a spare" if len(spares) == 1 else f"ranks {spans(spares)} wait as spares"
    return f"{waits}: ht.survive(ranks=…) uses fewer than the {world_size} ranks that are there"


IN_WORLD = {
    Phase.PREPARING: "starting",
    Phase.REGROUPING: "regrouping",
    Phase.RUNNING: "running",
    Phase.DRAINING: "draining",
    Phase.STOPPING: "stopping",
}


def _node_views(
    members: Iterable[Member],
    world: World | None,
    phase: Phase,
    throughput: Throughput | None,
    membership: Membership,
    now: float,
) -> tuple[NodeView, ...]:
    """The nodes of the world by group rank, then the others in order of arrival."""
    places = {name: place for place, name in enumerate(world.order)} if world is not None and phase in IN_WORLD else {}
    on_host_backoff = {member.name for member, _ in membership.waiting(now)}
    views: list[NodeView] = []
    for member in sorted(members, key=lambda one: (places.get(one.name, len(places)), one.arrival)):
        in_world = world if member.name in places else None
        # While it is prepared, its workers do not run yet.
        at_work = in_world is not None and phase is not Phase.PREPARING
        known = throughput if at_work else None
        views.append(
            NodeView(
                member=member.name,
                host=member.node.host,
                group_rank=places.get(member.name),
                state=_state(member, in_world, phase, on_host_backoff),
                heard_s=now - member.last_heard_s,
                ranks=tuple(_rank(pace, now) for pace in known.of_member(member.name)) if known is not None else (),
            )
        )
    return tuple(views)


def _state(member: Member, world: World | None, phase: Phase, on_host_backoff: set[str]) -> str:
    if world is None:
        if member.leaving:
            return "leaving"
        if member.parked:
            return "parked"
        if member.name in on_host_backoff:
            return "on host back-off"
        return "arriving" if phase is Phase.GATHERING else "spare"
    if not world.places[member.name]:
        return "starting"
    if phase is Phase.PREPARING:
        return "prepared" if member.name in world.prepared else "starting"
    if world.finished(member.name):
        return "done"
    return "leaving" if member.leaving else IN_WORLD[phase]


def _rank(pace: RankThroughput, now: float) -> RankView:
    return RankView(
        rank=pace.rank,
        local_rank=pace.local_rank,
        stage=pace.stage,
        # job_step is one more than the step, so that 0 can mean that the script reports none.
        steps=pace.job_step - 1 if pace.job_step else pace.steps,
        step_s=pace.step_s,
        own_s=pace.own_step_s,
        age_s=max(0.0, now - pace.newest_s),
        pid=pace.pid,
        counts_job=pace.job_step > 0,
    )
