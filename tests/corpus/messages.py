"""Messages with their true cause, in two halves: rules are written against one and judged by the other."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.diagnosis.causes.find import cause_of
from holdfast.protocol.outcome import Failure
from tests.corpus.telling import BECAUSE, HANDLING, HEAD, SITE, TRAIN

FOLDER = Path(__file__).resolve().parent / "messages"
JOINED = {"during": HANDLING, "from": BECAUSE}


@dataclass(frozen=True)
class Message:
    code: str
    failure: Failure

    @property
    def name(self) -> str:
        said = (self.failure.message or self.failure.stderr_tail or "nothing").split("\n")[0]
        return f"{self.code} {said[:60]}"


def messages(half: str) -> list[Message]:
    """All of one half, `learned` or `held_out`."""
    data: dict[str, list[dict[str, Any]]] = tomllib.loads((FOLDER / f"{half}.toml").read_text())
    return [Message(code, _failure(entry)) for code, entries in data.items() for entry in entries]


def right_share(found: list[Message]) -> float:
    return sum(cause_of(each.failure).code == each.code for each in found) / len(found)


def wrong(found: list[Message]) -> list[str]:
    """What was told instead, a line each."""
    told = [(each, cause_of(each.failure)) for each in found]
    return [f"{each.name}: {cause.code} {cause.line[:100]}" for each, cause in told if cause.code != each.code]


def _failure(entry: dict[str, Any]) -> Failure:
    says = entry.get("says", "")
    files = [(TRAIN, "step"), *(_frame(each) for each in entry.get("frames", ()))]
    places = "".join(f'  File "{file}", line 9, in {function}\n    call(x)\n' for file, function in files)
    traceback = f"{HEAD}{places}{says}\n" if says else ""
    if "first" in entry:
        traceback = f"{HEAD}{places}{entry['first']}\n{JOINED[entry.get('how', 'during')]}{traceback}"
    return Failure(
        rank=1,
        local_rank=1,
        host="a",
        pid=4711,
        exit_code=entry.get("exit", 1),
        error_type=says.partition(":")[0].strip() if says else "",
        message=says,
        traceback=traceback,
        stderr_tail=entry.get("stderr", traceback),
        out_of_memory=entry.get("oom", False),
        facts={name: entry[name] for name in ("shm", "hides", "suspended", "unreleased") if name in entry},
    )


def _frame(text: str) -> tuple[str, str]:
    """`requests/adapters.py:send` lies in site-packages, what begins with `/` where it says."""
    file, _, function = text.partition(":")
    return (file if file.startswith("/") else f"{SITE}/{file}"), function
