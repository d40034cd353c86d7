"""Compares the replicas of a model while it trains, and names the rank that differs: `ht.check_replicas`.

A bit that has flipped in the memory of one rank, or a rank that changes its model alone, gives no error: the losses of
all ranks are wrong from then on. So every few hundred steps each rank makes a digest of its parameters, optimizer state
and constant buffers (replicas.py), and rank 0 compares them, by messages over the job's store. Only if they differ are
digests of single tensors exchanged, which name the first one.

**When.** A check comes at the beginning of an optimizer's step: what the step before has left is complete, whatever the
program did after it, and all ranks have just met in the exchange of the gradients, so that they hardly wait for each
other. Each rank counts the steps by itself, from the same beginning, and the messages carry the number: what is
compared is the state after the same step. A rank that comes late is waited for SILENCE_S, and then training goes on
without a comparison.

**What.** Only what has to be equal. Of a sharded tensor the parts that several ranks hold are compared; what is on one
rank only is not. A buffer is compared while the program does not change it: those of BatchNorm belong to each rank.
So it is compared after a check in which it was equal on all ranks, and what it was before, until torch counts a change
of it, or until most ranks have another value. (torch 2.13 does not count DDP's broadcast of buffers.)

Knows torch's modules and optimizers, and how ranks exchange messages. Knows no snapshots.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.protocol.errors import (
    HoldfastError,
    IntervalError,
    ProcessGroupError,
    ReplicasDifferError,
    SnapshotIncompleteError,
)
from holdfast.train import replicas, torch_private
from holdfast.train.agreement import Peers

EVERY_STEPS = 500
"""Optimizer steps from one check to the next. The first one comes after the first step."""
SILENCE_S = 10.0
"""The ranks wait this long for each other in a check."""
SILENT_MAX = 3
"""Limit of the checks in a row in which a rank is silent: after that there are no more of them."""
KEY_BYTES = 8
_version = torch_private.version
NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of a parameter's name that come from torch.compile and activation checkpointing."""


class ReplicaAction(Enum):
    """The reaction to replicas that differ."""

    EXIT = "exit"
    """All ranks raise ReplicasDifferError."""
    REPORT = "report"
    """A warning on each node."""
    REPAIR = "repair"
    """The ranks that differ take the state of the majority, with a warning. Without a majority all ranks raise."""


# --- the tensors of one replica ---------------------------------------------------------------------------------------


class Kind(Enum):
    """The kinds of tensors, in the order in which differences are named."""

    PARAMETERS = 0
    OPTIMIZER = 1
    BUFFERS = 2


@dataclass(frozen=True)
class Section:
    """Tensors of one kind that are compared together."""

    key: str
    """Equal on ranks that hold the same parts of the same tensors; it begins with the number of the kind."""
    tensors: dict[str, torch.Tensor]
    """The tensors by name, in the order of the model."""

    def digest(self) -> str:
        """One digest of all of them."""
        return replicas.total(list(self.tensors.values()))


@dataclass
class _Buffer:
    """The facts about a buffer that the last check has found."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    """torch's count of changes."""
    digest: str
    equal: bool = False
    """Whether it was equal on all ranks, and had not changed since the check before."""

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether this is the same tensor, and torch has counted no change."""
        return self.tensor() is tensor and self.version == _version(tensor)


class Replica:
    """This rank's replica of a model, with the state of the optimizers that step it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._buffers: dict[str, _Buffer] = {}
        self._constant: tuple[str, str] = ("", "")
        """Key and digest of the constant buffers after the last check."""
        self.checked()

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    def sections(self, optimizers: Sequence[Optimizer]) -> list[Section]:
        """All that has to be equal now, in the order in which differences are named."""
        model = self._model()
        if model is None:
            return []
        ignored = _ignored(model)
        names = {each: name for name, each in _inner(model).named_parameters() if id(each) not in ignored}
        parameters = {f"model.{_plain(name)}": each.detach() for each, name in names.items()}
        moments = {
            f"optimizer.state.{_plain(names[parameter])}.{what}": value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in names
            for what, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        return [
            *_sections_of(Kind.PARAMETERS, parameters),
            *_sections_of(Kind.OPTIMIZER, moments),
            *_sections_of(Kind.BUFFERS, self._constant_buffers()),
        ]

    def stays(self, key: str, digest: str) -> bool:
        """Whether this section of buffers is what it was in the last check."""
        return self._constant == (key, digest)

    def candidates(self) -> dict[str, str]:
        """Digests of the buffers that are what they were in the last check, and of which it is not known whether they
        are equal on all ranks, by name."""
        found = {}
        for name, each in self._named_buffers():
            known = self._buffers.get(name)
            if known is not None and known.is_still(each) and not known.equal:
                (digest,) = replicas.each_digest([each])
                if digest == known.digest:
                    found[name] = digest
        return found

    def checked(self, equal: Sequence[str] = (), other: Sequence[str] = ()) -> None:
        """Note the end of a check. The buffers named in `equal` are equal on all ranks, those in `other` are not."""
        for name, each in self._named_buffers():
            known = self._buffers.get(name)
            if known is not None and known.is_still(each) and (known.equal or name in equal):
                known.equal = name not in other
            else:
                (digest,) = replicas.each_digest([each])
                self._buffers[name] = _Buffer(weakref.ref(each), _version(each), digest)
        self._constant = ("", "")
        for section in _sections_of(Kind.BUFFERS, self._constant_buffers()):
            self._constant = (section.key, section.digest())

    def renew(self) -> None:
        """Forget which buffers were equal: the ranks are others."""
        for each in self._buffers.values():
            each.equal = False
        self._constant = ("", "")

    def _constant_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that were equal on all ranks, and that the program does not change."""
        found = {}
        for name, each in self._named_buffers():
            known = self._buffers.get(name)
            if known is not None and known.equal and known.is_still(each):
                found[name] = each
        return found

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that may have to be equal. torch does not count what a normalization in training does to its
        own."""
        if (model := self._model()) is None:
            return
        ignored = _ignored(model)
        for path, module in _inner(model).named_modules():
            if isinstance(module, NORMALIZATIONS) and module.training:
                continue
            for name, each in module.named_buffers(recurse=False):
                if id(each) not in ignored and not isinstance(each, DTensor) and not each.is_inference():
                    yield f"model.{_plain(f'{path}.{name}'.lstrip('.'))}", each


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _plain(name: str) -> str:
    """The name without what wrappers add."""
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def _ignored(model: nn.Module) -> set[int]:
    """The identities of parameters and buffers that DDP was told to ignore: each rank has its own."""
    found = set()
    for wrapper in _wrappers(model):
        if names := wrapper.parameters_to_ignore:
            inner = wrapper.module
            for name, each in itertools.chain(inner.named_parameters(), inner.named_buffers()):
                if name in names:
                    found.add(id(each))
    return found


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _sections_of(kind: Kind, tensors: Mapping[str, torch.Tensor]) -> Iterator[Section]:
    """One section of the whole tensors, and one of the parts of sharded ones."""
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    places = []
    for name, each in tensors.items():
        if not isinstance(each, DTensor):
            whole[name] = each
            continue
        from holdfast.train.sharding import local_pieces  # here: it imports torch.distributed.checkpoint

        if pieces := local_pieces({name: each}):
            parts[name] = each
            places.append([(piece.offsets, piece.sizes) for piece in pieces])
    for found, where in ((whole, []), (parts, places)):
        if found:
            text = repr([list(found), where]).encode()
            key = hashlib.blake2b(text, digest_size=KEY_BYTES).hexdigest()
            yield Section(f"{kind.value}{key}", found)


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differing:
    """A section in which ranks differ."""

    key: str
    ranks: tuple[int, ...]
    """The ranks that have it."""
    odd: tuple[int, ...]
    """Those that differ from the majority; empty: there is none."""


def differing(reports: Mapping[int, Sequence[Sequence[Any]]]) -> tuple[list[Differing], list[str]]:
    """The sections in which ranks differ, in the order in which they are named; and the keys of those in which ranks
    may differ. `reports`: of each rank the key and the digest of each section, and whether it is a section of buffers
    that stays what it was."""
    digests: dict[str, dict[int, str]] = {}
    stays: dict[str, int] = {}
    for rank, sections in reports.items():
        for key, digest, stayed in sections:
            digests.setdefault(key, {})[rank] = digest
            stays[key] = stays.get(key, 0) + stayed
    found, own = [], []
    for key, by_rank in sorted(digests.items()):
        if (difference := replicas.difference(by_rank)) is None:
            continue
        if key.startswith(str(Kind.BUFFERS.value)) and 2 * stays[key] < len(by_rank):
            own.append(key)  # the program changes them on most ranks, in a way that torch does not count
        else:
            found.append(Differing(key, difference.ranks, difference.odd))
    return found, own


def equal_candidates(reports: Sequence[Mapping[str, str]]) -> list[str]:
    """The buffers that all ranks report with the same digest."""
    first, *others = reports
    return [name for name, digest in first.items() if all(each.get(name) == digest for each in others)]


@dataclass(frozen=True)
class FoundDifference:
    """Replicas that differ, as all ranks know it."""

    text: str
    """The ranks, the first tensor, and the nodes."""
    sections: tuple[Differing, ...]

    @property
    def has_majority(self) -> bool:
        return all(each.odd for each in self.sections)


def _where(which: replicas.ReplicaDifference, nodes: Mapping[int, str]) -> str:
    """Says on which nodes the ranks run that differ."""
    named = (which.odd or which.ranks)[:8]
    text = ", ".join(f"rank {rank} runs on {nodes[rank]}" for rank in named)
    return text if which.odd else f"{text}; there is no majority that shows which of them is right"


class ReplicaCheck:
    """The checks of one model on this rank."""

    def __init__(
        self,
        replica: Replica,
        optimizers: Sequence[Optimizer],
        every: int | None,
        action: ReplicaAction,
        step_now: Callable[[int], int],
    ) -> None:
        """`optimizers`: those that step the model; empty: they are found when they step it. `every`: None: no checks.
        `step_now`: the number of the last complete step, for messages; given the number of steps in this world."""
        self.replica = replica
        self.action, self.every = action, every
        self._given = [weakref.ref(each) for each in optimizers]
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether an optimizer steps this model."""
        self._step_now = step_now
        model = replica.model
        self._name = "" if model is None else type(_inner(model)).__name__
        self._begun: set[int] = set()
        """Identities of the optimizers that have stepped in the present step."""
        self._number, self.steps = 0, 0
        """This check's number among those of its ranks; complete steps in this world."""
        self._rank, self._world, self._store = 0, 1, None
        self._before: Peers | None = None
        """The messages of the check before."""
        self._silent = 0
        """The number of checks in a row in which a rank was silent."""
        self._off = ""
        """The reason why replicas are not compared in this world any more; empty: they are."""
        self._said: set[str] = set()

    def begin(self, number: int, rank: int, world: int, store: Any) -> None:
        """Count from 0: this world begins, or the check. All ranks make the same state their own before. `number`: that
        of this check among those of this world."""
        self._number, self._rank, self._world, self._store = number, rank, world, store
        self.steps, self._silent, self._off, self._before = 0, 0, "", None
        self._begun.clear()

    def stop(self, why: str) -> None:
        """Compare nothing more in this world. `why`: for rank 0's message."""
        self._off = why
        if self._rank == 0:
            self._warn(f"the replicas of {self._name} are not compared any more: {why}")

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins to step. If it has stepped already in this step, that one is complete."""
        if self._world < 2 or self._off or self.every is None or not self._steps_this(optimizer):
            return
        if id(optimizer) in self._begun:
            self._begun.clear()
            self.steps += 1
            if self.steps == 1 or self.steps % self.every == 0:
                self._check()
        self._begun.add(id(optimizer))

    def _steps_this(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps this model."""
        known = self._known.get(optimizer)
        if known is None:
            model = self.replica.model
            ours = set() if model is None else {id(each) for each in model.parameters()}
            wanted = not self._given or any(each() is optimizer for each in self._given)
            known = wanted and any(id(each) in ours for group in optimizer.param_groups for each in group["params"])
            self._known[optimizer] = known
        return known

    # --- one check ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare the replicas; all ranks call this after the same step. Raises ReplicasDifferError."""
        model = self.replica.model
        if model is None:
            return
        if why := _why_not(model):
            self.stop(why)
            return
        try:
            peers, ranks = self._peers(model)
            if peers is None:
                return
            finding = self._compare(peers, ranks)
            if finding is None:
                return
            repairs = self.action is ReplicaAction.REPAIR and finding.has_majority
            if repairs:
                self._repair(finding, ranks[peers.rank])
                again = self._compare(peers, ranks)
        except HoldfastError as silence:  # of another rank
            self._note_silence(silence)
            return
        except dist.DistError:  # the store is gone, and so are ranks: the next collective operation says more
            return
        self._act(finding, repaired=repairs and again is None)

    def _peers(self, model: nn.Module) -> tuple[Peers | None, Sequence[int]]:
        """The ranks that have this model, for one check, and their numbers in the world; None: there is no other."""
        wrappers = _wrappers(model)
        group = wrappers[0].process_group if wrappers else None
        ranks = list(range(self._world)) if group is None else dist.get_process_group_ranks(group)
        if len(ranks) < 2:
            return None, ranks
        prefix = f"{ranks[0]}.{len(ranks)}.{self._number}/{self.steps}"
        return Peers(ranks.index(self._rank), len(ranks), dist.PrefixStore(prefix, self._store), SILENCE_S), ranks

    def _compare(self, peers: Peers, ranks: Sequence[int]) -> FoundDifference | None:
        """Compare; None: the replicas are equal. Raises SnapshotIncompleteError if a rank is silent."""
        failure, sections, candidates = "", [], {}
        digests: list[list[Any]] = []
        try:
            sections = self.replica.sections(self._optimizers())
            candidates = self.replica.candidates()
            for each in sections:
                digest = each.digest()
                digests.append([each.key, digest, self.replica.stays(each.key, digest)])
        except Exception as error:  # noqa: BLE001 - a kind of tensor that cannot be read: others must not wait for us
            failure = f"{type(error).__name__}: {error}"
        try:
            reports = peers.gather([digests, candidates, failure])
            if self._before is not None and self._before is not peers:
                self._before.forget()
            self._before = peers
        except HoldfastError as error:
            peers.broadcast({"silent": str(error)})
            raise
        verdict = peers.broadcast(_verdict(reports, ranks) if reports else None)
        if silent := verdict.get("silent"):
            raise SnapshotIncompleteError(silent)
        self._silent = 0
        if failed := verdict.get("failed"):
            self.stop(failed)
            return None
        if not verdict["differ"]:
            other = [name for each in sections if each.key in verdict["own"] for name in each.tensors]
            self.replica.checked(verdict["equal"], other)
            return None
        found = [Differing(key, tuple(of), tuple(odd)) for key, of, odd in verdict["differ"]]
        return FoundDifference(self._name_first(peers, ranks, found[0], sections), tuple(found))

    def _optimizers(self) -> list[Optimizer]:
        return [each for each, steps in self._known.items() if steps]

    def _name_first(self, peers: Peers, ranks: Sequence[int], which: Differing, sections: Sequence[Section]) -> str:
        """Name the first tensor of a section that differs; all ranks call this."""
        mine: list[Any] = [socket.gethostname(), [], []]
        for each in sections:
            if each.key == which.key:
                mine[1:] = [list(each.tensors), replicas.each_digest(list(each.tensors.values()))]
        answers = peers.gather(mine)
        text = ""
        if answers:
            by_rank = dict(zip(ranks, answers, strict=True))
            names = by_rank[which.ranks[0]][1]
            found = replicas.first_difference({rank: by_rank[rank][2] for rank in which.ranks}, names)
            if found is not None:
                where = _where(found[1], {rank: node for rank, (node, *_) in by_rank.items()})
                text = f"{found[1]} in {found[0]}\n{where}"
        named: str = peers.broadcast(text)
        return named

    def _repair(self, finding: FoundDifference, rank: int) -> None:
        """Give the ranks that differ the state of the majority; all ranks call this."""
        sections = {each.key: each for each in self.replica.sections(self._optimizers())}
        nccl = "nccl" in dist.get_backend()
        for which in finding.sections:
            source = next(each for each in which.ranks if each not in which.odd)
            if rank == source or rank in which.odd:
                for tensor in sections[which.key].tensors.values():
                    _hand_over(tensor, rank, source, which.odd, on_device=nccl)

    def _act(self, finding: FoundDifference, *, repaired: bool) -> None:
        """Raise ReplicasDifferError, or warn."""
        first, _, rest = finding.text.partition("\n")
        text = f"the replicas of {self._name} differ after step {self._step_now(self.steps)}: {first}\n{rest}\n"
        if repaired:
            self._warn(f"{text}They were given the state of the majority, and training goes on.")
        elif self.action is ReplicaAction.REPORT:
            # Replicas that differ stay different: it is said once.
            if finding.text not in self._said and os.environ.get("LOCAL_RANK", "0") == "0":
                self._warn(
                    f"{text}Training goes on, with gradients of models that are not the same. Either memory or a "
                    "processor is faulty, or a rank changes its model alone.\nht.check_replicas(model, "
                    "action='exit') ends the training then, action='repair' takes the majority's state."
                )
            self._said.add(finding.text)
        else:
            raise ReplicasDifferError(
                f"{text}Either memory or a processor is faulty, or a rank changes its model alone, or a step skipped "
                "the exchange of gradients.\nThe next start goes on from the newest snapshot on the disk, in which "
                "they were equal."
            )

    def _note_silence(self, silence: HoldfastError) -> None:
        self._silent += 1
        if self._silent >= SILENT_MAX:
            said = str(silence).partition("\n")[0]
            self.stop(f"{said}; every rank has to do the same number of optimizer steps")

    def _warn(self, text: str) -> None:
        warnings.warn(f"holdfast: {text}", RuntimeWarning, stacklevel=2)


def _verdict(reports: Sequence[Sequence[Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """Rank 0's answer to the reports, which are in the order of these ranks."""
    for rank, (*_, failure) in zip(ranks, reports, strict=True):
        if failure:
            return {"failed": f"rank {rank} cannot read its state: {failure}"}
    found, own = differing({rank: digests for rank, (digests, *_) in zip(ranks, reports, strict=True)})
    equal = equal_candidates([candidates for _, candidates, _ in reports])
    return {"differ": [[each.key, each.ranks, each.odd] for each in found], "own": own, "equal": equal}


def _why_not(model: nn.Module) -> str:
    """The reason why the replicas of this model need not be equal; empty: they have to be."""
    for wrapper in _wrappers(model):
        if torch_private.is_joined(wrapper):
            return "it is in join(), in which ranks do different numbers of steps"
        for hook, _ in torch_private.comm_hooks(wrapper):
            if "localsgd" in getattr(hook, "__qualname__", "").lower():
                return "its communication hook lets ranks train alone for some steps (local SGD)"
    return ""


def _hand_over(tensor: torch.Tensor, rank: int, source: int, odd: Sequence[int], *, on_device: bool) -> None:
    """Send this tensor from the rank `source` to the ranks `odd`, each of which calls this."""
    local = torch_private.local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if not local.numel():
        return
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    data = local.to(device).contiguous().view(-1).view(torch.uint8)
    with torch.no_grad():
        if rank == source:
            for each in odd:
                dist.send(data, each)
        else:
            data = torch.empty_like(data)
            dist.recv(data, source)
            local.copy_(data.view(local.dtype).view(local.shape))


# --- the checks of this process ---------------------------------------------------------------------------------------


@dataclass
class _Checks:
    """All checks of this process, and its place in the present world."""

    rank: int = 0
    world: int = 1
    store: Any = None
    checks: list[ReplicaCheck] = field(default_factory=list)
    step_now: Callable[[], int] | None = None
    """The number of the last complete step, if Snapshots count them."""
    hook: Any = None

    def add(self, model: nn.Module, optimizers: Sequence[Optimizer], every: int | None, action: ReplicaAction) -> None:
        """Begin to check a model; a check that it has already is replaced."""
        number = next((n for n, each in enumerate(self.checks) if each.replica.model is model), len(self.checks))
        check = ReplicaCheck(Replica(model), optimizers, every, action, self._number_of_step)
        self.checks[number : number + 1] = [check]
        check.begin(number, self.rank, self.world, self.store)
        if self.hook is None:
            self.hook = register_optimizer_step_pre_hook(self._before_step)

    def renew(self, rank: int, world: int, store: Any) -> None:
        """Count from 0 again, in another world."""
        self.rank, self.world, self.store = rank, world, store
        self.checks = [each for each in self.checks if each.replica.model is not None]
        for number, each in enumerate(self.checks):
            each.begin(number, rank, world, store)
            each.replica.renew()

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self.checks.clear()

    def _number_of_step(self, steps: int) -> int:
        return steps if self.step_now is None else self.step_now()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            for each in self.checks:
                each.before_step(optimizer)


_current: _Checks | None = None
"""One per process, as torch's default group is."""


@contextlib.contextmanager
def checked(group: Any) -> Iterator[None]:
    """Let models be checked in this block, in the world of `process_group()`."""
    global _current  # noqa: PLW0603
    before = _current
    _current = _Checks(dist.get_rank(), dist.get_world_size(), dist.PrefixStore("replicas", group.store))
    try:
        yield
    finally:
        _current.close()
        _current = before


def renew_checks(rank: int, world: int, store: Any) -> None:
    """Let the checks follow a world that has changed."""
    if _current is not None:
        _current.renew(rank, world, store)


def check_by_default(model: nn.Module) -> None:
    """Check this model, as `ht.ddp` does with each: differences are reported."""
    if _current is not None:
        _current.add(model, (), EVERY_STEPS, ReplicaAction.REPORT)


def counted_by(step_now: Callable[[], int] | None) -> None:
    """Name steps by this number in messages."""
    if _current is not None:
        _current.step_now = step_now


def may_differ(models: Sequence[nn.Module]) -> None:
    """End the checks of these models: the program has said that replicas may differ."""
    inner = {id(_inner(each)) for each in models}
    for check in () if _current is None else _current.checks:
        model = check.replica.model
        if model is not None and id(_inner(model)) in inner:
            check.every = None


def check_replicas(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    every: int | None = EVERY_STEPS,
    action: Literal["exit", "report", "repair"] = "exit",
) -> None:
    """Compare the model's replicas on all ranks while it trains: its parameters, the optimizer's state and constant
    buffers, after the first optimizer step and after every `every` steps. All ranks call it, before they train.

        ht.check_replicas(model, optimizer, every=500, action="repair")

    If they differ, the message names the ranks that are not like the majority, their nodes, the first tensor and the
    step. `action`: "exit": all ranks raise ReplicasDifferError; "report": a warning on each node; "repair": these ranks
    get the majority's state, with a warning, and all raise if there is no majority. `optimizer`: one or several; by
    default all that step the model. `every`: None: no checks. What ranks have for themselves is not compared: shards,
    buffers that change, parameters that DDP ignores.

    `ht.ddp` does so already, with 500 and "report"; this call replaces that. Raises ProcessGroupError, IntervalError.
    """
    if every is not None and (type(every) is not int or every < 1):
        raise IntervalError(f"check_replicas(every={every!r}): a number of optimizer steps, at least 1, or None")
    if action not in {each.value for each in ReplicaAction}:
        raise ProcessGroupError(f'check_replicas(action={action!r}): "exit", "report" or "repair"')
    global _current  # noqa: PLW0603
    if _current is None:
        if not dist.is_initialized():
            raise ProcessGroupError("check_replicas(): there is no process group yet: ht.process_group() makes it.")
        store = dist.PrefixStore("holdfast.replicas", torch_private.default_store())
        _current = _Checks(dist.get_rank(), dist.get_world_size(), store)  # as long as the program's own group
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    _current.add(torch_private.uncompiled(model), optimizers, every, ReplicaAction(action))
