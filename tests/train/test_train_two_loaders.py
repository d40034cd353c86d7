"""A second loader beside the one that is trained: what a resume takes of it, and what is told where that cannot be."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht

pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.usefixtures("own_staging")]

EPOCHS, BATCHES, SHORT, LONG = 3, 8, 3, 20
WHOLE = EPOCHS * BATCHES
Batches = Iterator[tuple[Any, Any]]
Pairs = Callable[[Any, Any], Callable[[], Batches]]
"""Of both loaders; it is called before the loop over epochs, and the result in each epoch."""


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def one_generator(main: Any, second: Any) -> Callable[[], Batches]:
    forever = endless(second)
    return lambda: zip(main, forever, strict=False)


def a_generator_for_each_epoch(main: Any, second: Any) -> Callable[[], Batches]:
    return lambda: zip(main, endless(second), strict=False)


def a_cycle(main: Any, second: Any) -> Callable[[], Batches]:
    return lambda: zip(main, itertools.cycle(second), strict=False)


def one_pass(main: Any, second: Any) -> Callable[[], Batches]:
    return lambda: itertools.zip_longest(main, second)


def one_after_the_other(main: Any, second: Any) -> Callable[[], Batches]:
    return lambda: ((each, None) for each in itertools.chain(main, second))


def trained(
    folder: Path,
    pairs: Pairs,
    *,
    length: int = SHORT,
    stop: int = WHOLE,
    tracked: bool = True,
) -> list[tuple[int, ...]]:
    """Epoch and samples of each step of one life, until this step."""
    main = ht.DataLoader(range(BATCHES), shuffle=True)
    second = ht.DataLoader(range(length), shuffle=True, seed=7)
    seen = []
    model = nn.Linear(1, 1)
    with ht.Snapshots(folder, every=None, memory_every=None) as snaps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        others = {"second": second} if tracked else {}
        state = snaps.track(model=model, optimizer=optimizer, loader=main, **others)
        snaps.resume()
        of_epoch = pairs(main, second)
        for epoch in state.epochs(EPOCHS):
            for pair in of_epoch():
                seen.append((epoch, *(-1 if each is None else int(each) for each in pair)))
                model(torch.ones(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                snaps.step()
                if state.step == stop:
                    snaps.save()
                    return seen
    return seen


@pytest.mark.filterwarnings("ignore:.*starts again in each epoch:RuntimeWarning")
@pytest.mark.parametrize(
    ("pairs", "length", "stops"),
    [
        (one_generator, SHORT, (2, 5, 8, 13, 16)),
        (one_generator, LONG, (2, 10, 13, 16)),
        (a_generator_for_each_epoch, SHORT, (2, 5, 13)),
        (a_generator_for_each_epoch, LONG, (2, 8, 13, 16)),
        (one_pass, SHORT, (2, 5, 8, 13)),
    ],
)
def test_a_resume_goes_on_with_both_loaders(tmp_path: Path, pairs: Pairs, length: int, stops: tuple[int, ...]) -> None:
    whole = trained(tmp_path / "whole", pairs, length=length)
    for stop in stops:
        folder = tmp_path / str(stop)
        assert trained(folder, pairs, length=length, stop=stop) == whole[:stop]
        assert trained(folder, pairs, length=length) == whole[stop:], stop


def test_a_cycle_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"second is in itertools\.cycle\(\)") as told:
        trained(tmp_path / "cycle", a_cycle, stop=9)
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(tmp_path / "no cycle", one_generator, stop=9)


def test_a_cycle_over_the_only_loader_is_told(tmp_path: Path) -> None:
    loader = ht.DataLoader(range(BATCHES))
    with ht.Snapshots(tmp_path, memory_every=None) as snaps:
        snaps.track(model=nn.Linear(1, 1), loader=loader)
        snaps.resume()
        for _ in itertools.islice(itertools.cycle(loader), 1):
            with pytest.warns(RuntimeWarning, match=r"loader is in itertools\.cycle\(\)"):
                snaps.step()


def test_a_pass_that_each_epoch_gives_up_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="starts again in each epoch before its pass is complete"):
        trained(tmp_path / "short", a_generator_for_each_epoch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, pairs in enumerate((one_generator, one_pass, one_after_the_other)):
            trained(tmp_path / str(number), pairs)
        trained(tmp_path / "long", a_generator_for_each_epoch, length=LONG)


def test_a_loader_of_ours_that_is_not_tracked_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"an ht\.DataLoader that is not tracked: after a resume") as told:
        trained(tmp_path / "not tracked", one_generator, stop=5, tracked=False)
    assert [each.filename for each in told] == [__file__]


def test_a_loader_that_a_tracked_object_keeps_is_not_told(tmp_path: Path) -> None:
    class Keeper:
        def __init__(self, loader: Any) -> None:
            self.loader = loader
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    loader = ht.DataLoader(range(BATCHES))
    model = nn.Linear(1, 1)
    with warnings.catch_warnings(), ht.Snapshots(tmp_path, memory_every=None) as snaps:
        warnings.simplefilter("error")
        snaps.track(model=model, keeper=Keeper(loader))
        snaps.resume()
        for _ in itertools.islice(loader, 5):
            snaps.step()
