"""Words for people: a name for a job that has none, and ranges of numbers. PURE.

The run id of a job stays what it is, a UUID as torchrun's. Its spoken name is made of it, so it is the same on all nodes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order, neighbours drawn together.

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


_NOBODYS = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

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
    """`brave-otter` for a UUID; what somebody has named keeps its name.

    >>> spoken("1b4e28ba-2fa1-41d2-883f-0016d3cca427"), spoken("train-7b")
    ('snug-birch', 'train-7b')
    """
    if not _NOBODYS.fullmatch(run_id):
        return run_id
    second, first = divmod(zlib.crc32(run_id.encode()), len(_FIRST))
    return f"{_FIRST[first]}-{_SECOND[second % len(_SECOND)]}"
