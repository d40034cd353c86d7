"""State that is no tensor, as JSON: written and read without pickle, exactly, or refused with the place named.

    None, bool, int, str, finite floats, lists      as JSON has them
    dicts whose keys are all text                   as JSON objects
    everything else that is known                   {"$kind": …}: tuples, bytes, nan and inf, huge integers, other dicts,
                                                    sets, deques, complex numbers, torch's types and devices, arrays, tensors

Tensors and numpy arrays leave the tree: it keeps their names, `Encoder.tensors` has them. Knows nothing of files.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from holdfast.core.errors import SnapshotDamagedError, StateTypeError

DEPTH_MAX = 100
PATH_CHARACTERS_MAX = 300
"""Of a place in a message."""
INTEGER_BITS_MAX = 2000
"""As decimals; Python refuses to read or write numbers of many digits so. Larger ones are hexadecimal."""
ARRAY_KINDS = "biufcSUmM"
"""Of numpy's arrays: items of a fixed size that are no objects and have no fields."""
_KIND = "$"


class Encoder:
    """Turns trees of plain values into what `json` writes."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix` stands before the names of tensors."""
        self._prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}
        """What the trees refer to, by name."""

    def encode(self, value: Any, path: str) -> Any:
        """The tree for JSON. StateTypeError names the path of what cannot be stored."""
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if value is None or value is True or value is False or type(value) is str:
            return value
        if type(value) is int:
            return value if value.bit_length() <= INTEGER_BITS_MAX else {"$int": hex(value)}
        if depth > DEPTH_MAX:
            raise StateTypeError(f"{_short(path)}: nested more than {DEPTH_MAX} levels deep")
        if isinstance(value, float):
            value = float(value)  # numpy's float64 is one, too
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._leave(path, value)}
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if type(value) is list:
            return [self._encode(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        if isinstance(value, tuple):  # torch.Size and named tuples come back as plain ones
            return {"$tuple": [self._encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, (int, str)):  # IntEnum, StrEnum …
            return self._encode(int(value) if isinstance(value, int) else str.__str__(value), path, depth)
        return self._rarer(value, path, depth)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        kind = {Counter: "$counter", OrderedDict: "$ordered"}.get(type(value))
        plain = kind is None and all(type(key) is str and not key.startswith(_KIND) for key in value)
        if plain:
            return {key: self._encode(each, f"{path}[{key!r}]", depth + 1) for key, each in value.items()}
        pairs = [
            [self._encode(key, f"a key of {path}", depth + 1), self._encode(each, f"{path}[{_named(key)}]", depth + 1)]
            for key, each in value.items()
        ]
        return {kind or "$dict": pairs}

    def _rarer(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            return {f"${kind.__name__}": [self._encode(each, f"an item of {path}", depth + 1) for each in value]}
        if kind is deque:
            return {"$deque": [self._encode(list(value), path, depth), value.maxlen]}
        if kind is complex:
            return {"$complex": [self._encode(each, path, depth) for each in (value.real, value.imag)]}
        if kind in (torch.dtype, torch.device):
            return {f"${kind.__name__}": str(value).removeprefix("torch.")}
        return self._foreign(value, path)

    def _foreign(self, value: Any, path: str) -> Any:
        """numpy's, known by their names: numpy itself may not be there."""
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            if kind.__name__ == "ndarray" and value.dtype.kind in ARRAY_KINDS:
                # Types that torch lacks go as bytes; their own type's name brings them back.
                raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)
                return {"$array": [self._leave(path, raw), value.dtype.str, list(value.shape)]}
            if value.ndim == 0 and value.dtype.kind in "biuf":
                return self._encode(value.item(), path, 0)
        raise StateTypeError(
            f"{_short(path)}: a {kind.__module__}.{kind.__qualname__} cannot be stored without pickle\n"
            "let state_dict() give tensors, numbers, text, bytes, lists, tuples, sets and dicts"
        )

    def _leave(self, path: str, tensor: torch.Tensor) -> str:
        check_storable(path, tensor)
        name = f"{self._prefix}{path}"
        self.tensors[name] = tensor
        return name


def check_storable(path: str, tensor: torch.Tensor) -> None:
    """StateTypeError for a tensor that is no array of items, or whose name is no text."""
    kind = ""
    if torch.nn.parameter.is_lazy(tensor):
        kind = "lazy"  # until its module has seen a batch
    elif tensor.is_nested:
        kind = "nested"
    elif tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
    if kind:
        raise StateTypeError(f"{_short(path)}: a {kind} tensor cannot be stored")
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            raise StateTypeError(f"{_short(ascii(path))}: the name is not text and cannot be stored") from None


def _named(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # a huge integer
        return "…"


def _short(path: str) -> str:
    return path if len(path) <= PATH_CHARACTERS_MAX else path[: PATH_CHARACTERS_MAX - 1] + "…"


_Get = Callable[[str], torch.Tensor]


def decode(tree: Any, tensor: _Get, array: _Get | None = None) -> Any:
    """The value again; `tensor` gives the tensor of a name, `array` (if it is another) the one that a numpy array is made of.

    SnapshotDamagedError for a tree that is none of ours.
    """
    return _decode(tree, (tensor, array or tensor))


def _decode(tree: Any, get: tuple[_Get, _Get]) -> Any:
    if isinstance(tree, list):
        return [_decode(each, get) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind.startswith(_KIND):
            return _decode_kind(kind, content, get)
    return {key: _decode(each, get) for key, each in tree.items()}


def _decode_kind(kind: str, content: Any, get: tuple[_Get, _Get]) -> Any:
    match kind:
        case "$tensor":
            return get[0](content)
        case "$tuple":
            return tuple(_decode(each, get) for each in content)
        case "$float":
            return float(content)
        case "$int":
            return int(content, 16)
        case "$bytes":
            return base64.b64decode(content)
        case "$array":
            return _array(content, get[1])
        case "$dict" | "$ordered" | "$counter":
            pairs = ((_decode(key, get), _decode(each, get)) for key, each in content)
            if kind == "$counter":
                return Counter(dict(pairs))
            return OrderedDict(pairs) if kind == "$ordered" else dict(pairs)
        case "$set" | "$frozenset":
            items = (_decode(each, get) for each in content)
            return set(items) if kind == "$set" else frozenset(items)
        case "$deque":
            return deque(_decode(content[0], get), content[1])
        case "$complex":
            return complex(*(_decode(each, get) for each in content))
        case "$device":
            return torch.device(content)
        case "$dtype" if isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
    raise SnapshotDamagedError(f"the saved state has a value of the unknown kind {kind!r}")


def _array(content: Any, tensor: _Get) -> Any:
    import numpy as np

    name, kind, shape = content
    data = tensor(name).to(torch.uint8).cpu().numpy().tobytes() if 0 not in shape else b""
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape).copy()


def dumps(tree: Any) -> bytes:
    """An encoded tree as text. By msgspec, which takes a tenth of the time of `json`: training waits for it."""
    try:
        return msgspec.json.encode(tree)
    except UnicodeEncodeError:
        # Names of files that are not UTF-8 have halves of surrogate pairs in Python; json.loads takes them so.
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=loads)
        return text.encode(errors="surrogatepass")


def ready(tree: Any) -> msgspec.Raw:
    """An encoded tree, written once: it may stand in other trees."""
    return msgspec.Raw(dumps(tree))


def loads(text: bytes | memoryview) -> Any:
    """An encoded tree from text. SnapshotDamagedError."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise SnapshotDamagedError(f"the saved state is not readable: {error}") from None


def expect(tree: Any, kind: type, what: str) -> Any:
    """`tree`, which must be a `kind`. SnapshotDamagedError."""
    if not isinstance(tree, kind):
        raise SnapshotDamagedError(f"the saved state's {what} is a {type(tree).__name__}")
    return tree


def section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the saved state, empty when it has none."""
    found: dict[str, Any] = expect(tree.get(name, {}), dict, name)
    return found
