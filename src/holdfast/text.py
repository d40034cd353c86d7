"""Converts values to words for messages and back: numbers, times, lists, addresses, a name for a job that has none.

Also reads the tables of texts, TOML files beside the modules that use them. Standard library only; all packages may
import this.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def duration(seconds: float) -> str:
    """A duration in words that fit into a line.

    >>> [duration(s) for s in (0.04, 9.94, 59.7, 200, 7500, 200000)]
    ['0.0 s', '9.9 s', '60 s', '3 min 20 s', '2 h 5 min', '2 d 7 h']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def seconds_of(text: str | float) -> float | None:
    """The seconds of a duration that a person writes: seconds, or a number with a unit; None: not a time above zero.

    >>> [seconds_of(text) for text in ("90s", "2min", "1.5h", "1d", 30, "0", "soon")]
    [90.0, 120.0, 5400.0, 86400.0, 30.0, None, None]
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)\s*", str(text))
        seconds = float(found[1]) * UNITS_S.get(found[2], 0.0) if found else 0.0
    return seconds if 0 < seconds < float("inf") else None


def shortened(text: str, characters_max: int) -> str:
    """The text, of which the end is left out if it is longer than this.

    >>> shortened("short", 5), shortened("longer", 5)
    ('short', 'long…')
    """
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def plural(number: int, word: str) -> str:
    """A number with its noun.

    >>> plural(1, "rank"), plural(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(names: Sequence[object], shown_max: int = 8, *, joint: str = ", ") -> str:
    """The first names, and the number of the others.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], 2)
    ('a, b, c', 'a, b and 1 more')
    """
    more = len(names) - shown_max
    return joint.join(map(str, names[:shown_max])) + (f" and {more} more" if more > 0 else "")


def ranks_text(numbers: Iterable[int]) -> str:
    """Ranks by their numbers.

    >>> ranks_text([1]), ranks_text([0, 1, 3])
    ('rank 1', 'ranks 0-1, 3')
    """
    found = spans(numbers)
    return f"rank {found}" if found.isdecimal() else f"ranks {found}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order, consecutive ones joined to ranges.

    >>> spans([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with its control characters as escapes, except tabs and newlines.

    What a program printed must not move the cursor, clear the screen or reverse the direction of our own lines.

    >>> visible("\\x1b[2Jred\\n")
    '\\\\x1b[2Jred\\n'
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


_PASSWORD, _IN_URL = re.compile(r"(password\s*=\s*)[^,]*"), re.compile(r"(?<=://)[^/@\s,]*@")

PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""A password in an address: `http://u:secret@etcd:2379`. A user alone is none; what is shown has neither."""


def without_passwords(value: str) -> str:
    """An option's value without passwords: those of a list of settings and of addresses.

    >>> without_passwords("user=u,password=secret,timeout=3"), without_passwords("http://u:secret@etcd:2379")
    ('user=u,password=***,timeout=3', 'http://***@etcd:2379')
    >>> without_passwords("user = u, password = secret")
    'user = u, password = ***'
    """
    return _IN_URL.sub("***@", _PASSWORD.sub(r"\1***", value))


def is_loopback(host: str) -> bool:
    """Whether this name or address leads to the machine that uses it.

    >>> [host for host in ("localhost", "127.0.1.1", "::1", "::1%lo", "10.0.0.1", "") if is_loopback(host)]
    ['localhost', '127.0.1.1', '::1', '::1%lo']
    """
    address = host.partition("%")[0]
    return address in ("localhost", "::1") or address.startswith("127.")


_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_FIRST = [
    "able",
    "amber",
    "apt",
    "azure",
    "bold",
    "brave",
    "brisk",
    "bright",
    "calm",
    "candid",
    "clear",
    "clever",
    "cosy",
    "crisp",
    "daring",
    "deft",
    "eager",
    "early",
    "easy",
    "even",
    "fair",
    "fast",
    "fleet",
    "fond",
    "free",
    "fresh",
    "gentle",
    "glad",
    "golden",
    "grand",
    "green",
    "happy",
    "hardy",
    "honest",
    "jolly",
    "keen",
    "kind",
    "lively",
    "loyal",
    "lucky",
    "mellow",
    "merry",
    "mild",
    "neat",
    "nimble",
    "noble",
    "patient",
    "plain",
    "proud",
    "quick",
    "quiet",
    "rapid",
    "ready",
    "serene",
    "sharp",
    "silver",
    "smart",
    "snug",
    "steady",
    "sunny",
    "swift",
    "tidy",
    "vivid",
    "warm",
]
_SECOND = [
    "acorn",
    "badger",
    "beaver",
    "birch",
    "bison",
    "cedar",
    "condor",
    "coral",
    "crane",
    "curlew",
    "deer",
    "dove",
    "eagle",
    "egret",
    "elm",
    "falcon",
    "fern",
    "finch",
    "fox",
    "gazelle",
    "gecko",
    "gull",
    "hare",
    "hawk",
    "hazel",
    "heron",
    "hornet",
    "ibis",
    "jay",
    "kestrel",
    "koala",
    "lark",
    "lemur",
    "lily",
    "linnet",
    "lion",
    "lynx",
    "magpie",
    "maple",
    "marten",
    "mole",
    "moose",
    "newt",
    "oak",
    "orca",
    "osprey",
    "otter",
    "owl",
    "panda",
    "pine",
    "plover",
    "puffin",
    "quail",
    "raven",
    "robin",
    "seal",
    "sparrow",
    "stork",
    "swan",
    "tern",
    "tiger",
    "walnut",
    "willow",
    "wren",
]


def spoken(run_id: str) -> str:
    """A name that people can say, `brave-otter`, for a run id that is a UUID. A name that the user chose stays.

    It is computed from the run id, so it is equal on all nodes.

    >>> spoken("1b4e28ba-2fa1-41d2-883f-0016d3cca427"), spoken("train-7b")
    ('snug-birch', 'train-7b')
    """
    if not _UUID.fullmatch(run_id):
        return run_id
    second, first = divmod(zlib.crc32(run_id.encode()), len(_FIRST))
    return f"{_FIRST[first]}-{_SECOND[second % len(_SECOND)]}"


def read_table(module: str, name: str) -> dict[str, Any]:
    """The table in the TOML file `name`, which is in the same folder as the module's file.

    A text over several lines becomes one line: a line break with the blanks around it counts as one blank. Callers read
    a table on first use, so that no start-up pays for it.
    """
    import tomllib

    return _joined(tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8")))  # type: ignore[no-any-return]


def _joined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_joined(item) for item in value]
    return " ".join(value.split()) if isinstance(value, str) and "\n" in value else value
