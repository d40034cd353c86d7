"""Whether what is tracked fits what was saved, and what `resume()` restores of it.

Each rank compares what it has (`compare`); what all ranks have found is put together (`together`), so that every rank
restores the same and raises the same. Knows names and shapes; how a state is taken apart is in tracked.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import StateMismatchError
from holdfast.text import listed
from holdfast.train.agreement import Peers

NAMES_MAX = 8
"""Named in a message of each kind."""


@dataclass(frozen=True)
class Choice:
    """What `resume()` was asked for; see there."""

    strict: bool = True
    only: frozenset[str] | None = None
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, strict: bool, only: Iterable[str] | None, optional: Iterable[str]) -> Choice:
        """One name may be given as it is."""
        return cls(strict, None if only is None else _names(only), _names(optional))


def _names(given: Iterable[str]) -> frozenset[str]:
    return frozenset([given] if isinstance(given, str) else given)


@dataclass
class Compared:
    """The findings of one rank. Names of tensors are `<object>.<name>`."""

    wanted: frozenset[str] = frozenset()
    """Objects to restore."""
    held: set[str] = field(default_factory=set)
    """Names of all that is tracked here: what another rank of a pipeline has is not left over."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """By tracked object: what the snapshot lacks, the object itself or parts of it."""
    unexpected: list[str] = field(default_factory=list)
    """What the snapshot has and this rank does not."""
    problems: dict[str, str] = field(default_factory=dict)
    """By tracked object: why it does not fit."""


@dataclass(frozen=True)
class Fit:
    """What to restore; equal on all ranks."""

    restored: frozenset[str]
    """Objects."""
    missing: frozenset[str] = frozenset()
    """Tensors of them that keep the values that they have."""
    optional: frozenset[str] = frozenset()
    """Objects that keep their initial state when they refuse the saved one."""
    notes: tuple[str, ...] = ()
    """What is not as it was saved, for a warning."""


def together(peers: Peers, mine: Compared, choice: Choice) -> Fit:
    """Put all ranks' findings together; every rank calls it. StateMismatchError, on all ranks alike."""
    said = peers.share([mine.missing, mine.unexpected, mine.problems])
    missing: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    left: set[str] = set()
    for lacks, extra, wrong in said:
        for name, parts in lacks.items():
            missing[name] = sorted({*missing.get(name, ()), *parts})
        left |= set(extra)
        problems |= wrong
    if left:
        left = left.difference(*peers.share(sorted(left & mine.held)))
    unfit = {name for name in (*missing, *problems) if name in choice.optional}
    notes = [f"{name} is not restored: {problems.get(name) or _lacking(missing[name])}" for name in sorted(unfit)]
    lacking = [each for name, parts in sorted(missing.items()) if name not in unfit for each in parts]
    unexpected = sorted(each for each in left if each not in choice.optional)
    wrong = [problems[name] for name in sorted(problems) if name not in unfit]
    whole = [name for name, parts in missing.items() if name not in unfit and parts == [name]]
    if wrong or (choice.strict and (lacking or unexpected)):
        raise StateMismatchError(_mismatch(wrong, lacking, unexpected))
    if lacking:
        notes.append(f"not in the snapshot, and left as they are: {_few(lacking)}")
    if unexpected:
        notes.append(f"in the snapshot, and not tracked: {_few(unexpected)}")
    return Fit(mine.wanted - unfit - set(whole), frozenset(lacking), choice.optional, tuple(notes))


def _lacking(parts: Sequence[str]) -> str:
    return f"the snapshot lacks {_few(parts)}"


def _few(names: Sequence[str]) -> str:
    return listed(names, NAMES_MAX)


def _mismatch(wrong: Sequence[str], lacking: Sequence[str], unexpected: Sequence[str]) -> str:
    lines = [*wrong]
    if lacking:
        lines.append(f"tracked now, and not in the snapshot: {_few(lacking)}")
    if unexpected:
        lines.append(f"in the snapshot, and not tracked now: {_few(unexpected)}")
    return "\n".join(
        [
            *lines,
            "Track what was saved; or call resume(optional=[name, …]) to leave out these tracked objects where they do not fit,",
            "resume(only=[name, …]) to restore these alone, resume(strict=False) to restore what is on both sides.",
        ]
    )


def optimizer_problem(name: str, told: Mapping[str, Any], kind: str, defaults: Iterable[str], kinds: Any) -> str:
    """Why this optimizer cannot go on with that state; empty when it can, as far as its class is concerned."""
    was = kinds.get(name)
    if was is not None:
        return "" if was == kind else f"{name} is a {kind} now, and a {was} in the snapshot"
    # An older snapshot does not name the class. Options that only one side knows are another torch's; on both, another class.
    saved = {key for group in told["groups"] for key in group} - {"initial_lr"}
    now = set(defaults)
    if now - saved and saved - now:
        return (
            f"{name} is a {kind} now, and another optimizer in the snapshot: "
            f"that has the options {_few(sorted(saved - now))}, not {_few(sorted(now - saved))}"
        )
    return ""


def groups_problem(name: str, now: Sequence[Sequence[str]], then: Sequence[Sequence[str]]) -> str:
    """Why these parameter groups, given by names, are not those of the snapshot; empty when they are."""
    if [sorted(each) for each in now] == [sorted(each) for each in then]:
        return ""
    counted = f"{name} has other parameter groups than the one in the snapshot: {len(now)}, then {len(then)}"
    if len(then) > len(now) and [sorted(each) for each in then[: len(now)]] == [sorted(each) for each in now]:
        return f"{counted}; a group was added after training had begun: call add_param_group() before resume(), too"
    flat_now, flat_then = {each for group in now for each in group}, {each for group in then for each in group}
    if flat_now - flat_then:
        counted += f"; new: {_few(sorted(flat_now - flat_then))}"
    if flat_then - flat_now:
        counted += f"; gone: {_few(sorted(flat_then - flat_now))}"
    return counted
