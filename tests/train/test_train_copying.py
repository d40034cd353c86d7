"""Copies of many tensors: by torch's threads and by ours, the same bytes."""

from __future__ import annotations

import pytest
import torch

from holdfast.train import copying

SIZES = [(0,), (1,), (3, 5), (257,), (64, 1024), (5 << 20,)]


def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Targets and sources of many kinds; the largest has more than one piece."""
    torch.manual_seed(1)
    sources = [torch.randn(size) for size in SIZES]
    sources += [torch.randn(70, 30).T, torch.randn(4, 4, dtype=torch.complex64).conj(), torch.tensor(7)]
    sources += [torch.randn(100).bfloat16(), torch.rand(33) > 0.5, torch.nn.Parameter(torch.randn(9, 9))]
    return [torch.zeros(source.shape, dtype=source.dtype) for source in sources], sources


def test_copies_are_equal() -> None:
    targets, sources = pairs()
    copying.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert not any(target.requires_grad for target in targets)


def test_our_threads_take_what_is_plain_and_leave_the_rest() -> None:
    targets, sources = pairs()
    left_targets, left_sources = copying._move_plain(targets, sources)
    assert [tuple(source.shape) for source in left_sources] == [(30, 70), (4, 4)]
    left = {id(target) for target in left_targets}
    moved = [(target, source) for target, source in zip(targets, sources, strict=True) if id(target) not in left]
    assert len(moved) == len(sources) - 2
    assert all(torch.equal(target, source) for target, source in moved)


@pytest.mark.parametrize("crowded", [False, True])
def test_as_many_items_in_another_shape(crowded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_is_crowded", lambda: crowded)
    target, source = torch.zeros(2, 6), torch.arange(12.0)
    copying.copy_all([target], [source])
    assert torch.equal(target.flatten(), source)
    with pytest.raises(RuntimeError):
        copying.copy_all([torch.zeros(5)], [torch.zeros(1, 1, 7)])
