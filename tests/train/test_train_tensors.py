"""Every kind of tensor comes back bit for bit; what is tied is stored once and stays tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import ShardingError, StateTypeError, TrackingError
from holdfast.train import export
from holdfast.train.resuming import Resumed
from holdfast.train.snapshots import folder
from holdfast.train.snapshots.folder import RankFile
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "snapshot_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(120), pytest.mark.usefixtures("own_staging")]


def save(path: Path, **objects: Any) -> None:
    with ht.Snapshots(path, every=None, memory_every=None) as snaps:
        snaps.track(**objects)
        snaps.resume()
        snaps.save(wait=True)


def load(path: Path, only: str | None = None, **objects: Any) -> Resumed:
    with ht.Snapshots(path, every=None, memory_every=None) as snaps:
        snaps.track(**objects)
        resumed = snaps.resume(only=only)
        assert resumed is not None
        return resumed


def entries(path: Path) -> set[str]:
    """Names of the tensors on the disk."""
    (snapshot,) = folder.survey(path).committed
    with RankFile(snapshot, 0) as file:
        return {each.name for each in file.image.entries}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return (tensor.dtype, tuple(tensor.shape), bytes(whole.reshape(-1).view(torch.uint8).tolist()))


class Odd(nn.Module):
    """One buffer of its own, of any kind."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]  # fmt: skip


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits: infinities, NaNs with payloads, denormals."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_every_type_in_every_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    saved = nn.ModuleList([Odd(random_bits(shape, dtype)) for dtype in DTYPES])
    save(tmp_path, model=saved)
    again = nn.ModuleList([Odd(random_bits(shape, dtype, seed=1)) for dtype in DTYPES])
    load(tmp_path, model=again)
    for one, two in zip(again, saved, strict=True):
        assert bits(one.value) == bits(two.value)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "reversed": lambda x: x.flip(0)[1:],
    "a slice": lambda x: x[2:5, 1:4],
    "permuted": lambda x: x.reshape(2, 3, 2, 4).permute(0, 3, 1, 2),
    "channels last": lambda x: x.reshape(1, 2, 4, 6).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_not_contiguous(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    saved = Odd(LAYOUTS[layout](random_bits((8, 6), dtype)))
    again = Odd(LAYOUTS[layout](random_bits((8, 6), dtype, seed=1)))
    strides = again.value.stride()
    save(tmp_path, model=saved)
    load(tmp_path, model=again)
    assert bits(again.value) == bits(saved.value)
    assert again.value.stride() == strides
    plain = Odd(torch.zeros_like(saved.value, memory_format=torch.contiguous_format))
    load(tmp_path, model=plain)
    assert bits(plain.value) == bits(saved.value)


def test_views_of_one_storage_stay_views(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        base = random_bits((6, 4), torch.float32, seed)
        model = nn.Module()
        for name, view in {"whole": base, "rows": base[2:4], "flipped": base.t(), "same": base.view(6, 4)}.items():
            model.register_buffer(name, view)
        return model

    saved, again = build(0), build(1)
    save(tmp_path, model=saved)
    load(tmp_path, model=again)
    for name, value in saved.state_dict().items():
        assert bits(again.state_dict()[name]) == bits(value)
    again.whole.zero_()
    assert not again.rows.any()
    assert not again.flipped.any()


# --- tied -------------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Embedding and head, tied or not; a buffer under two names."""

    def __init__(self, *, tied: bool = True, head_first: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        parts = {"embed": nn.Embedding(11, 8), "head": nn.Linear(8, 11, bias=False)}
        for name in sorted(parts, reverse=head_first):
            self.add_module(name, parts[name])
        self.body = nn.Linear(8, 8)
        self.register_buffer("mask", torch.rand(3))
        self.body.register_buffer("mask", self.mask if tied else self.mask.clone())
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.arange(5) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = Language()
    optimizer = trained(model)
    save(tmp_path, model=model, optimizer=optimizer)
    names = entries(tmp_path)
    assert {"model.embed.weight", "model.mask"} <= names
    assert not {"model.head.weight", "model.body.mask"} & names
    again = Language(seed=1)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.5)
    load(tmp_path, model=again, optimizer=fresh)
    assert again.head.weight is again.embed.weight
    assert again.body.mask is again.mask
    assert {key: bits(each) for key, each in again.state_dict().items()} == {
        key: bits(each) for key, each in model.state_dict().items()
    }
    state = [fresh.state[each] for each in again.parameters()]
    assert all(
        bits(state[0][key]) == bits(optimizer.state[model.embed.weight][key]) for key in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize(("tied", "head_first"), [(True, True), (False, False), (False, True)])
def test_a_model_that_ties_otherwise_gets_the_same_values(tmp_path: Path, tied: bool, head_first: bool) -> None:
    model = Language()
    save(tmp_path, model=model)
    again = Language(tied=tied, head_first=head_first, seed=1)
    load(tmp_path, model=again)
    for key, each in model.state_dict().items():
        assert bits(again.state_dict()[key]) == bits(each)
    assert (again.head.weight is again.embed.weight) is tied


def test_two_tensors_do_not_become_one_in_silence(tmp_path: Path) -> None:
    apart = Language(tied=False)
    save(tmp_path / "other", model=apart)
    with pytest.raises(ShardingError, match=r"model\.head\.weight and model\.embed\.weight are one tensor now"):
        load(tmp_path / "other", model=Language(seed=1))
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    save(tmp_path / "equal", model=apart)
    again = Language(seed=1)
    load(tmp_path / "equal", model=again)
    assert bits(again.head.weight) == bits(apart.embed.weight)


def test_two_models_that_share_a_layer(tmp_path: Path) -> None:
    shared = nn.Linear(3, 3)
    save(tmp_path, actor=nn.Sequential(shared, nn.Linear(3, 1)), critic=nn.Sequential(shared, nn.Linear(3, 2)))
    assert "critic.0.weight" not in entries(tmp_path)
    again = nn.Linear(3, 3)
    load(tmp_path, actor=nn.Sequential(again, nn.Linear(3, 1)), critic=nn.Sequential(again, nn.Linear(3, 2)))
    assert bits(again.weight) == bits(shared.weight)
    alone = nn.Linear(3, 3)
    load(tmp_path, only="critic", critic=nn.Sequential(alone, nn.Linear(3, 2)))
    assert bits(alone.weight) == bits(shared.weight)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_an_export_has_every_name(tmp_path: Path, kind: str) -> None:
    model = Language()
    save(tmp_path / "runs", model=model)
    assert export.main([str(tmp_path / "runs"), "--to", str(tmp_path / "out"), "--format", kind]) == 0
    if kind == "torch":
        state = torch.load(tmp_path / "out", weights_only=True)["model"]
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    else:
        from safetensors.torch import load_file

        state = load_file(tmp_path / "out")
    Language(seed=1).load_state_dict(state)
    assert bits(state["head.weight"]) == bits(model.embed.weight)


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_tied_over_ranks(warm: Warm, tmp_path: Path) -> None:
    """DDP and FSDP2, where a rank may hold nothing of the tensor; from memory and from the disk."""
    for name, found in warm.found(SCRIPT, "tied", tmp_path).items():
        assert found["once"], name
        for source in ("memory", "disk"):
            for each in found[source]:
                assert "error" not in each, each
                assert each["resumed"]["source"] == source
                assert each["tied"], name
                assert each["state"] == found["saved"][0], name


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_parameters_without_gradient_and_an_optimizer_without_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    save(tmp_path / "none", model=model, optimizer=optimizer)
    again = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    again[0].requires_grad_(False)
    fresh = torch.optim.AdamW(again.parameters())
    load(tmp_path / "none", model=again, optimizer=fresh)
    assert fresh.state_dict() == optimizer.state_dict()
    assert [each.requires_grad for each in again.parameters()] == [False, False, True, True]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "half", model=model, optimizer=optimizer)
    load(tmp_path / "half", model=again, optimizer=fresh)
    assert len(fresh.state) == 2
    for one, two in zip(again.parameters(), model.parameters(), strict=True):
        assert bits(one) == bits(two)
        assert {key: bits(each) for key, each in fresh.state[one].items()} == {
            key: bits(each) for key, each in optimizer.state[two].items()
        }


def test_what_was_there_and_is_not_in_the_snapshot_is_gone(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    load(tmp_path, model=model, optimizer=used)
    assert not used.state_dict()["state"]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.1), foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        return model, OPTIMIZERS[name](model.parameters())

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    calm, its_optimizer = build()
    steps(calm, its_optimizer, 0, 6)
    model, optimizer = build()
    steps(model, optimizer, 0, 3)
    save(tmp_path, model=model, optimizer=optimizer)
    again, fresh = build()
    load(tmp_path, model=again, optimizer=fresh)
    steps(again, fresh, 3, 6)
    assert [bits(each) for each in again.parameters()] == [bits(each) for each in calm.parameters()]


# --- what modules make themselves -------------------------------------------------------------------------------------


class Extra(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state.clone() if isinstance(self.state, torch.Tensor) else self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("value", [torch.arange(5.0), {"scale": torch.ones(2), "history": [1, 2.5]}, None])
def test_extra_state(tmp_path: Path, value: Any) -> None:
    save(tmp_path, model=nn.Sequential(Extra(value)))
    again = nn.Sequential(Extra(torch.zeros(5) if isinstance(value, torch.Tensor) else {}))
    load(tmp_path, model=again)
    if isinstance(value, torch.Tensor):
        assert bits(again[0].state) == bits(value)
    elif value is None:
        assert again[0].state is None
    else:
        assert bits(again[0].state["scale"]) == bits(value["scale"])
        assert again[0].state["history"] == value["history"]


def test_what_has_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.eye(3).to_sparse()
    with pytest.raises((StateTypeError, TrackingError), match=r"model\.value.*sparse"):
        save(tmp_path, model=Odd(tensor))
    with pytest.raises((StateTypeError, TrackingError), match=r"thing.*sparse"):
        save(tmp_path / "b", model=nn.Linear(1, 1), thing=Thing(tensor))


class Thing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"here": [self.tensor]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MasterWeights(torch.optim.Optimizer):
    """Keeps float32 weights of bfloat16 parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.float())
            master -= 1e-3 * parameter.grad.float()
            parameter.copy_(master)


@pytest.mark.parametrize("fresh", [True, False])
def test_an_optimizer_s_state_keeps_its_own_type(tmp_path: Path, fresh: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(5, 4).bfloat16()
        return model, MasterWeights(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
        model(torch.ones(2, 5).bfloat16()).sum().backward()
        optimizer.step()
        return [bits(each) for state in optimizer.state.values() for each in state.values()]

    model, optimizer = build()
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    others = build()
    if not fresh:
        train(*others)
    load(tmp_path, model=others[0], optimizer=others[1])
    model.zero_grad()
    others[0].zero_grad()
    assert train(*others) == train(model, optimizer)
