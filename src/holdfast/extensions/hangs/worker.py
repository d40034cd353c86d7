"""Answers from within a worker which collectives torch's flight recorder has: the one it is in, and the last one done.

Loaded by the bootstrap, by its path, when the program has its process group. A thread waits for the agent's questions,
since the main thread may wait in a collective for ever. It needs the interpreter's lock, which torch does not hold in
such a wait. A worker that keeps the lock, or is stopped, does not answer.

torch itself can answer without the lock, by the handler `fr_trace_json` of its `_WorkerServer`. That server starts a
thread for each core in every worker, and a worker that may start no more threads is ended by it: no observer may do so.

From torch 2.15 on the recorder has the collectives of every backend. gloo writes its own; `FlightRecorderHook` does it
for those that have no recorder. The private names of torch that are used here: `_dump_fr_trace_json`,
`_dump_nccl_trace_json` (for the older NCCL backend) and `distributed_c10d._world`.

A question is four bytes in a pipe of ours, the answer one line of JSON in the agent's file for stacks:

    {"number": 7, "collectives": [["default_pg", 812, "all_reduce", "[4096] float32", false, false, []]], "handles": ""}

The last item of a collective is the ranks of its group, as spans of first rank, last rank and step; empty: all ranks.
It also has the exception that the main thread handles, as `ValueError: bad row 17, raised at train.py:30`. A rank that
calls a collective in an `except` waits in C++, where no signal's handler of Python runs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.protocol import board_layout as layout  # noqa: TC004 - the bootstrap puts it here

MARK_OF_2_15 = "FlightRecorderHook"
"""A name that torch has since every backend's collectives are recorded."""
QUESTIONS_MAX = 64
"""Number of questions that are answered by one answer, if they came at once."""
GROUPS_MAX = 8
"""Number of process groups in an answer: those with the newest collectives."""
NEWEST_MAX = 8
"""Number of a group's newest collectives that are recorded when the program raises."""
TENSORS_MAX = 3
"""Number of tensors of a collective that are described."""
SPANS_MAX = 8
"""Number of spans that describe the ranks of a group; one that needs more is taken for one of all ranks. The dimensions
of a device mesh need one each."""
TEXT_MAX = 80
TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""torch's own names for types whose name in C++ is another one."""


class Recorder:
    """The recorders of this process. Writing out 2,000 collectives takes a tenth of a second: it is done again only if
    the counts of the groups have changed."""

    def __init__(self, c10d: Any) -> None:
        """`c10d` is torch.distributed.distributed_c10d."""
        self._c10d = c10d
        self._native: Any = sys.modules.get("torch._C._distributed_c10d")
        self._since_ns = 0
        """The time at which the default group was made (epoch ns)."""
        self._seen: set[str] = set()
        """The recorders of all default groups so far: a program may destroy them before its exception is recorded."""
        self._counts = ""
        self._found: list[list[Any]] = []

    def begin_group(self) -> None:
        """There is a new default group. What an earlier one had not done was given up with it."""
        self._since_ns = time.time_ns()  # the clock of the entries
        if not hasattr(self._native, MARK_OF_2_15):
            return
        try:
            seen = self._backends()
        except Exception:  # noqa: BLE001 - names of torch that may change: this is a call of the program's
            return
        self._seen.update(seen)

    def serve(self, agents_files: str, words: memoryview, slot: int) -> None:
        """Begin to answer. `agents_files` is the folder with the agent's open files in /proc. Does nothing with a torch
        that does not record every backend, or if the agent is gone."""
        import _thread

        if not hasattr(self._native, MARK_OF_2_15) or not words[slot + layout.STACKS]:
            return
        try:
            answers = os.open(f"{agents_files}/{words[slot + layout.STACKS]}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            questions, asks = os.pipe2(os.O_CLOEXEC)
            # No Thread: a program may count those of the module threading.
            _thread.start_new_thread(self._answer, (questions, answers))
        except (OSError, RuntimeError):
            return
        words[slot + layout.RECORDER_PIPE] = os.fstat(asks).st_ino
        words[slot + layout.RECORDER] = asks

    def _answer(self, questions: int, answers: int) -> None:
        while asked := os.read(questions, QUESTIONS_MAX * layout.QUESTION_BYTES):
            number = int.from_bytes(asked[-layout.QUESTION_BYTES :], sys.byteorder)
            try:
                found = self.collectives()
            except Exception:  # noqa: BLE001 - names of torch that may change: the agent gets no collectives
                found = []
            answer = {"number": number, "collectives": found, "handles": _handled()}
            try:
                # An exception's text may have bytes of a file name, as surrogates, which the agent's decoder refuses.
                os.write(answers, json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")
            except OSError:
                return  # the agent is gone

    def collectives(self) -> list[list[Any]]:
        """Read the oldest collective that is not done, and the newest that is, of each group."""
        backends = self._backends()
        counts = json.dumps([self._dump(each, False).get("pg_status") for each in backends])
        if counts != self._counts:
            entries = [(each, entry) for each in backends for entry in self._dump(each, True).get("entries", ())]
            since = [each for each in entries if each[1]["time_created_ns"] >= self._since_ns]
            self._found = _of_groups(since, self._members())
            self._counts = counts
        return self._found

    def newest(self) -> list[list[Any]]:
        """Read the newest collectives of each group, the oldest of them first: where the ranks are compared after an
        exception, some have gone on. Empty with a torch that does not record every backend."""
        if not hasattr(self._native, MARK_OF_2_15):
            return []
        backends = sorted(self._seen.union(self._backends()))
        entries = [(each, entry) for each in backends for entry in self._dump(each, True).get("entries", ())]
        members = self._members()
        groups: dict[str, list[list[Any]]] = {}
        for backend, entry in sorted(entries, key=lambda each: each[1]["time_created_ns"]):
            if entry["time_created_ns"] >= self._since_ns:
                group = _group_of(entry)
                described = _described(group, entry, _is_done(backend, entry))
                groups[group] = [*groups.pop(group, []), [*described, members.get(entry["process_group"][0], [])]]
        newest = list(groups.values())[::-1][: GROUPS_MAX // 2]
        return [each for group in newest for each in group[-NEWEST_MAX:]]

    def _members(self) -> dict[str, list[list[int]]]:
        """The ranks of each group that has not all of them, by the group's name."""
        world = self._c10d._world
        ranks_of, names = dict(getattr(world, "pg_group_ranks", {})), dict(getattr(world, "pg_names", {}))
        all_ranks = max(map(len, ranks_of.values()), default=0)
        found = {names.get(group, ""): _spans(sorted(of)) for group, of in ranks_of.items() if len(of) < all_ranks}
        return {name: spans for name, spans in found.items() if len(spans) <= SPANS_MAX}

    def _backends(self) -> list[str]:
        """The recorders that may have something: `nccl` is recorded as nccl2, or by its own recorder."""
        configured = map(str, self._c10d._world.pg_backend_config.values())
        names = {part.rpartition(":")[2] for text in configured for part in text.split(",")}
        return sorted(names | ({"nccl2"} if "nccl" in names else set()))

    def _dump(self, backend: str, entries: bool) -> dict[str, Any]:
        text = self._native._dump_fr_trace_json(entries, False, backend)
        if backend in ("nccl", "nccl-legacy"):
            own = getattr(self._native, "_dump_nccl_trace_json", None)
            recorded = json.loads(own(entries, False)) if own is not None else {}
            if recorded.get("pg_status"):
                return dict(recorded)
        return dict(json.loads(text))


def _handled() -> str:
    """The exception that the main thread handles, and where it was raised; empty: it handles none."""
    try:
        found: Any = sys._current_exceptions()  # a worker's Python may be older than 3.11 and lack it
        error = found.get(threading.main_thread().ident)
        error = error[1] if isinstance(error, tuple) else error  # Python 3.11 has tuples, as sys.exc_info() has
        if error is None:
            return ""
        text = " ".join(f"{type(error).__name__}: {error}".split())[: layout.HANDLED_CHARACTERS_MAX]
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file = trace.tb_frame.f_code.co_filename if trace is not None else ""
        return f"{text}, raised at {os.path.basename(file)}:{trace.tb_lineno}" if trace is not None else text
    except Exception:  # noqa: BLE001 - the program's own __str__ may do anything
        return ""


def _spans(ranks: list[int]) -> list[list[int]]:
    """These ranks, which are in order, as spans of first rank, last rank and step."""
    spans: list[list[int]] = []
    for rank in ranks:
        newest = spans[-1] if spans else None
        if newest is not None and newest[0] == newest[1]:
            newest[1:] = [rank, rank - newest[0]]
        elif newest is not None and rank - newest[1] == newest[2]:
            newest[1] = rank
        else:
            spans.append([rank, rank, 1])
    return spans


def _of_groups(entries: list[tuple[str, dict[str, Any]]], members: dict[str, list[list[int]]]) -> list[list[Any]]:
    """Keep of each group the oldest collective that is not done, and the newest that is; the newest group is first."""
    groups: dict[str, dict[bool, list[Any]]] = {}
    newest: dict[str, int] = {}
    ids: dict[str, int] = {}
    for backend, entry in sorted(entries, key=lambda each: each[1]["time_created_ns"]):
        group = _group_of(entry)
        done = _is_done(backend, entry)
        if ids.setdefault(group, entry["pg_id"]) != entry["pg_id"]:
            groups[group], ids[group] = {}, entry["pg_id"]  # another group with the name of one that was destroyed
        of_group = groups.setdefault(group, {})
        newest[group] = entry["time_created_ns"]
        if done or done not in of_group:
            of_group[done] = [*_described(group, entry, done), members.get(entry["process_group"][0], [])]
    order = sorted(groups, key=lambda group: -newest[group])[:GROUPS_MAX]
    return [groups[group][done] for group in order for done in (False, True) if done in groups[group]]


def _group_of(entry: dict[str, Any]) -> str:
    name, description = map(str, entry["process_group"])
    if description == "default_pg":
        return description
    return f"{name} {'' if description == 'undefined' else description}".strip()  # torch's word for no description


def _is_done(backend: str, entry: dict[str, Any]) -> bool:
    """gloo has no events that show the state: its entries are retired when the operation is done. An entry of another
    backend may be retired because it has timed out."""
    return entry["state"] == "completed" or (backend == "gloo" and bool(entry["retired"]))


def _described(group: str, entry: dict[str, Any], done: bool) -> list[Any]:
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors = _tensors(entry["input_sizes"], entry["input_dtypes"])
    return [group[:TEXT_MAX], number, operation[:TEXT_MAX], tensors[:TEXT_MAX], done, bool(entry["is_p2p"])]


def _tensors(sizes: list[list[int]], types: list[str]) -> str:
    """`[4096] float32`; `[4] float32, [2, 3] float32 and 7 more`."""
    each = [
        f"[{', '.join(map(str, size))}] {TYPES.get(kind, kind.lower())}"
        for size, kind in zip(sizes, types, strict=False)
    ]
    more = f" and {len(each) - TENSORS_MAX} more" if len(each) > TENSORS_MAX else ""
    return ", ".join(each[:TENSORS_MAX]) + more
