"""The events of events.jsonl: every name, its fields with their units, and when it is written; docs/events.md is made of it.

Pure data and a check of records against it. Who writes a new event, or a new field, names it here: the tests hold every
record of every job against this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeGuard


class ValueKind(Enum):
    """What a value is in JSON, in the words of the page."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"
    FLAG = "true or false"
    TEXTS = "list of texts"
    WHOLES = "list of whole numbers"
    NUMBERS = "list of numbers"
    ITEMS = "list"
    TABLE = "object"


class Field(NamedTuple):
    name: str
    kind: ValueKind
    words: str
    """What it tells, with its unit."""
    optional: bool = False
    """Some of these events do not have it."""
    null: bool = False
    """It may be null."""


class EventKind(NamedTuple):
    name: str
    when: str
    fields: tuple[Field, ...] = ()


TEXT, WHOLE, NUMBER, FLAG = ValueKind.TEXT, ValueKind.WHOLE, ValueKind.NUMBER, ValueKind.FLAG
TEXTS, WHOLES, NUMBERS, ITEMS, TABLE = (
    ValueKind.TEXTS,
    ValueKind.WHOLES,
    ValueKind.NUMBERS,
    ValueKind.ITEMS,
    ValueKind.TABLE,
)

ALWAYS = (
    Field("time", NUMBER, "seconds since 1970, by this node's clock"),
    Field("monotonic", NUMBER, "seconds of this machine's clock that is never set: for differences"),
    Field("event", TEXT, "what happened"),
)
"""The fields of every record."""

FAULT = (Field("what", TEXT, "`examine`, `judge`, `look`, `status` …"), Field("error", TEXT, "the exception"))
GENERATION = Field("generation", WHOLE, "the number of the generation")
LOCAL_RANK = Field("local_rank", WHOLE, "the worker's place on this node")
RANK = Field("rank", WHOLE, "its rank in the job")
PID = Field("pid", WHOLE, "its process")
MEMBER = Field("member", TEXT, "`host#incarnation`: an agent, as the coordinator knows it")
REASON = Field("reason", TEXT, "why, in words")
WORDS = Field("text", TEXT, "the same, in words")
OUTCOME = (
    Field("kind", TEXT, "`succeeded`, `failed`, `preempted`, `signalled`, `refused` or `no_quorum`"),
    Field("exit_code", WHOLE, "of this command"),
)
END = (*OUTCOME, Field("text", TEXT, "why, in words: `ended by SIGTERM`; empty where a verdict says it"))
PHASE_FIELDS = tuple(
    Field(f"{name}_s", NUMBER, f"seconds of the phase {name}", optional=True)
    for name in ("detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step")
)

NODE = (
    EventKind(
        "begins",
        "the agent begins",
        (MEMBER, Field("run_id", TEXT, "the job"), Field("endpoint", TEXT, "where its nodes meet")),
    ),
    EventKind("fault", "holdfast itself failed on this node: it ends with exit code 70", (FAULT[1],)),
    EventKind("ended", "this node's part of the job is over: the last event but for what is dropped", END),
    EventKind(
        "claim",
        "it is decided whether the coordinator runs here",
        (Field("endpoint", TEXT, "HOST:PORT"), Field("host", FLAG, "it does"), REASON),
    ),
    EventKind(
        "elected",
        "this agent has won the election and is the coordinator (etcd, third parties)",
        (
            Field("address", TEXT, "where the others reach it, HOST:PORT"),
            Field("identity", TEXT, "of this term, used once"),
            Field("floor", WHOLE, "the last generation of the coordinator before"),
        ),
    ),
    EventKind("steps_down", "this agent is no longer the coordinator (etcd, third parties)", (REASON,)),
    EventKind(
        "linger_over",
        "the coordinator ends although some agents have not hung up",
        (Field("links", WHOLE, "how many"),),
    ),
    EventKind(
        "serving",
        "metrics and health are served from here (`--metrics`, `--health`)",
        (Field("what", TEXTS, "`metrics`, `health`"), Field("address", TEXT, "HOST:PORT")),
    ),
    EventKind(
        "preload",
        "what is to be imported once is decided (`modules`, `later`, `why`), or the nursery has told (`text`, `trouble`)",
        (
            Field("modules", TEXTS, "before the first worker is forked", optional=True),
            Field("later", TEXTS, "once the workers run", optional=True),
            Field("why", TEXT, "of this choice", optional=True),
            Field("text", TEXT, "what the nursery told", optional=True),
            Field("trouble", FLAG, "something is wrong: the workers are executed", optional=True),
        ),
    ),
    EventKind(
        "standby",
        "the next generation's workers stand parked",
        (Field("pids", WHOLES, "their processes"), Field("own_bytes", WHOLE, "memory that is theirs alone")),
    ),
    EventKind(
        "control",
        "`holdfast status` and the like cannot ask this agent, or do not find it",
        (Field("problem", TEXT, "why"),),
    ),
    EventKind(
        "insight_fault",
        "something that only watches or shows has a fault of its own; the job goes on",
        FAULT,
    ),
    EventKind("journal_dropped", "the disk was too slow", (Field("count", WHOLE, "so many events are missing here"),)),
)

WORK = (
    EventKind(
        "generation",
        "the workers of a generation are ordered to start on this node",
        (
            GENERATION,
            Field("restart_count", WHOLE, "restarts that were charged to the budget before it"),
            Field("group_rank", WHOLE, "this node's place among the nodes"),
            Field("group_world_size", WHOLE, "how many nodes"),
            Field("rank_base", WHOLE, "the rank of local rank 0"),
            Field("world_size", WHOLE, "how many ranks in the job"),
            Field("nproc", WHOLE, "how many of them on this node"),
            Field("master", TEXT, "MASTER_ADDR:MASTER_PORT"),
        ),
    ),
    EventKind("worker_started", "a worker runs", (GENERATION, LOCAL_RANK, RANK, PID)),
    EventKind(
        "worker_ended",
        "a worker's process is gone",
        (
            GENERATION,
            LOCAL_RANK,
            RANK,
            PID,
            Field("exit_code", WHOLE, "-N for signal N"),
            Field("stopped", FLAG, "it had been told to end"),
        ),
    ),
    EventKind(
        "worker_raised",
        "a worker's program raised an exception; its process still runs its exit functions",
        (GENERATION, LOCAL_RANK, RANK, PID),
    ),
    EventKind(
        "worker_failed",
        "what a worker left that raised an exception, or ended with something other than 0",
        (
            GENERATION,
            LOCAL_RANK,
            RANK,
            PID,
            Field("exit_code", WHOLE, "-N for signal N"),
            Field("error_type", TEXT, "the exception's class; empty when unknown"),
            Field("message", TEXT, "its message, the first line"),
            Field("error_file", TEXT, "where the whole of it is; may be empty"),
            Field("after_stop", FLAG, "a consequence of being stopped, never the cause"),
        ),
    ),
    EventKind(
        "phases",
        "once per generation, when its first step was seen or it ended: how long each part of its start took on this node",
        (
            GENERATION,
            Field("restart_count", WHOLE, "restarts that were charged to the budget before it"),
            *PHASE_FIELDS,
            Field("until_monotonic", NUMBER, "when the last of these phases ended, seconds as in `monotonic`"),
        ),
    ),
    EventKind(
        "progress",
        "every ten seconds while workers run, and at their end; each list is by local rank",
        (
            GENERATION,
            Field("rank_base", WHOLE, "the rank of the first"),
            Field("stages", TEXTS, "`starting`, `meeting`, `grouping`, `ready`, `stepping` or `done`"),
            Field("steps", WHOLES, "steps (or beats) of this generation so far"),
            Field("ages_s", NUMBERS, "seconds since the newest of them"),
            Field("own_s", NUMBERS, "seconds of all of them that each rank itself took, up to backward"),
            Field(
                "began_at",
                WHOLES,
                "the step of the whole job at which each began (`holdfast.worker.at_step`); -1: it does not say",
            ),
            Field("at", WHOLES, "the step of the whole job that each is at now; -1: it does not say"),
        ),
    ),
    EventKind("store_lost", "the generation's store has ended unasked", (GENERATION, Field("why", TEXT, "in words"))),
    EventKind("keeper_died", "the keeper was killed, and the workers with it; another one is started"),
    EventKind("unkillable", "processes that even SIGKILL does not end", (Field("pids", WHOLES, "these"),)),
)

AGENT = (
    EventKind("agent.link_lost", "the way to the coordinator broke", (REASON,)),
    EventKind("agent.resumed", "a new coordinator lets the workers go on", (GENERATION,)),
    EventKind(
        "agent.fenced",
        "this node was cut off too long: it stops its own workers",
        (Field("silent_s", NUMBER, "seconds without a word"),),
    ),
    EventKind("agent.fenced_by_keeper", "the same, done by the keeper because the agent stood still"),
)

ORDER = Field("order", TEXTS, "its members; ranks follow this order")

STRAGGLER = (
    Field("code", TEXT, "HF250: a rank, HF251: all ranks of a node"),
    Field("host", TEXT, "which"),
    Field("ranks", WHOLES, "which of it"),
    Field("own_s", NUMBER, "seconds of a step that they take themselves"),
    Field("peers_s", NUMBER, "the same of their peers, the median"),
    Field("step_s", NUMBER, "seconds of a whole step"),
)

COORDINATOR = (
    EventKind(
        "coordinator.joined",
        "an agent is a member",
        (MEMBER, Field("address", TEXT, "under which the others reach it"), Field("nproc", WHOLE, "its workers")),
    ),
    EventKind("coordinator.refused", "an agent was turned away", (MEMBER, REASON)),
    EventKind(
        "coordinator.nodes_differ",
        "an agent has other software than the first one; said once for each difference",
        (
            MEMBER,
            Field("what", TEXT, "`python`, `holdfast`, `torch`, `cuda`, `nccl` or `script`"),
            Field("text", TEXT, "both sides, in words"),
        ),
    ),
    EventKind("coordinator.gathering", "what the next generation waits for has changed", (REASON,)),
    EventKind(
        "coordinator.assigned",
        "a generation is formed and has ranks",
        (GENERATION, Field("world_size", WHOLE, "how many ranks"), ORDER),
    ),
    EventKind(
        "coordinator.resumed", "a new coordinator lets a generation go on that it did not form", (GENERATION, ORDER)
    ),
    EventKind(
        "coordinator.started",
        "every node is prepared, and the order to start is given",
        (GENERATION, Field("master", TEXT, "MASTER_ADDR:MASTER_PORT")),
    ),
    EventKind(
        "coordinator.workers_failed",
        "a node tells that workers of its own failed",
        (MEMBER, Field("ranks", WHOLES, "whose")),
    ),
    EventKind(
        "coordinator.leaving",
        "a node tells that it leaves",
        (MEMBER, REASON, Field("drain", FLAG, "its workers are to save first")),
    ),
    EventKind("coordinator.left", "a node has left as it had told", (MEMBER,)),
    EventKind(
        "coordinator.quit",
        "somebody wants the whole job to end (`holdfast stop`, `holdfast kill`)",
        (Field("drain", FLAG, "its workers are to save first"), Field("by", TEXT, "who")),
    ),
    EventKind(
        "coordinator.lost",
        "a member is given up",
        (MEMBER, REASON, Field("silent_s", NUMBER, "seconds since its last word")),
    ),
    EventKind(
        "coordinator.excluded",
        "a host was blamed too often and is shut out",
        (Field("host", TEXT, "which"), Field("for_s", NUMBER, "seconds")),
    ),
    EventKind(
        "coordinator.draining",
        "the workers are held at their next safe point, to agree where they stop",
        (GENERATION, Field("reason", TEXT, "`arrival`, `leaving` or `preempted`, for programs"), WORDS),
    ),
    EventKind(
        "coordinator.drain_to",
        "they have agreed",
        (GENERATION, Field("safe_point", WHOLE, "counted from 1, in this generation")),
    ),
    EventKind(
        "coordinator.stopping",
        "the end of a generation is ordered",
        (GENERATION, Field("reason", TEXT, "`worker_failed`, `member_lost`, `arrival` …, for programs"), WORDS),
    ),
    EventKind(
        "coordinator.verdict",
        "a generation has ended and another one will follow",
        (
            GENERATION,
            Field("cause", TEXT, "what failed first, in words"),
            Field("code", TEXT, "HF2xx or HF3xx"),
            Field("advice", TEXT, "what to do; may be empty"),
        ),
    ),
    EventKind(
        "coordinator.regrouping",
        "the next generation is awaited",
        (REASON, Field("not_before_s", NUMBER, "seconds of pause after failures")),
    ),
    EventKind(
        "coordinator.hang",
        "the job stands still, and it was looked where",
        (
            GENERATION,
            Field("kind", TEXT, "`hung` (somebody does not come), `stuck` (all wait in communication) or `paused`"),
            Field("code", TEXT, "HF24x; may be empty"),
            Field("text", TEXT, "the finding in words"),
            Field("culprits", WHOLES, "ranks"),
            Field(
                "groups",
                ITEMS,
                'who stands where: `{"ranks": [3], "place": "in time.sleep at data.py:17"}`, the odd ones first',
            ),
            Field("files", TABLE, "by rank: where its stacks are kept, on its node"),
            Field("still_s", NUMBER, "seconds since the newest step"),
        ),
    ),
    EventKind(
        "coordinator.hang_over",
        "a job that was told to hang makes steps again",
        (GENERATION, Field("still_s", NUMBER, "seconds without a step")),
    ),
    EventKind(
        "coordinator.look_unanswered",
        "nodes that did not tell in time where their workers stand",
        (GENERATION, Field("members", TEXTS, "these")),
    ),
    EventKind(
        "coordinator.fault",
        "the coordinator itself failed: every node ends with exit code 70",
        (FAULT[1],),
    ),
    EventKind("coordinator.insight_fault", "whoever examines hangs or judges failures has a fault of its own", FAULT),
    EventKind("coordinator.straggler", "ranks or a node are slower than their peers", (GENERATION, *STRAGGLER)),
    EventKind("coordinator.straggler_over", "they are not any more", (GENERATION, *STRAGGLER)),
    EventKind("coordinator.over", "the job is over", OUTCOME),
    EventKind("coordinator.concluded", "the same, when everybody was told", OUTCOME),
)

GROUPS: tuple[tuple[str, tuple[EventKind, ...]], ...] = (
    ("The agent", NODE),
    ("Workers of this node", WORK),
    ("What the agent decides", AGENT),
    ("What the coordinator decides: on its node alone", COORDINATOR),
)
EVENTS: dict[str, EventKind] = {kind.name: kind for _, kinds in GROUPS for kind in kinds}


def problems(record: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one record of events.jsonl, in words; nothing when it is as the table says."""
    kind = EVENTS.get(record.get("event", ""))
    if kind is None:
        yield f"unknown event {record.get('event')!r}"
        return
    fields = {field.name: field for field in (*ALWAYS, *kind.fields)}
    for name, value in record.items():
        field = fields.get(name)
        if field is None:
            yield f"{kind.name}: unknown field {name!r}"
        elif not (fits(value, field.kind) or (field.null and value is None)):
            yield f"{kind.name}: {name} is no {field.kind.value}: {value!r}"
    for name, field in fields.items():
        if name not in record and not field.optional:
            yield f"{kind.name}: no {name}"


def is_readable(record: object) -> TypeGuard[dict[str, Any]]:
    """Whether all that it has is of the table's kinds: then nobody who reads it meets a surprise, but that something is not
    there. It may have more, and be an event that another version knows."""
    if not isinstance(record, dict) or not isinstance(record.get("event"), str) or "time" not in record:
        return False
    kind = EVENTS.get(record["event"])
    return all(
        field.name not in record or fits(record[field.name], field.kind) or (field.null and record[field.name] is None)
        for field in (*ALWAYS, *(kind.fields if kind is not None else ()))
    )


def fits(value: object, kind: ValueKind) -> bool:
    """JSON's true is no number."""
    match kind:
        case ValueKind.TEXT:
            return isinstance(value, str)
        case ValueKind.WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        case ValueKind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ValueKind.FLAG:
            return isinstance(value, bool)
        case ValueKind.ITEMS:
            return isinstance(value, list)
        case ValueKind.TABLE:
            return isinstance(value, dict)
    part = {ValueKind.TEXTS: ValueKind.TEXT, ValueKind.WHOLES: ValueKind.WHOLE, ValueKind.NUMBERS: ValueKind.NUMBER}[
        kind
    ]
    return isinstance(value, list) and all(fits(each, part) for each in value)
