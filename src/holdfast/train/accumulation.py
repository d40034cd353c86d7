"""Gradient accumulation: one optimizer step made of several micro-batches, with one exchange of gradients.

Knows DDP, also by torch's composable `replicate`, FSDP2 and plain modules, and our loader: its share of a batch, and
the sizes of the next ones. Knows no snapshot.

The gradient of an optimizer step is the mean over all its samples, on all ranks, whatever the number of ranks and
micro-batches. In a loop over a loader of ours each micro-batch has the weight of its samples, and a step ends with the
epoch. With a number and any other loader all have the same weight, and the count goes on over the epoch's end.

**Memory.** With a loader that shrinks, a rank that runs out of memory must not leave the others waiting in an exchange
of gradients that it never joins. So no micro-batch of such a step exchanges anything. After the last one the ranks
exchange whether they had enough memory; then either all exchange their gradients, or all drop them and the loader hands
out the step again in smaller micro-batches. The price is that the exchange does not overlap with the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import torch_private
from holdfast.train.boundary import Buffers
from holdfast.train.data import HasShare, Share, current_loader
from holdfast.train.group import is_outlived
from holdfast.train.guards import GuardWarning, enabled, watch

if TYPE_CHECKING:
    from holdfast.train.data.loader import DataLoader


NO_LOSS = torch.tensor(float("nan"))
"""The value of `micro.loss` in an optimizer step without `micro.backward()`: the loss of the training is not known. The
watch for losses that are not finite leaves it out."""


class MicroBatch:
    """One micro-batch of an optimizer step, yielded by `accumulate`."""

    def __init__(self, accumulation: _Accumulation, number: int, micro_batches: int, scale: float) -> None:
        self._accumulation = accumulation
        self.number = number
        """The number of this micro-batch within its optimizer step, from 0."""
        self.micro_batches = micro_batches
        """The number of micro-batches in this optimizer step."""
        self.scale = scale
        """The factor of the loss in `backward`: the batch's part of the step's samples, times the number of ranks."""
        self.last = number == micro_batches - 1
        """Whether the optimizer steps after this one."""

    def backward(self, loss: torch.Tensor, *, scaler: Any = None, **arguments: Any) -> None:
        """Call `loss.backward()` with the loss scaled; `loss` is the mean over the batch's samples.

        `scaler`: a torch.amp.GradScaler. Several losses of one micro-batch may be given one after the other."""
        scaled = loss * self.scale
        (scaled if scaler is None else scaler.scale(scaled)).backward(**arguments)
        self._accumulation.add(scaled.detach())

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss over the samples of the optimizer step, detached.

        After the last micro-batch it is the mean over all ranks, the same value on each. Before, it is the mean over
        the samples of this rank so far; also after the last one, if a rank was lost meanwhile and this one goes on
        (`ht.survive`). NaN: there was no `backward`.
        """
        return self._accumulation.loss()


class _Accumulation:
    """The unfinished optimizer step of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.done = 0
        """The number of micro-batches of this optimizer step that are done."""
        self.begun = 0
        """The number of micro-batches that were begun, in all optimizer steps."""
        plain = torch_private.uncompiled(model)  # without torch.compile's wrapper
        # The references are weak: this object must not keep the model alive, whose life it shares.
        self._ddp = [weakref.ref(each) for each in _outermost(plain, DistributedDataParallel)]
        self._fsdp = [weakref.ref(each) for each in _outermost(plain, FSDPModule)]
        self._replicated = [
            weakref.ref(each) for kind in torch_private.kinds_of_replicated() for each in _outermost(plain, kind)
        ]
        """The modules of torch's composable `replicate`, which hides a DDP module."""
        self._model = weakref.ref(plain)
        self._sum: torch.Tensor | None = None
        self._weight = 0.0
        self._exchange: tuple[torch.Tensor, Any] | None = None
        """The sum over all ranks, and torch's handle to wait for it."""
        self._parameter: weakref.ref[nn.Parameter] | None = None
        self._gradient: torch.Tensor | None = None
        """The gradient of `_parameter`: see `_note_gradient`."""
        self._micro_batches = 1
        """The number of micro-batches in this optimizer step."""
        self._samples = 0
        """The number of samples of all ranks in this optimizer step."""
        self._last_share: Share | None = None
        """The loader's batch of the last micro-batch."""
        self._splits_batches = False
        """Whether the loop's body splits a batch into several micro-batches: then the loader's batches are not
        micro-batches."""
        self._careful: _CarefulStep | None = None
        """The step in which no rank exchanges anything before its end; None: the loader does not shrink."""
        self._warned = self._warned_of_gap = False
        self._loader: weakref.ref[HasShare] | None = None
        """The loader of the last micro-batch, if the loader makes the steps."""

    def next_of(self, loader: DataLoader, micro_batches: int) -> tuple[int, int, float] | None:
        """Number, count and scale of the next micro-batch, if `micro_batches` batches of the loader make a step (at the
        epoch's end, fewer); None: batches are not micro-batches."""
        share = loader.share
        if share is None or self._splits_batches:
            return None
        if self._is_same_batch(share):
            self._splits_batches = True
            return None
        number = self.done
        if number == 0:
            ahead = loader._samples_ahead(micro_batches)
            self._micro_batches, self._samples = len(ahead), sum(ahead)
        scale = share.scale * loader._samples_ahead(1)[0] / self._samples
        return min(number, self._micro_batches - 1), self._micro_batches, scale

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange gradients at the end of an optimizer step."""
        return bool(self._ddp or self._fsdp or self._replicated)

    def holds_unexchanged(self) -> bool:
        """Whether there are gradients of micro-batches that other ranks do not have. After `zero_grad()` there are
        none: the rest of an accumulation was given up, as at the end of an epoch."""
        if not self.done or not self.exchanges or self._parameter is None:
            return False
        parameter = self._parameter()
        return parameter is not None and self._gradient is not None and parameter.grad is self._gradient

    def _note_gradient(self) -> None:
        """Remember the smallest gradient: it shows later whether these gradients still exist."""
        self._parameter = self._gradient = None
        model = self._model()
        graded = (
            [] if model is None or not self.done else [each for each in model.parameters() if each.grad is not None]
        )
        if graded:
            smallest = min(graded, key=torch.Tensor.numel)
            self._parameter, self._gradient = weakref.ref(smallest), smallest.grad

    def _group(self) -> Any:
        """The group over which the gradients' mean is computed."""
        module = self._ddp[0]() if self._ddp else None
        if module is None and self._replicated:
            module = torch_private.hidden_wrapper(self._replicated[0]())
        return dist.group.WORLD if module is None else module.process_group

    @property
    def _world(self) -> int:
        """The number of ranks over which the loss's mean is computed: a plain module on each has a loss of its own."""
        return dist.get_world_size(self._group()) if self.exchanges else 1

    def add(self, scaled: torch.Tensor) -> None:
        if isinstance(scaled, DTensor):  # as with `loss_parallel`; the ranks of its mesh are all here
            scaled = scaled.full_tensor()
        value = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
        self._sum = value if self._sum is None else self._sum + value

    def loss(self) -> torch.Tensor:
        if self._sum is None:
            self._warn_of_no_loss()
            return NO_LOSS
        if self._exchange is not None:
            (total, work), self._exchange = self._exchange, None
            try:
                work.wait()
            except RuntimeError as error:
                if not is_outlived(error):
                    raise
                # A rank was lost after the gradients had arrived: an error here would give up a complete step.
            else:
                self._sum, self._weight = total / self._world, 1.0
        return self._sum / self._weight if self._weight > 0 else self._sum

    def _warn_of_no_loss(self) -> None:
        if enabled() and not self._warned and self._careful is None:  # a rank without memory may have had no loss
            self._warned = True
            warnings.warn(
                "holdfast: micro.loss was asked for, and micro.backward() was not called in this optimizer step: the "
                "loss is not known, and is nan.\n"
                "Inside accumulate() write micro.backward(loss) in place of loss.backward().",
                GuardWarning,
                stacklevel=4,
            )

    def _warn_of_gap(self, number: int, micro_batches: int) -> None:
        """Warn that micro-batches before this one were in no block."""
        if enabled() and not self._warned_of_gap:
            self._warned_of_gap = True
            warnings.warn(
                f"holdfast: micro-batch {number + 1} of {micro_batches} comes after {self.done} of its optimizer step: "
                "the gradient lacks the samples of those between, which the loader has handed out.\n"
                "Give each batch to accumulate() in the pass of the loop that gets it: nothing may read ahead of the "
                "loop, and no `continue` may skip a batch.",
                GuardWarning,
                stacklevel=5,
            )

    def _is_same_batch(self, share: Share) -> bool:
        """Whether this is the loader's batch of the micro-batch before."""
        before, self._last_share = self._last_share, share
        return share is before

    def _is_begun_again(self, loader: HasShare, number: int) -> bool:
        """Whether this micro-batch begins a step that the same loader had begun before, and that the loop has left."""
        before, self._loader = self._loader, weakref.ref(loader)
        return number == 0 and self.done > 0 and before is not None and before() is loader

    @contextlib.contextmanager
    def micro_batch(
        self, number: int, micro_batches: int, scale: float, maker: HasShare | None
    ) -> Iterator[MicroBatch]:
        """One micro-batch, whose passes are made in the block. `maker`: the loader, if that makes the steps. If it
        shrinks, the step is repeated with smaller micro-batches when a rank runs out of memory."""
        loader: Any = maker if getattr(maker, "_shrinks_on_oom", False) else None
        # Another block for the same batch, as of a GAN, whose discriminator gets two losses: its gradients are added.
        another = maker is not None and maker.share is not None and self._is_same_batch(maker.share)
        if another and loader is not None:
            raise ProcessGroupError(
                "shrink_on_oom=True works with one block of ht.accumulate for each batch\n"
                "give all its losses to one block, with micro.backward(…) for each"
            )
        if not another:
            if maker is not None and self._is_begun_again(maker, number) and (model := self._model()) is not None:
                model.zero_grad()  # the gradients so far are those of micro-batches that come again
            if number == 0:
                self._sum, self._weight, self._exchange = None, 0.0, None
                self._careful = None if loader is None else self._be_careful()
            if maker is not None and number > self.done:
                self._warn_of_gap(number, micro_batches)
            self._weight += scale

        careful = self._careful
        self.begun += 1
        micro = MicroBatch(self, number, micro_batches, scale)
        attempt = careful.attempt(loader) if careful and loader else contextlib.nullcontext()
        with attempt, self._synced(exchange=micro.last and careful is None):
            yield micro
        if careful is not None and loader is not None and micro.last and not careful.complete(loader):
            micro.last, self.done, self._sum = False, 0, None  # the step is repeated
            return

        self.done = 0 if micro.last else number + 1
        self._note_gradient()
        if micro.last and self._world > 1 and self._sum is not None:
            # Every rank comes here once per step, so this mixes with no other collective. It runs during the
            # optimizer's step.
            total = self._sum.clone()
            self._exchange = total, dist.all_reduce(total, group=self._group(), async_op=True)

    def _be_careful(self) -> _CarefulStep:
        """Begin a step in which nothing is exchanged before its end. Raises ProcessGroupError with FSDP2."""
        if self._fsdp or self._replicated:
            raise ProcessGroupError(
                "shrink_on_oom=True works with DDP and plain modules: with FSDP2 and replicate() the other ranks wait\n"
                "for the rank that has run out of memory."
            )
        if self._careful is None:
            model = self._model()
            assert model is not None  # it is in use
            return _CarefulStep(model, list(_alive(self._ddp)), self._group() if self._ddp else None)
        self._careful.begin()
        return self._careful

    @contextlib.contextmanager
    def _synced(self, *, exchange: bool) -> Iterator[None]:
        """Let backward passes in the block exchange gradients, or only add them up on this rank."""
        with contextlib.ExitStack() as stack:
            if not exchange:
                for module in _alive(self._ddp):
                    stack.enter_context(module.no_sync())
            for module in _alive(self._fsdp):
                _set_fsdp(module, exchange=exchange)
                stack.callback(_set_fsdp, module, exchange=True)
            for module in _alive(self._replicated):
                module.set_requires_gradient_sync(exchange)
                stack.callback(module.set_requires_gradient_sync, True)
            yield


BUCKET_BYTES = 25 << 20
"""Size of the gradients that are exchanged at once, as in DDP."""


class _CarefulStep:
    """An optimizer step in which no rank exchanges anything before all have done their backward passes."""

    def __init__(self, model: nn.Module, wrappers: list[DistributedDataParallel], group: Any) -> None:
        """`wrappers`: the DDP modules in the model. `group`: None for a plain module, which exchanges nothing."""
        self._group = group
        self._wrappers = [weakref.ref(each) for each in wrappers]
        ignored = {id(each) for wrapper in wrappers for each in _ignored(wrapper)}
        self._parameters = [each for each in model.parameters() if each.requires_grad and id(each) not in ignored]
        self._buffers = Buffers([model])
        self._failed = False
        self.begin()

    def begin(self) -> None:
        """Begin a step, before its first micro-batch."""
        self._failed = False
        self._buffers.keep()
        for wrapper in _alive(self._wrappers):
            wrapper.require_forward_param_sync = False  # otherwise DDP waits for the others in the forward pass

    @contextlib.contextmanager
    def attempt(self, loader: DataLoader) -> Iterator[None]:
        """Note that memory was too short for the micro-batch in the block. The error is raised if there is no smaller
        one."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if loader.batch_size == 1:
                raise
            self._failed = True
            traceback.clear_frames(error.__traceback__)  # their variables keep the memory of the forward pass in use
            self._drop_gradients()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def complete(self, loader: DataLoader) -> bool:
        """Exchange the gradients; all ranks call this after their last micro-batch. Returns False if the step has to be
        repeated."""
        short, used = self._agree()
        if not short:
            if self._group is not None:
                self._exchange([each for each, there in zip(self._parameters, used, strict=True) if there])
            return True
        self._drop_gradients()
        self._buffers.restore()
        before = loader.batch_size
        loader._shrink()
        if self._group is None or dist.get_rank(self._group) == 0:
            warnings.warn(
                f"holdfast: rank {short - 1} ran out of memory with {before} samples at once: this optimizer step is "
                f"repeated with {loader.batch_size}, and so are the next ones (shrink_on_oom=True)",
                RuntimeWarning,
                stacklevel=6,
            )
        return False

    def _drop_gradients(self) -> None:
        for each in self._parameters:
            each.grad = None

    def _agree(self) -> tuple[int, list[bool]]:
        """Exchange facts with the other ranks. Returns the number of a rank that had too little memory, plus 1 (0: none
        had), and whether each parameter has a gradient on any rank."""
        rank = 0 if self._group is None else dist.get_rank(self._group)
        flags = torch.tensor([(rank + 1) * self._failed, *(each.grad is not None for each in self._parameters)])
        if self._group is not None:
            flags = flags.to(self._parameters[0].device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        short, *used = flags.tolist()
        return short, [bool(each) for each in used]

    def _exchange(self, parameters: list[nn.Parameter]) -> None:
        """Replace the gradients by their mean over the ranks."""
        world = dist.get_world_size(self._group)
        buckets: dict[Any, list[list[torch.Tensor]]] = {}
        for each in reversed(parameters):
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            full = buckets.setdefault((each.grad.dtype, each.grad.device), [[]])
            if sum(gradient.nbytes for gradient in full[-1]) >= BUCKET_BYTES:
                full.append([])
            full[-1].append(each.grad)
        for bucket in (each for full in buckets.values() for each in full):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(1 / world)
            dist.all_reduce(flat, group=self._group)
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch_private.foreach_copy(bucket, [part.view_as(each) for part, each in zip(parts, bucket, strict=True)])
        for wrapper in _alive(self._wrappers):
            buffers = [each.detach() for each in wrapper.module.buffers()] if wrapper.broadcast_buffers else []
            if buffers:
                torch_private.broadcast_coalesced(self._group, buffers, BUCKET_BYTES)


def _ignored(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    names = wrapper.parameters_to_ignore
    return [each for name, each in wrapper.module.named_parameters() if name in names]


def _alive(references: list[weakref.ref[Any]]) -> Iterator[Any]:
    return (module for each in references if (module := each()) is not None)


def _set_fsdp(module: Any, *, exchange: bool) -> None:
    module.set_requires_gradient_sync(exchange)
    module.set_is_last_backward(exchange)


def _outermost(module: nn.Module, kind: type) -> list[Any]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


_accumulations: weakref.WeakKeyDictionary[nn.Module, _Accumulation] = weakref.WeakKeyDictionary()
"""The unfinished step of each model, as long as the model lives: so a loop needs no object of ours, and the model gets
no attribute."""


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_early_step)


def _refuse_early_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise ProcessGroupError if an optimizer steps before the last micro-batch: `if micro.last:` was forgotten. With
    one micro-batch per step that does no harm. With more, as after the loss of a rank, the optimizer would step with
    gradients that were not exchanged, and the ranks' weights would differ from then on."""
    if not any(each.done for each in _accumulations.values()):
        return
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for model, each in _accumulations.items():
        if each.holds_unexchanged() and any(id(parameter) in stepped for parameter in model.parameters()):
            raise ProcessGroupError(
                f"the optimizer steps after {each.done} micro-batches of ht.accumulate, and the last one is still to "
                "come: gradients would be lost, and the ranks' weights would differ\n"
                "step it after the last one: `if micro.last: optimizer.step()`"
            )


@contextlib.contextmanager
def accumulate(model: nn.Module, micro_batches: int | HasShare | None = None) -> Iterator[MicroBatch]:
    """Make one micro-batch of the passes in the block: its loss is scaled, and gradients are exchanged only in the last
    one of an optimizer step.

        for batch in loader:
            with ht.accumulate(model, loader) as micro:      # forward pass and backward pass both inside
                micro.backward(loss_fn(model(batch)))        # instead of loss.backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()

    `micro_batches`: the loader of the loop (one of holdfast.train), which decides what makes an optimizer step; or a
    number of batches; without it the loader's number, or 1. In a loop over a loader of holdfast.train every sample has
    the same weight, however uneven batches are, and the epoch's last optimizer step may have fewer batches. With any
    other loader batches have the same weight, and the count goes on over the end of an epoch. `model`: DDP (also
    by `replicate`), FSDP2, or neither. Raises ProcessGroupError for a number below 1, one that contradicts the loader,
    or a loader that has handed out no batch.
    """
    accumulation = _accumulations.get(model)
    if accumulation is None:
        if not _accumulations:
            _watch_optimizers()
        accumulation = _accumulations[model] = _Accumulation(model)
    watch(model)
    with accumulation.micro_batch(*_next_micro_batch(accumulation, micro_batches)) as micro:
        yield micro


def _next_micro_batch(
    accumulation: _Accumulation, given: int | HasShare | None
) -> tuple[int, int, float, HasShare | None]:
    """Number, count and loss factor of the next micro-batch, and the loader if that makes the steps."""
    loader = current_loader()
    if given is None:
        given = 1 if loader is None or loader.share is None else loader
    if isinstance(given, int):
        if given < 1:
            raise ProcessGroupError(
                f"accumulate(micro_batches={given}): at least one micro-batch makes an optimizer step."
            )
        if loader is not None and (loader.micro_batches > 1 or loader._keeps_global_batch):
            if loader.micro_batches != given:
                raise ProcessGroupError(
                    f"accumulate(model, micro_batches={given}): the loader makes optimizer steps of "
                    f"{loader.micro_batches} batches\n"
                    "write accumulate(model, loader), or leave global_batch_size= and micro_batches= of the loader out"
                )
            given = loader
    if isinstance(given, int):
        found = None if loader is None else accumulation.next_of(loader, given)
        # The count may have become smaller in the middle of a step: then this is the last micro-batch.
        return (*(found or (min(accumulation.done, given - 1), given, 1 / given)), None)
    share = given.share
    if share is None:
        raise ProcessGroupError(
            "accumulate(model, loader) belongs into the loop over that loader: it has no batch yet."
        )
    return share.micro, share.micro_batches, share.scale, given


def forget_pending() -> None:
    """Give up the unfinished optimizer steps of all models; their micro-batches are repeated."""
    _accumulations.clear()


class UnfinishedStep(NamedTuple):
    """An optimizer step of a model of which not all micro-batches are done."""

    begun: int
    """Micro-batches that the model has begun in its life."""
    exchanges: bool
    """Whether all ranks exchange gradients at its end. Then all of them have the same number of micro-batches."""


def unfinished_micro_batches() -> dict[int, UnfinishedStep]:
    """The unfinished optimizer steps, by the model's identity."""
    return {id(each): UnfinishedStep(each.begun, each.exchanges) for each in _accumulations.values() if each.done}
