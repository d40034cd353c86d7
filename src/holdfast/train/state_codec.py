"""State that is not in tensors, as JSON: it is written and read without pickle, and exactly, or refused with an error
that names the value.

    None, bool, int, str, finite floats, lists      as JSON has them
    dicts whose keys are all text                   as JSON objects
    everything else that is known                   {"$kind": …}: tuples, bytes, nan and inf, huge integers, other
                                                    dicts, sets, deques, complex numbers, torch's types, sizes,
                                                    devices, arrays, numpy's numbers, tensors, enums, named tuples

A value comes back as the type that it was, or is refused. Other subclasses of plain types come back as the plain type,
with a warning. Classes of enums and named tuples are not imported: they are those of the running program.

Tensors and numpy arrays are not in the tree: it has their names, and `Encoder.tensors` has them. Knows nothing of
files.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum, EnumType
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.tensor import DTensor

from holdfast.protocol.errors import SnapshotDamagedError, StateTypeError

DEPTH_MAX = 100
PATH_CHARACTERS_MAX = 300
"""Limit of a value's path in a message."""
INTEGER_BITS_MAX = 2000
"""Limit of an integer that is written in decimals: Python refuses to read or write more digits. Larger ones are
hexadecimal."""
ARRAY_KINDS = "biufcSUmM"
"""The kinds of numpy's arrays that can be saved: items of a fixed size that are no objects and have no fields."""
_KIND = "$"


class Encoder:
    """Turns trees of plain values into trees for `json`."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix`: the beginning of the names of tensors."""
        self._prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors to which the trees refer, by name."""

    def encode(self, value: Any, path: str) -> Any:
        """The tree for JSON. Raises StateTypeError with the path of the value that cannot be stored."""
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if value is None or value is True or value is False or type(value) is str:
            return value
        kind = type(value)
        if kind is int:
            return value if value.bit_length() <= INTEGER_BITS_MAX else {"$int": hex(value)}
        if depth > DEPTH_MAX:
            raise StateTypeError(f"{_short(path)}: nested more than {DEPTH_MAX} levels deep")
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._leave(path, value)}
        if kind in (dict, Counter, OrderedDict):
            return self._dict(value, path, depth)
        if kind is list:
            return [self._encode(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        if kind in (tuple, torch.Size):
            items = [self._encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]
            return {"$tuple" if kind is tuple else "$size": items}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        return self._rarer(value, path, depth)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        kind = {Counter: "$counter", OrderedDict: "$ordered"}.get(type(value))
        plain = kind is None and all(type(key) is str and not key.startswith(_KIND) for key in value)
        if plain:
            return {key: self._encode(each, f"{path}[{key!r}]", depth + 1) for key, each in value.items()}
        pairs = [
            [
                # Each with a name of its own: tensors are stored by their names.
                self._encode(key, f"a key of {path} (number {number})", depth + 1),
                self._encode(each, f"{path}[{_named(key)}]", depth + 1),
            ]
            for number, (key, each) in enumerate(value.items())
        ]
        return {kind or "$dict": pairs}

    def _rarer(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            items = enumerate(value)
            encoded = [self._encode(each, f"an item of {path} (number {number})", depth + 1) for number, each in items]
            return {f"${kind.__name__}": encoded}
        if kind is deque:
            return {"$deque": [self._encode(list(value), path, depth), value.maxlen]}
        if kind is complex:
            return {"$complex": [self._encode(each, path, depth) for each in (value.real, value.imag)]}
        if kind in (torch.dtype, torch.device):
            return {f"${kind.__name__}": str(value).removeprefix("torch.")}
        if kind is defaultdict and value.default_factory in _FACTORIES:
            return {"$defaultdict": [_FACTORIES.index(value.default_factory), self._dict(dict(value), path, depth)]}
        if _class_at(_path_of_class(kind)) is kind:
            if isinstance(value, Enum) and value.name in kind.__members__:
                plain = value.value if type(value.value) in (int, str) else None
                return {"$enum": [_path_of_class(kind), value.name, plain]}
            if _is_named(kind):
                return {"$named": [_path_of_class(kind), self._encode(tuple(value), path, depth)]}
        return self._foreign(value, path, depth)

    def _foreign(self, value: Any, path: str, depth: int) -> Any:
        """Values of numpy, recognised by name because numpy may be missing; then values that are nearly plain."""
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            if kind.__name__ == "ndarray" and value.dtype.kind in ARRAY_KINDS:
                # Types that torch lacks go as bytes; their own type's name brings them back.
                raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)
                return {"$array": [self._leave(path, raw), value.dtype.str, list(value.shape)]}
            if kind.__name__ != "ndarray" and value.ndim == 0 and value.dtype.kind in ARRAY_KINDS:
                return {"$number": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        plain = next((each for each in _PLAIN if isinstance(value, each)), None)
        if plain is not None and not (isinstance(value, Enum) and not isinstance(value, (int, str))):
            warnings.warn(
                f"holdfast: {_short(path)}: a {kind.__module__}.{kind.__qualname__} comes back as a plain "
                f"{plain.__name__}; let state_dict() give a {plain.__name__}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._encode(_as_plain(plain, value), path, depth)
        raise StateTypeError(
            f"{_short(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored without pickle\n"
            "let state_dict() give tensors, numbers, text, bytes, lists, tuples, sets and dicts"
        )

    def _leave(self, path: str, tensor: torch.Tensor) -> str:
        check_storable(path, tensor)
        if isinstance(tensor, DTensor):
            raise StateTypeError(
                f"{_short(path)}: a DTensor cannot be stored here, since it would come back as one rank's part alone: "
                "track a module that has it as a parameter or a buffer"
            )
        name = f"{self._prefix}{path}"
        self.tensors[name] = tensor
        return name


def is_array(tensor: torch.Tensor) -> bool:
    """Whether the tensor is an array of items."""
    return not _kind_of(tensor)


def _kind_of(tensor: torch.Tensor) -> str:
    """The kind of a tensor that is not an array of items; empty: it is one."""
    kind = ""
    if torch.nn.parameter.is_lazy(tensor):
        kind = "lazy"  # it has no shape until its module has seen a batch
    elif tensor.is_nested:
        kind = "nested"
    elif tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
    return kind


def check_storable(path: str, tensor: torch.Tensor) -> None:
    """Raise StateTypeError for a tensor that is not an array of items, or whose name cannot be encoded."""
    if kind := _kind_of(tensor):
        raise StateTypeError(f"{_short(path)}: a {kind} tensor cannot be stored")
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            raise StateTypeError(f"{_short(ascii(path))}: the name is not text and cannot be stored") from None


_FACTORIES = (None, int, float, str, bool, list, dict, set, tuple)
"""The factories of defaultdicts that can be saved; a saved state has the index in this list."""
_PLAIN: tuple[type, ...] = (dict, list, tuple, str, int, float, bytes, bytearray)


def _as_plain(plain: type, value: Any) -> Any:
    if plain in (dict, list, tuple):
        return plain(value)
    # The methods of the plain types: a subclass may have others.
    return {str: str.__str__, int: int.__int__, float: float.__float__}.get(plain, plain)(value)


def _path_of_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_at(path: str) -> Any:
    """The class with this path (`_path_of_class`) in the running program; None: it has none. This imports nothing and
    calls nothing."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    return found if isinstance(found, type) else None


def _is_named(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _instance(kind: str, content: Any, get: _Gets) -> Any:
    path, what = content[:2]
    if kind == "$named":
        what = _decode(what, get)
    if get.plain:
        return what if kind == "$named" else what if content[2] is None else content[2]
    found = _class_at(path)
    if kind == "$enum" and isinstance(found, EnumType) and what in found.__members__:
        return found[what]
    if kind == "$named" and _is_named(found) and len(what) == len(found._fields):
        return tuple.__new__(found, what)
    raise StateTypeError(f"the saved state has a {path.replace(':', '.')}, which this program has not (or not so)")


def _number(content: Any, *, plain: bool) -> Any:
    import numpy as np

    dtype, data = np.dtype(content[0]), base64.b64decode(content[1])
    number = np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()
    if not plain:
        return number
    return float(number) if dtype.kind == "f" else number.item()


def _named(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # a huge integer
        return "…"


def _short(path: str) -> str:
    return path if len(path) <= PATH_CHARACTERS_MAX else path[: PATH_CHARACTERS_MAX - 1] + "…"


Get = Callable[[str], torch.Tensor]
"""Gives the tensor of a name."""


class _Gets(NamedTuple):
    tensor: Get
    array: Get
    plain: bool


def decode(tree: Any, tensor: Get, array: Get | None = None, *, plain: bool = False) -> Any:
    """The value of this tree. `tensor` gives the tensor of a name; `array` gives the one of which a numpy array is
    made; None: `tensor` does.

    `plain`: return plain values instead of enums and named tuples, for another program, which lacks their classes, and
    may load without pickle. Raises SnapshotDamagedError for a tree that no Encoder has made; StateTypeError for a class
    that this program does not have."""
    return _decode(tree, _Gets(tensor, array or tensor, plain))


def _decode(tree: Any, get: _Gets) -> Any:
    if isinstance(tree, list):
        return [_decode(each, get) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind.startswith(_KIND):
            return _decode_kind(kind, content, get)
    return {key: _decode(each, get) for key, each in tree.items()}


def _decode_kind(kind: str, content: Any, get: _Gets) -> Any:
    match kind:
        case "$tensor":
            return get.tensor(content)
        case "$tuple" | "$size":
            items = [_decode(each, get) for each in content]
            return torch.Size(items) if kind == "$size" else tuple(items)
        case "$enum" | "$named":
            return _instance(kind, content, get)
        case "$number":
            return _number(content, plain=get.plain)
        case "$defaultdict":
            made = _decode(content[1], get)
            return made if get.plain else defaultdict(_FACTORIES[content[0]], made)
        case "$float":
            return float(content)
        case "$int":
            return int(content, 16)
        case "$bytes" | "$bytearray":
            raw = base64.b64decode(content)
            return bytearray(raw) if kind == "$bytearray" else raw
        case "$array":
            return _array(content, get.array)
        case "$dict" | "$ordered" | "$counter":
            pairs = ((_decode(key, get), _decode(each, get)) for key, each in content)
            if kind == "$counter":
                return Counter(dict(pairs))
            return OrderedDict(pairs) if kind == "$ordered" else dict(pairs)
        case "$set" | "$frozenset":
            members = (_decode(each, get) for each in content)
            return set(members) if kind == "$set" else frozenset(members)
        case "$deque":
            return deque(_decode(content[0], get), content[1])
        case "$complex":
            return complex(*(_decode(each, get) for each in content))
        case "$device":
            return torch.device(content)
        case "$dtype" if isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
    raise SnapshotDamagedError(f"the saved state has a value of the unknown kind {kind!r}")


def _array(content: Any, tensor: Get) -> Any:
    import numpy as np

    name, kind, shape = content
    data = tensor(name).to(torch.uint8).cpu().numpy().tobytes() if 0 not in shape else b""
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape).copy()


def dumps(tree: Any) -> bytes:
    """An encoded tree as text. msgspec makes it, in a tenth of the time of `json`: training waits for this."""
    try:
        return msgspec.json.encode(tree)
    except UnicodeEncodeError:
        # Names of files that are not UTF-8 contain halves of surrogate pairs in Python, which json.loads accepts.
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=loads)
        return text.encode(errors="surrogatepass")


def ready(tree: Any) -> msgspec.Raw:
    """An encoded tree that is serialised once; other trees may contain it."""
    return msgspec.Raw(dumps(tree))


def loads(text: bytes | memoryview) -> Any:
    """Parse an encoded tree. Raises SnapshotDamagedError."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise SnapshotDamagedError(f"the saved state is not readable: {error}") from None


def expect(tree: Any, kind: type, what: str) -> Any:
    """`tree`, which must be a `kind`. Raises SnapshotDamagedError."""
    if not isinstance(tree, kind):
        raise SnapshotDamagedError(f"the saved state's {what} is a {type(tree).__name__}")
    return tree


def section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the saved state; empty if it is missing. Raises SnapshotDamagedError if it is not a table."""
    found: dict[str, Any] = expect(tree.get(name, {}), dict, name)
    return found
