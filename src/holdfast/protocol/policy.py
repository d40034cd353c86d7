"""What all parts of the control plane share: bounds of the numbers in messages, the definition of a job and its time
limits, which are fixed before the job starts, and an event, a command and growing pauses of both machines. PURE.

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
"""COUNT_MAX + 1 still fits into every message and into the 64 bits of a board's word."""
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
"""Neither NaN nor infinite."""
Period: TypeAlias = Annotated[float, Meta(ge=0.001, le=SECONDS_MAX)]
"""Interval of something periodic."""
ExitCode: TypeAlias = Annotated[int, Meta(ge=-1024, le=EXIT_CODE_MAX)]
Words: TypeAlias = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]


class Tick(Struct, frozen=True):
    """Event: a deadline given by next_deadline() has passed."""


class Note(Struct, frozen=True):
    """Command: write a decision and its reason into the journal."""

    event: str
    fields: dict[str, object]


PINGS_PER_FENCE = 2
PINGS_PER_SUSPENSION = 3
SUSPENSION_PER_FENCE = 0.375
SUSPENSION_PER_FENCE_MAX = 0.75
PROGRESS_PER_HANG = 1.2
STEPS_PER_RELEASE = 2.0
RELEASES_PER_WORKER = 2.0
"""So many times its limit a worker may take to leave its generation, if it only waits for a processor."""
GROWTH = 2.0
PAUSE_S_MAX = 60.0


@dataclass(slots=True)
class Pauses:
    """Times at which a wait is reported again: soon at first, then after growing pauses."""

    first_s: float
    at_s: float
    """When the next report is due."""
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
    """What happens when a node joins a running job (--grow)."""

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
    """With fewer ranks than this the workers do not go on without the lost ones (--min-ranks)."""
    requeues: int = 0
    """How often a scheduler has requeued this job. Agents of an earlier start are refused."""


class Limits(Struct, frozen=True, kw_only=True):
    """Every wait of the control plane. Seconds unless the name says otherwise."""

    join_s: float = 600.0
    """From start until min_nodes are there (rdzv-conf join_timeout; static: timeout)."""
    settle_s: float = 2.0
    """With min_nodes or more: quiet time after the newest arrival before the world is formed."""
    last_call_s: float = 30.0
    """With min_nodes or more: maximum wait for more nodes (rdzv-conf last_call_timeout)."""
    gather_s: float = 0.5
    """Arrivals at a running job are gathered this long before it is regrouped for them."""
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
    """Of all agents together, as long as each sends PINGS_PER_FENCE in fence_s."""
    renew_interval_s: float = 0.5
    """How often the coordinator renews its authority with its voters."""
    prove_s: float = 1.0
    """Between two attempts to prove that the process of a voter without a link has ended."""
    kill_s: float = 0.5
    """From SIGKILL until all processes are gone, on a healthy machine."""
    prepare_s: float = 30.0
    """Phase one (store bound, folders made) must end within this on every node."""
    drain_s: float = 60.0
    """From the start of a drain until every worker has left at its safe point (--drain-timeout)."""
    stop_grace_s: float = 30.0
    """SIGTERM to SIGKILL (--shutdown-timeout)."""
    stop_slack_s: float = 15.0
    """Added to the grace before the coordinator gives up on a member that does not report Stopped."""
    connect_retry_s: float = 0.1
    """First pause between attempts to reach the coordinator; doubles up to connect_retry_max_s."""
    connect_retry_max_s: float = 0.5
    stand_s: float = 0.05
    """A voter stands for election this long after the loss of the coordinator, times its place among the voters."""
    stand_again_s: float = 0.2
    """From an election without a winner until a voter stands again; doubles. Those placed later wait longer."""
    stand_again_max_s: float = 2.0
    elect_s: float = 30.0
    """For so long after the loss of the coordinator a voter joins no other one that founded the job again, unless a
    majority of the voters is known to have ended."""
    poll_s: float = 1.0
    """A voter that has not answered a candidate within this time has denied its vote."""
    say_interval_s: float = 5.0
    """How often the reason of a wait is shown."""
    backoff_first_s: float = 0.25
    """Pause before the second quick restart in a row (the first is immediate); doubles."""
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0
    """A generation that ran this long ends a streak of quick failures."""
    flap_s: float = 1.0
    """A node lost within this time of the start of its workers, or before, counts as a quick loss of its host."""
    flap_first_s: float = 2.0
    """From the second quick loss in a row on: how long a host's agents must be members before the others are regrouped
    for them; doubles."""
    flap_max_s: float = 60.0
    exclude_first_s: float = 60.0
    """How long the first exclusion of a host lasts; each later one doubles."""
    exclude_max_s: float = 3600.0
    release_s: float = 2.0
    """After a loss: from the order to regroup until every worker has left its collective; then it is killed. Where
    steps are long, see `release_of`. One that waits for a processor has up to twice as long."""
    regroup_s: float = 5.0
    """After a loss: from the order to regroup until every node is prepared; then all workers are stopped and started
    again. Where steps are long, see `regroup_of`."""
    rejoin_s: float = 30.0
    """From the order to go on until every worker trains again in the new generation; then all are stopped and started
    again."""
    suspended_s: float = 5.0
    """A worker in ht.survive that is suspended (SIGSTOP) for this long, while another worker of its node runs, is
    killed and replaced."""
    progress_interval_s: float = 1.0
    """See `progress_interval_of`."""
    progress_interval_max_s: float = 10.0
    """In the largest jobs."""
    progress_per_s_max: int = 100
    """Reports of all agents together, up to progress_interval_max_s."""
    hang_report_s: float = 12.0
    """Without a step of any rank for this long, and for hang_steps steps, all workers are sampled (rdzv-conf
    hang_report). Sampling takes some 4 s, so a hang is reported after about 15 s."""
    hang_steps: int = 20
    """Number of steps, each as long as the median, without which an examination starts."""
    hang_report_max_s: float = 300.0
    """Limit of the time of these steps together, but at least three of them (rdzv-conf hang_report_max)."""
    slow_report_s: float = 60.0
    """As hang_report_s, for ranks that may only be slow: they come late to the process group. Also the time between two
    examinations before the first step, and the longest time between two steps that counts as training."""
    hang_timeout_s: float = 300.0
    """The generation is ended when all samples show no movement for this long (--hang-timeout); 0: never."""
    pause_report_s: float = 300.0
    """If hang_timeout_s is 0: after this time without movement a job in which no rank waits for another is reported."""
    look_gap_s: float = 1.5
    """Between the samples of one examination."""
    look_wait_s: float = 5.0
    """After this time a finding is made without the nodes that have not answered."""
    look_again_s: float = 10.0
    """Between the samples of a hang that was reported."""
    look_moving_s: float = 30.0
    """Until the next examination if a rank moves, or no rank waits for another."""
    hang_grace_s: float = 3.0
    """SIGTERM to SIGKILL after a hang. Short, because a rank that hangs does not save."""
    straggler_window_s: float = 5.0
    """Minimum length of the windows over which steps are compared."""
    identical_failures_max: int = 8
    """This many identical quick failures in a row end the job, even if the budget allows more restarts."""

    def ping_interval_of(self, agents: int) -> float:
        """How often each of so many agents sends a ping, in seconds. Lease and fence do not depend on it."""
        return max(self.ping_interval_s, min(agents / self.pings_per_s_max, self.fence_s / PINGS_PER_FENCE))

    def suspend_of(self, agents: int) -> float:
        """In a job of so many agents: when an agent's last acknowledged ping is this old, in seconds, its supervisor
        suspends the workers that run in ht.survive, until another ping is acknowledged. 0: never, because pings are too
        rare in a job of this size, or the fence is too short."""
        rare_s = PINGS_PER_SUSPENSION * agents / self.pings_per_s_max
        suspend_s = max(self.suspend_s, SUSPENSION_PER_FENCE * self.fence_s, rare_s)
        return suspend_s if suspend_s <= SUSPENSION_PER_FENCE_MAX * self.fence_s else 0.0

    @property
    def confirm_s(self) -> float:
        """How long a supervisor may take to confirm that it has killed or suspended the workers of a node without an
        answer, in seconds. With as much time again, if it only waits for a processor, the workers end before others go
        on without them."""
        return max(0.0, self.lease_s - self.fence_s) / 4

    def release_of(self, longest_step_s: float) -> float:
        """As `release_s` where a step has taken so long: a call in the middle of it cannot be interrupted."""
        return max(self.release_s, min(STEPS_PER_RELEASE * longest_step_s, self.drain_s))

    def regroup_of(self, longest_step_s: float) -> float:
        """As `regroup_s`: longer by as much as a worker that waits for a processor may take longer."""
        return self.regroup_s + RELEASES_PER_WORKER * (self.release_of(longest_step_s) - self.release_s)

    @property
    def safe_point_s(self) -> float:
        """From an order to regroup at a safe point until all workers are there: nobody was lost, so they end the step
        at which they are, however long it is. If one hangs in it, they are stopped as in every hang."""
        return max(self.drain_s, self.hang_timeout_s or inf)

    def short_lease_of(self, suspend_s: float) -> float:
        """A member whose workers are suspended after this time may be lost after so many seconds of silence. Between
        the two is half of the time between fence and lease."""
        return suspend_s + max(0.0, self.lease_s - self.fence_s) / 2

    def progress_interval_of(self, agents: int) -> float:
        """How often each of so many agents reports the progress of its workers, in seconds. Shorter than hang_report_s:
        the steps of one rank alone show that a job does not hang. A report takes the place of the next ping."""
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
    hosts_coordinator: bool = False
    versions: Words = {}
    """Versions that should be the same on all nodes: `python`, `holdfast`, `torch`, `cuda`, `nccl`, `script` (a hash).
    Empty: they could not be read."""

    @property
    def agent(self) -> str:
        """The agent with this identity, the same for all its joins: `node7#5f3a90c1` for `node7#5f3a90c1.2`."""
        return agent_of(self.member)


class HeldStates(Struct, frozen=True, array_like=True):
    """States in memory that a node's saver gives to other nodes (train/snapshots/copy_service.py)."""

    host: str
    """The node's addresses, separated by blanks."""
    port: Port
    word: str
    """Of the life of the job that left them: the saver's key comes from it."""
    folder: str
    """Of the snapshots."""
    world: Rank
    """Ranks of the job in that life."""
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=2 * WORKERS_PER_NODE_MAX)]
    """Its own, and those of which it has copies."""


def agent_of(member: str) -> str:
    """`node7#5f3a90c1` for `node7#5f3a90c1.2`."""
    host, mark, incarnation = member.rpartition("#")
    return host + mark + incarnation.partition(".")[0]
