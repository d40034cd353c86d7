"""What a job is and how patient holdfast is with it: plain data, fixed before the job starts."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from holdfast.protocol.bounds import Rank, Words, Workers


class Grow(Enum):
    """What a node that arrives at a running job does to it (--grow)."""

    NOW = "now"
    """The job is regrouped at once, as torchrun does."""
    DRAIN = "drain"
    """The job is regrouped at the next safe point; at once where the workers ask for none."""
    NEVER = "never"
    """It stands by until the job is regrouped for another reason."""


class JobSpec(Struct, frozen=True, kw_only=True):
    """What all nodes of a job must agree on; source: the command line."""

    run_id: str
    min_nodes: int
    max_nodes: int
    backend: str
    max_restarts: int = 0
    fixed_ranks: bool = False
    """Static rendezvous: exactly max_nodes nodes, each at the group rank it names."""
    grow: Grow = Grow.DRAIN
    exclude_after: int = 0
    """A host blamed so often is excluded for a while (--exclude-after); 0: never."""
    requeues: int = 0
    """How often a scheduler has started this job anew: what is left alive of an earlier life is not let in."""


class Limits(Struct, frozen=True, kw_only=True):
    """Every wait of the control plane. Seconds unless the name says otherwise."""

    join_s: float = 600.0
    """From start until min_nodes are there (rdzv-conf join_timeout; static: timeout)."""
    settle_s: float = 2.0
    """With min_nodes or more: quiet time after the newest arrival before the world is formed."""
    last_call_s: float = 30.0
    """With min_nodes or more: never wait longer than this for more (rdzv-conf last_call_timeout)."""
    gather_s: float = 0.5
    """Arrivals at a running job are gathered this long before it is regrouped for them."""
    lease_s: float = 6.0
    """A member silent for this long is lost, by the coordinator's clock."""
    unjoined_s: float = 15.0
    """A link on which no agent has asked to join for so long is dropped; an honest one asks at once, or when its workers
    are gone, which is a fence after its last coordinator."""
    fence_s: float = 4.0
    """An agent whose last acknowledged ping is older than this kills its workers, by its own clock."""
    ping_interval_s: float = 1.0
    kill_s: float = 0.5
    """SIGKILL to nothing left, on a machine that is not in trouble."""
    prepare_s: float = 30.0
    """Phase one (store bound, folders made) must end within this on every node."""
    drain_s: float = 60.0
    """From the wish to drain until every worker has left at its safe point (--drain-timeout)."""
    stop_grace_s: float = 30.0
    """SIGTERM to SIGKILL (--shutdown-timeout)."""
    stop_slack_s: float = 15.0
    """Added to the grace before the coordinator gives up on a member that does not report Stopped."""
    connect_retry_s: float = 0.1
    """First pause between attempts to reach the coordinator; doubles up to connect_retry_max_s."""
    connect_retry_max_s: float = 0.5
    say_interval_s: float = 5.0
    """How often somebody who waits is told for what."""
    backoff_first_s: float = 0.25
    """Pause before the second quick restart in a row (the first is immediate); doubles."""
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0
    """A generation that ran this long ends a streak of quick failures."""
    flap_s: float = 1.0
    """A node lost so soon after its workers were started, or before, strikes its host."""
    flap_first_s: float = 2.0
    """From the second strike in a row a host's agents must stay this long before others are regrouped for them; doubles."""
    flap_max_s: float = 60.0
    exclude_first_s: float = 60.0
    """How long the first exclusion of a host lasts; each later one doubles."""
    exclude_max_s: float = 3600.0
    progress_interval_s: float = 1.0
    """How often an agent tells how far its workers are."""
    hang_report_s: float = 12.0
    """No rank has made a step for so long, nor for hang_steps steps: every worker is looked at (rdzv-conf hang_report). The
    looks last some 4 s, so that a hang is reported after about 15 s."""
    hang_steps: int = 20
    """Steps, each as long as the median."""
    hang_report_max_s: float = 300.0
    """All these steps together count for at most so long, or for three of them (rdzv-conf hang_report_max)."""
    slow_report_s: float = 60.0
    """The same as hang_report_s for what may only be slow: the first steps, data, rank 0 for which all wait in a barrier, the
    rank that is left when all others have ended."""
    hang_timeout_s: float = 300.0
    """Nobody has moved for so long, by looks at all stacks: the generation is ended (--hang-timeout); 0: never."""
    pause_report_s: float = 300.0
    """The same where hang_timeout_s is 0, for telling of a job in which nobody waits for anybody."""
    look_gap_s: float = 1.5
    """Between the looks of one examination."""
    look_wait_s: float = 5.0
    """A node that has not answered a look by then is told of without."""
    look_again_s: float = 10.0
    """Between the looks at a hang that was reported."""
    look_moving_s: float = 30.0
    """Until the next examination when somebody moves, or nobody waits for anybody."""
    hang_grace_s: float = 3.0
    """SIGTERM to SIGKILL after a hang: who hangs does not save."""
    straggler_window_s: float = 5.0
    """Steps are compared over windows of at least so long."""
    identical_failures_max: int = 8
    """So many identical quick failures in a row end the job whatever the budget says."""


class NodeSpec(Struct, frozen=True, kw_only=True):
    """What one agent brings to the job."""

    member: str
    """Identity, used once: host name and a random incarnation, e.g. `node7#5f3a90c1`."""
    host: str
    """Short host name, for people."""
    nproc: Workers
    role: str = "default"
    node_rank: Rank | None = None
    """The group rank this node wishes for (binding with fixed_ranks); None: no wish."""
    local_addr: str | None = None
    hosts_coordinator: bool = False
    versions: Words = {}
    """Of what should be the same on all nodes: `python`, `holdfast`, `torch`, `cuda`, `nccl`, `script` (a hash).
    Empty: it could not look."""

    @property
    def agent(self) -> str:
        """Who is behind this identity, the same for all its joins: `node7#5f3a90c1.2` is `node7#5f3a90c1` again."""
        host, mark, incarnation = self.member.rpartition("#")
        return host + mark + incarnation.partition(".")[0]
