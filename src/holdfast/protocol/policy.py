"""The data that all parts of the control plane share: bounds of the numbers in messages; the definition of a job and
its time limits, which are fixed before the job starts; and an event, a command and growing pauses of both machines.
PURE.

The decoders of protocol.codec check every message against the bounds. A number that no honest peer can send ends its
sender's connection and never reaches a machine. Bounds that depend on the job are checked in coordinator.admission.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from holdfast.protocol.train_contract import Survive

WORKERS_PER_NODE_MAX = 4096
RANKS_MAX = 2**31 - 1
LINE_MAX = 2**31 - 1
COUNT_MAX = 2**62
"""Limit of every counter. COUNT_MAX + 1 still fits into every message and into the 64 bits of a board's word."""
SECONDS_MAX = 1e12
EXIT_CODE_MAX = 2**32
ITEMS_MAX = 64
"""Limit of entries in a table or list of texts that a peer sends."""

Workers: TypeAlias = Annotated[int, Meta(ge=0, le=WORKERS_PER_NODE_MAX)]
LocalRank: TypeAlias = Annotated[int, Meta(ge=0, lt=WORKERS_PER_NODE_MAX)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=RANKS_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Line: TypeAlias = Annotated[int, Meta(ge=-1, le=LINE_MAX)]
"""Line of a source file; -1 or 0: none."""
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
PortOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
"""A time that is neither NaN nor infinite."""
Period: TypeAlias = Annotated[float, Meta(ge=0.001, le=SECONDS_MAX)]
"""Interval of something periodic."""
ExitCode: TypeAlias = Annotated[int, Meta(ge=-1024, le=EXIT_CODE_MAX)]
Words: TypeAlias = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]
Switches: TypeAlias = Annotated[tuple[str, ...], Meta(max_length=ITEMS_MAX)]


class Tick(Struct, frozen=True):
    """Event: a deadline given by next_deadline() has passed."""


class Note(Struct, frozen=True):
    """Command: write a decision and its reason into the journal."""

    event: str
    fields: dict[str, object]


PINGS_PER_FENCE = 2
"""Number of pings in fence_s at least."""
PINGS_PER_SUSPENSION = 3
"""Number of pings in the time of `suspend_of` at least."""
SUSPENSION_PER_FENCE = 0.375
"""Least share of fence_s after which workers are suspended."""
SUSPENSION_PER_FENCE_MAX = 0.75
"""Share of fence_s above which workers are not suspended at all: they are killed soon after."""
PROGRESS_PER_HANG = 1.2
"""Number of reports of progress in hang_report_s at least."""
STEPS_PER_RELEASE = 2.0
"""Limit for a worker to leave its generation, in its longest steps."""
RELEASES_PER_WORKER = 2.0
"""Factor of the limit for a worker to leave its generation, if it only waits for a processor."""
GROWTH = 2.0
"""Factor by which a pause grows."""
PAUSE_S_MAX = 60.0


@dataclass(slots=True, eq=False, repr=False)
class Pauses:
    """Times at which a wait is reported again: soon at first, then after growing pauses."""

    first_s: float
    at_s: float
    """The time at which the next report is due (s of the caller's clock)."""
    pause_s: float

    @classmethod
    def begin(cls, now: float, first_s: float) -> Pauses:
        return cls(first_s, now + first_s, first_s)

    def due(self, now: float) -> bool:
        """Whether a report is due now; if so, the next pause begins."""
        if now < self.at_s:
            return False
        self.pause_s = min(GROWTH * self.pause_s, max(PAUSE_S_MAX, self.first_s))
        self.at_s = now + self.pause_s
        return True


class Grow(Enum):
    """The reaction to a node that joins a running job (--grow)."""

    NOW = "now"
    """The job is regrouped at once, as torchrun does."""
    DRAIN = "drain"
    """The job is regrouped at the next safe point; at once if the workers ask for none."""
    NEVER = "never"
    """The node waits until the job is regrouped for another reason."""


class JobSpec(Struct, frozen=True, kw_only=True):
    """Properties of a job that must be the same on all nodes; taken from the command line."""

    run_id: str
    min_nodes: int
    max_nodes: int
    backend: str
    max_restarts: int = 0
    fixed_ranks: bool = False
    """Static rendezvous: exactly max_nodes nodes, each at the group rank it names."""
    grow: Grow = Grow.DRAIN
    exclude_after: int = 0
    """A host that caused this many failures is excluded for a time (--exclude-after); 0: never."""
    survive: Survive = Survive.SHRINK
    min_ranks: int = 1
    """Number of ranks below which the workers do not go on without the lost ones (--min-ranks)."""
    requeues: int = 0
    """Number of times that a scheduler has requeued this job. Agents of an earlier start are refused."""


class Limits(Struct, frozen=True, kw_only=True):
    """Every wait of the control plane. Seconds unless the name says otherwise."""

    join_s: float = 600.0
    """Limit from the start until min_nodes are there (rdzv-conf join_timeout; static: timeout)."""
    settle_s: float = 2.0
    """Quiet time after the newest arrival before the world is formed, once min_nodes are there."""
    last_call_s: float = 30.0
    """Limit of the wait for more nodes, once min_nodes are there (rdzv-conf last_call_timeout)."""
    gather_s: float = 0.5
    """Time for which arrivals at a running job are gathered before it is regrouped for them."""
    lease_s: float = 6.0
    """A member silent for this long is lost, by the coordinator's clock."""
    unjoined_s: float = 15.0
    """A link without a Join is closed after this time. An honest agent sends Join at once, or when its workers are
    gone, which is one fence after it lost its last coordinator."""
    fence_s: float = 4.0
    """An agent whose last acknowledged ping is older than this kills its workers, by its own clock."""
    suspend_s: float = 1.5
    """See `suspend_of`. Not shorter: a slow network or a busy machine must not suspend workers again and again."""
    ping_interval_s: float = 1.0
    """See `ping_interval_of`."""
    pings_per_s_max: int = 500
    """Number of pings of all agents together in a second, as long as each sends PINGS_PER_FENCE in fence_s."""
    renew_interval_s: float = 0.5
    """Time between two renewals of the coordinator's authority with its voters."""
    prove_s: float = 1.0
    """Time between two attempts to prove that the process of a voter without a link has ended."""
    kill_s: float = 0.5
    """Time from SIGKILL until all processes are gone, on a healthy machine."""
    prepare_s: float = 30.0
    """Phase one (store bound, folders made) must end within this on every node."""
    drain_s: float = 60.0
    """Limit from the start of a drain until every worker has left at its safe point (--drain-timeout)."""
    stop_grace_s: float = 30.0
    """Time from SIGTERM to SIGKILL (--shutdown-timeout)."""
    stop_slack_s: float = 15.0
    """Time that is added to the grace before the coordinator gives up on a member that does not report Stopped."""
    connect_retry_s: float = 0.1
    """First pause between attempts to reach the coordinator; it doubles up to connect_retry_max_s."""
    connect_retry_max_s: float = 0.5
    stand_s: float = 0.05
    """A voter stands for election this long after the loss of the coordinator, times its place among the voters."""
    stand_again_s: float = 0.2
    """Pause from an election without a winner until a voter stands again; it doubles. Voters with a later place wait
    longer."""
    stand_again_max_s: float = 2.0
    elect_s: float = 30.0
    """Time after the loss of the coordinator in which a voter joins no other one that founded the job again, unless a
    majority of the voters is known to have ended."""
    poll_s: float = 1.0
    """A voter that has not answered a candidate within this time has denied its vote."""
    say_interval_s: float = 5.0
    """First pause between two reports of the reason for a wait."""
    backoff_first_s: float = 0.25
    """Pause before the second quick restart in a row (the first is immediate); it doubles."""
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0
    """A generation that ran this long ends a streak of quick failures."""
    flap_s: float = 1.0
    """A node lost within this time of the start of its workers, or before, counts as a quick loss of its host."""
    flap_first_s: float = 2.0
    """Time for which a host's agents must be members before the others are regrouped for them, from the second quick
    loss of that host in a row on; it doubles."""
    flap_max_s: float = 60.0
    exclude_first_s: float = 60.0
    """Duration of the first exclusion of a host; each later one is twice as long."""
    exclude_max_s: float = 3600.0
    release_s: float = 2.0
    """Limit after a loss, from the order to regroup until a worker has left its collective; then it is killed. If steps
    are long, see `release_of`. A worker that waits for a processor has up to twice as long."""
    regroup_s: float = 5.0
    """Limit after a loss, from the order to regroup until every node is prepared; then all workers are stopped and
    started again. If steps are long, see `regroup_of`."""
    rejoin_s: float = 30.0
    """Limit from the order to go on until every worker trains again in the new generation; then all workers are stopped
    and started again."""
    suspended_s: float = 5.0
    """A worker in ht.survive that is suspended (SIGSTOP) for this long, while another worker of its node runs, is
    killed and replaced."""
    progress_interval_s: float = 1.0
    """See `progress_interval_of`."""
    progress_interval_max_s: float = 10.0
    """The interval in the largest jobs."""
    progress_per_s_max: int = 100
    """Reports of all agents together, up to progress_interval_max_s."""
    hang_report_s: float = 12.0
    """Time without a step of any rank after which all workers are sampled, if it is also as long as hang_steps steps
    (rdzv-conf hang_report). Sampling takes some 4 s, so a hang is reported after about 15 s."""
    hang_steps: int = 20
    """Number of steps, each as long as the median, without which an examination starts."""
    hang_report_max_s: float = 300.0
    """Limit of the time of these steps together, but at least three of them (rdzv-conf hang_report_max)."""
    slow_report_s: float = 60.0
    """The same time as hang_report_s for ranks that may only be slow: they come late to the process group. Also the
    time between two examinations before the first step, and the longest time between two steps that counts as
    training."""
    hang_timeout_s: float = 300.0
    """The generation is ended when all samples show no movement for this long (--hang-timeout); 0: never."""
    pause_report_s: float = 300.0
    """Time without movement after which a job in which no rank waits for another is reported, if hang_timeout_s is
    0."""
    look_gap_s: float = 1.5
    """Time between the samples of one examination."""
    look_wait_s: float = 5.0
    """Limit for the nodes to answer; then a finding is made without those that have not."""
    look_again_s: float = 10.0
    """Time between the samples of a hang that was reported."""
    look_moving_s: float = 30.0
    """Time until the next examination if a rank moves, or no rank waits for another."""
    hang_grace_s: float = 3.0
    """Time from SIGTERM to SIGKILL after a hang. It is short, because a rank that hangs does not save."""
    straggler_window_s: float = 5.0
    """Minimum length of the windows over which steps are compared."""
    identical_failures_max: int = 8
    """Number of identical quick failures in a row that end the job, even if the budget allows more restarts."""

    def ping_interval_of(self, agents: int) -> float:
        """Time between two pings of an agent, in a job of this number of agents (s). Lease and fence do not depend on
        it."""
        return max(self.ping_interval_s, min(agents / self.pings_per_s_max, self.fence_s / PINGS_PER_FENCE))

    def suspend_of(self, agents: int) -> float:
        """Age of an agent's last acknowledged ping at which its supervisor suspends the workers that run in ht.survive,
        until another ping is acknowledged (s). 0: never, because pings are too rare in a job of this number of agents,
        or the fence is too short."""
        rare_s = PINGS_PER_SUSPENSION * agents / self.pings_per_s_max
        suspend_s = max(self.suspend_s, SUSPENSION_PER_FENCE * self.fence_s, rare_s)
        return suspend_s if suspend_s <= SUSPENSION_PER_FENCE_MAX * self.fence_s else 0.0

    @property
    def confirm_s(self) -> float:
        """Limit for a supervisor to confirm that it has killed or suspended the workers of a node without an answer
        (s). It may take twice as long if it only waits for a processor: also then the workers end before others go on
        without them."""
        return max(0.0, self.lease_s - self.fence_s) / 4

    def release_of(self, longest_step_s: float) -> float:
        """The limit `release_s`, extended by long steps (s): a call in the middle of a step cannot be interrupted."""
        return max(self.release_s, min(STEPS_PER_RELEASE * longest_step_s, self.drain_s))

    def regroup_of(self, longest_step_s: float) -> float:
        """The limit `regroup_s`, extended as much as that of a worker that waits for a processor (s)."""
        return self.regroup_s + RELEASES_PER_WORKER * (self.release_of(longest_step_s) - self.release_s)

    @property
    def safe_point_s(self) -> float:
        """Limit from an order to regroup at a safe point until all workers are there (s). No rank was lost, so they end
        their present step, however long it is. If one hangs in it, they are stopped as in every hang."""
        return max(self.drain_s, self.hang_timeout_s or inf)

    def short_lease_of(self, suspend_s: float) -> float:
        """Time of silence after which a member is lost whose workers are suspended after `suspend_s` (s). Between the
        two is half of the time between fence and lease."""
        return suspend_s + max(0.0, self.lease_s - self.fence_s) / 2

    def progress_interval_of(self, agents: int) -> float:
        """Time between two reports of an agent about the progress of its workers, in a job of this number of agents
        (s). It is shorter than hang_report_s: the steps of one rank alone show that a job does not hang. A report
        replaces the next ping."""
        longest_s = min(self.progress_interval_max_s, self.hang_report_s / PROGRESS_PER_HANG)
        return max(self.progress_interval_s, min(agents / self.progress_per_s_max, longest_s))


class NodeSpec(Struct, frozen=True, kw_only=True):
    """One node as its agent describes it to the coordinator."""

    member: str
    """Identity, used once: host name and a random number, e.g. `node7#5f3a90c1`."""
    host: str
    """Short host name, for users."""
    nproc: Workers
    role: str = "default"
    node_rank: Rank | None = None
    """The group rank that this node requests (binding with fixed_ranks); None: any."""
    local_addr: str | None = None
    switches: Switches = ()
    """The switches or blocks of the network above this node, the outermost first; empty: not known."""
    hosts_coordinator: bool = False
    versions: Words = {}
    """Versions that should be the same on all nodes: `python`, `holdfast`, `torch`, `cuda`, `nccl`, `script` (a hash).
    Empty: they could not be read."""

    @property
    def agent(self) -> str:
        """The agent with this identity, the same for all its joins: `node7#5f3a90c1` for `node7#5f3a90c1.2`."""
        return agent_of(self.member)

    @property
    def comes_again(self) -> bool:
        """Whether its agent has asked to join before, here or at an earlier coordinator."""
        return self.member != self.agent


def doubled(first_s: float, times: int, most_s: float) -> float:
    """A pause that doubles with each repetition: `first_s` doubled this often, `most_s` at most. What repeats may do so
    for days.

    >>> [doubled(0.2, times, 2.0) for times in (0, 1, 5, 5000)]
    [0.2, 0.4, 2.0, 2.0]
    """
    return min(first_s * 2.0 ** min(times, 64), most_s)


def agent_of(member: str) -> str:
    """The agent of a member: `node7#5f3a90c1` for `node7#5f3a90c1.2`."""
    host, mark, incarnation = member.rpartition("#")
    return host + mark + incarnation.partition(".")[0]
