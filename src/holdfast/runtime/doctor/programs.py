"""Programs that the doctor asks: torch in a process of its own, nvidia-smi. Runs them and reads their answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.doctor import Gpu, TorchFacts, TorchState
from holdfast.runtime.doctor.bounded import run_bounded

CHECKUP = str(Path(__file__).resolve().parents[2] / "train" / "checkup.py")
SMI_S_MAX = 15.0
ERROR_CHARS_MAX = 400

SMI_FIELDS = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,uuid"
USER_FIELDS = "gpu_uuid,pid,process_name,used_memory"


async def ask_torch(python: str, limit_s: float) -> TorchFacts:
    """Imports it in a process of its own: whatever happens there, crash or hang, is an answer."""
    began = time.monotonic()
    try:
        done = await run_bounded([python, CHECKUP, "facts"], limit_s)
    except OSError as fault:
        return TorchFacts(state=TorchState.BROKEN, error=f"{python}: {fault.strerror}")
    seconds = time.monotonic() - began
    if done.code is None:
        return TorchFacts(state=TorchState.SILENT, seconds=seconds)
    told = last_json(done.out)
    if told is None:
        last = next((line for line in reversed(done.err.splitlines()) if line.strip()), "no word")
        error = f"its process ended with {done.code}: {last.strip()[:ERROR_CHARS_MAX]}"
        return TorchFacts(state=TorchState.BROKEN, error=error, seconds=seconds)
    error = str(told.get("error", ""))
    if error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return TorchFacts(state=TorchState.ABSENT, seconds=seconds)
    if error:
        return TorchFacts(state=TorchState.BROKEN, error=error[:ERROR_CHARS_MAX], seconds=seconds)
    try:
        return msgspec.convert({**told, "state": "ok", "seconds": seconds}, TorchFacts)
    except msgspec.ValidationError as invalid:
        return TorchFacts(state=TorchState.BROKEN, error=f"an odd answer: {invalid}", seconds=seconds)


def last_json(text: str) -> dict[str, Any] | None:
    """The object in the last line: what a sitecustomize prints before it is nobody's business."""
    for line in reversed(text.splitlines()):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict):
            return told
    return None


async def ask_smi() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs and their users, or why nvidia-smi does not know. Without the program: nothing, and no error."""
    try:
        done = await run_bounded(["nvidia-smi", f"--query-gpu={SMI_FIELDS}", *CSV], SMI_S_MAX)
    except OSError:
        return (), ""
    if done.code is None:
        return (), f"no answer within {SMI_S_MAX:g} s"
    if done.code != 0:
        said = (done.out.strip() or done.err.strip() or f"exit code {done.code}").splitlines()[0]
        return (), "" if "No devices were found" in said else said[:ERROR_CHARS_MAX]
    try:
        users = await run_bounded(["nvidia-smi", f"--query-compute-apps={USER_FIELDS}", *CSV], SMI_S_MAX)
    except OSError:
        return read_gpus(done.out, ""), ""
    return read_gpus(done.out, users.out if users.code == 0 else ""), ""


CSV = ("--format=csv,noheader,nounits",)


def read_gpus(text: str, users: str) -> tuple[Gpu, ...]:
    """nvidia-smi's tables to GPUs. `[N/A]` and the like are None."""
    by_uuid: dict[str, list[str]] = {}
    for line in users.splitlines():
        uuid, pid, program, used = (word.strip() for word in [*line.split(","), "", "", ""][:4])
        if uuid and pid:
            by_uuid.setdefault(uuid, []).append(f"pid {pid} {program.rpartition('/')[2]}, {used} MiB")
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) < 7 or not words[0].isdecimal():
            continue
        gpus.append(
            Gpu(
                index=int(words[0]),
                name=words[1],
                driver=words[2],
                memory_total_mib=number(words[3]),
                memory_used_mib=number(words[4]),
                ecc_errors=number(words[5]),
                users=tuple(by_uuid.get(words[6], ())),
            )
        )
    return tuple(gpus)


def number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
