"""State that is no tensor: back exactly as it was, or refused with its place; and what is kept from one save to the next."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.protocol.errors import SnapshotDamagedError, StateTypeError
from holdfast.train import state_codec as codec
from holdfast.train.state import Collected, Tracker

KEYS = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()), st.just("$tuple")
)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def back(value: Any) -> Any:
    encoder = codec.Encoder("own/0/")
    tree = codec.loads(codec.dumps(encoder.encode(value, "it")))
    return codec.decode(tree, encoder.tensors.__getitem__)


def exact(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(exact(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(exact, one, other))
    return one == other


@settings(max_examples=150)
@given(TREES)
def test_trees_come_back(tree: Any) -> None:
    assert exact(back(tree), tree)


def test_what_json_has_not() -> None:
    assert math.isnan(back(float("nan")))
    assert back([float("inf"), -math.inf]) == [math.inf, -math.inf]
    assert exact(back(Counter({3: 1, 5: 2})), Counter({3: 1, 5: 2}))
    assert exact(back(OrderedDict(b=1, a=2)), OrderedDict(b=1, a=2))
    assert back(np.float64(0.25)) == 0.25
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert back(array).dtype == np.int16
    assert (back(array) == array).all()
    tensor = torch.randn(3)
    assert back({"a": [tensor]})["a"][0] is tensor


class Mode(Enum):
    FAST = object()


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    YES = "yes"


class Pair(NamedTuple):
    one: int
    more: Any = None


class Labels(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64("inf"),
        np.longdouble("0.1"),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.datetime64("2020-01-01"),
        np.str_("text"),
        np.str_(""),
        np.bytes_(b"x"),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        Mode.FAST,
        Level.HIGH,
        Word.YES,
        Pair(1, [Pair(2)]),
        defaultdict(list, {"a": [1], 3: [np.float32(2)]}),
        defaultdict(None),
        {3, "a", (1, 2)},
        frozenset({1.5}),
        set(),
        deque([1, [2]], maxlen=3),
        deque(),
        complex(-0.0, math.inf),
        torch.bfloat16,
        torch.device("cuda", 1),
        {torch.float8_e4m3fn: {frozenset({1}): 2j}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_the_type_that_it_was(value: Any) -> None:
    again = back({"it": [value]})["it"][0]
    assert exact(again, value)
    for attribute in ("default_factory", "dtype", "maxlen"):
        assert getattr(again, attribute, 0) == getattr(value, attribute, 0)
    assert repr(again) == repr(value) or isinstance(value, set)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Labels(a=1), {"a": 1}),
        (defaultdict(lambda: 3, {"a": 1}), {"a": 1}),
        (type("Own", (list,), {})([1]), [1]),
        (type("Own", (int,), {"__int__": lambda _: 5})(3), 3),
        (torch.torch_version.TorchVersion("2.13"), "2.13"),
        (namedtuple("Local", "a b")(1, 2), (1, 2)),  # no name of the program leads to it
    ],
)
def test_what_comes_back_as_another_type_is_said(value: Any, plain: Any) -> None:
    with pytest.warns(RuntimeWarning, match=rf"it\[0\]: a .* comes back as a plain {type(plain).__name__}"):
        again = back([value])
    assert exact(again, [plain])


@pytest.mark.parametrize(
    "tree",
    [
        {"$enum": ["os:system", "true", None]},
        {"$enum": [f"{__name__}:Level", "LOW", 1]},
        {"$named": ["missing.module:Pair", {"$tuple": [1]}]},
        {"$named": [f"{__name__}:Pair", {"$tuple": [1, 2, 3]}]},
        {"$named": [f"{__name__}:Labels", {"$tuple": []}]},
    ],
)
def test_a_class_that_the_program_has_not_is_named(tree: Any) -> None:
    with pytest.raises(StateTypeError, match="which this program has not"):
        codec.decode(tree, {}.__getitem__)


def test_another_program_gets_plain_values() -> None:
    """An export is loaded where the classes are not, and without pickle."""
    value = [
        np.float32(0.5),
        np.longdouble(2),
        Level.HIGH,
        Word.YES,
        Mode.FAST,
        Pair(1, Level.HIGH),
        defaultdict(int, a=1),
    ]
    encoder = codec.Encoder()
    tree = codec.loads(codec.dumps(encoder.encode(value, "it")))
    again = codec.decode(tree, encoder.tensors.__getitem__, plain=True)
    assert exact(again, [0.5, 2.0, 3, "yes", "FAST", (1, 3), {"a": 1}])


def test_a_type_that_torch_has_not() -> None:
    with pytest.raises(SnapshotDamagedError, match="dtype"):
        codec.decode({"$dtype": "load"}, {}.__getitem__)


@pytest.mark.parametrize("at", range(7))
def test_what_json_has_only_in_part(at: int) -> None:
    value = [10**5000, -(1 << 40_000), 2**2000, 2**2000 - 1, {10**5000: 1}, "\ud800", {"\udcff": 1}][at]
    assert exact(back(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["é", "abc"]),
        np.array([1j, 2]),
        np.arange(3, dtype=">i4"),
        np.zeros((0, 3)),
        np.array(2.5),
    ],
)
def test_arrays_of_any_fixed_size(array: Any) -> None:
    found = back({"it": array})["it"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()


@pytest.mark.parametrize("array", [np.array([{}]), np.zeros(2, dtype=[("a", "i4")]), np.ma.masked_array([1, 2])])
def test_arrays_of_objects_are_refused(array: Any) -> None:
    with pytest.raises(StateTypeError, match=r"^it\['a'\]: a numpy\."):
        codec.Encoder().encode({"a": array}, "it")


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (torch.nn.parameter.UninitializedParameter(), "lazy"),
    ],
)
def test_tensors_that_are_no_arrays_are_refused(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(StateTypeError, match=rf"^it\['a'\]: a {kind} tensor"):
        codec.Encoder().encode({"a": tensor}, "it")


def test_names_that_are_no_text() -> None:
    with pytest.raises(StateTypeError, match="the name is not text"):
        codec.check_storable("model.\ud800", torch.ones(1))
    codec.Encoder().encode({"\ud800": torch.ones(1), "é/\n@": torch.ones(1)}, "it")


@pytest.mark.parametrize("value", [object(), len, lambda: None, range(3), Fraction(1, 3), type("Own", (set,), {})()])
def test_what_needs_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(StateTypeError, match=r"^it\['a'\]\[1\]"):
        codec.Encoder().encode({"a": [0, value]}, "it")


def test_a_tree_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StateTypeError, match="levels deep") as told:
        codec.Encoder().encode(endless, "it")
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("text", [b"{", b'{"$strange": 1}', b"\xff"])
def test_damaged_text(text: bytes) -> None:
    with pytest.raises(SnapshotDamagedError):
        codec.decode(codec.loads(text), {}.__getitem__)


# --- what the last save found is used again only while it holds: a tracker says what a new one would say ----------------


EDITS = 60


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Training:
    """A model and an optimizer to which anything may happen."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": [each]} for each in self.model.parameters()], lr=0.1
        )
        self.tracker = self.track()

    def track(self) -> Tracker:
        tracker = Tracker()
        tracker.add({"model": self.model, "optimizer": self.optimizer})
        return tracker

    @property
    def parameter(self) -> nn.Parameter:
        return random.choice([each for group in self.optimizer.param_groups for each in group["params"]])

    @property
    def held(self) -> dict[str, object]:
        return self.optimizer.state[self.parameter]

    def step(self) -> None:
        self.model(torch.ones(2, 2)).sum().backward()
        for parameter, held in list(self.optimizer.state.items()):
            if "step" not in held:
                del self.optimizer.state[parameter]
        self.optimizer.step()

    def set_rate(self) -> None:
        random.choice(self.optimizer.param_groups)["lr"] = random.random()

    def set_rate_as_tensor(self) -> None:
        random.choice(self.optimizer.param_groups)["lr"] = torch.tensor(random.random())

    def forget(self) -> None:
        self.optimizer.state.pop(self.parameter, None)

    def hold_more(self) -> None:
        self.held[random.choice("ab")] = random.choice([1, 2.5, None, "text", torch.ones(2)])

    def hold_a_list(self) -> None:
        self.held["list"] = [0]

    def change_the_list(self) -> None:
        for held in self.optimizer.state.values():
            held.get("list", []).append(torch.ones(1))

    def hold_less(self) -> None:
        self.held.pop(random.choice(["a", "b", "list"]), None)

    def replace_a_moment(self) -> None:
        parameter = self.parameter
        self.optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.shape)

    def change_places(self) -> None:
        one, other = random.choices(self.optimizer.param_groups, k=2)
        one["params"], other["params"] = other["params"], one["params"]

    def move_between_groups(self) -> None:
        groups = self.optimizer.param_groups
        number = random.randrange(1, len(groups))
        if groups[number]["params"]:
            groups[number - 1]["params"].append(groups[number]["params"].pop(0))

    def add_a_buffer(self) -> None:
        self.model.register_buffer(random.choice("xyz"), torch.ones(1))

    def replace_a_buffer(self) -> None:
        self.model[1].running_mean = torch.ones(3)

    def tie(self) -> None:
        self.model[1].running_var = self.model[1].running_mean


def content(collected: Collected) -> tuple[list[tuple[str, int]], list[str], bytes]:
    return (
        [(name, id(tensor)) for name, tensor in collected.shared.items()],
        [f"{name} {tensor.tolist()}" for name, tensor in collected.own.items()],
        collected.text,
    )


def test_whatever_happens_between_two_saves() -> None:
    random.seed(7)
    training = Training()
    edits: list[Callable[[], None]] = [
        getattr(training, name) for name in vars(Training) if name[0] != "_" and callable(vars(Training)[name])
    ]
    edits.remove(training.track)
    assert len(edits) == 14
    for _ in range(EDITS):
        edit = random.choice(edits)
        edit()
        for _ in range(2):
            assert content(training.tracker.collect(0, 1)) == content(training.track().collect(0, 1)), edit


def test_nothing_is_taken_apart_twice_without_a_change() -> None:
    training = Training()
    training.step()
    one, other = training.tracker.collect(0, 1), training.tracker.collect(0, 1)
    training.set_rate()
    training.step()  # its tensors are changed in place
    later = training.tracker.collect(0, 1)
    assert one.shared is other.shared is later.shared
    assert one.text == other.text != later.text


def test_tensors_in_sets_and_as_keys_come_back_each_as_itself() -> None:
    keys = [torch.tensor(1.0), torch.tensor(2.0)]
    assert sorted(each.item() for each in back(set(keys))) == [1.0, 2.0]
    assert {key.item(): value for key, value in back(dict(zip(keys, "ab", strict=True))).items()} == {
        1.0: "a",
        2.0: "b",
    }
