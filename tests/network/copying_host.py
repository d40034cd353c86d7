"""Savers of copies, without torch: copying_host.py receive FOLDER ADDRESSES | send FOLDER ADDRESSES PORT | fetch …

`receive` prints its port. `send` stages and sends one state after the other until it is killed, and prints each
`snapshot_copy`. `fetch` fetches rank 0's state of a step, and prints from where. `addresses FOLDER MASTER` prints what
this host offers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from holdfast.train.snapshots import copy_connection
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.copy_connection import CopyPaths
from holdfast.train.snapshots.copy_service import CopyService, fetch
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.slots import COUNT_MAX, SlotOwner, Slots, lend

KEY = b"k" * 32
SIZE = 3 << 20
STALL_S = 3.0


def send(folder: Path, to: tuple[str, int], key: bytes) -> None:
    service, slots = CopyService(folder, Mappings()), Slots(folder, SlotOwner(0, 0, 2, 1), COUNT_MAX)
    service._key = key
    keep: tuple[int, int, int] | None = None

    def tell(said: dict[str, object]) -> None:
        nonlocal keep
        keep = keep if said["why"] else (step, 7, step)
        print(json.dumps(said), flush=True)

    for step in range(1, 100_000):
        memory = slots.stage(step, SIZE)
        assert memory is not None
        memory[:] = bytes([step % 251]) * SIZE
        slot = slots.commit(SaveRequest("/runs", step, 7, 0, 2, {"save": step}))
        assert slot.request is not None
        about = {
            "sequence": slot.sequence,
            "request": slot.request.to_json(),
            "beside": "",
            "to": list(to),
            "keep": keep,
        }
        service.sending(about, [lend(slot)])(tell)
        time.sleep(0.1)


def main(what: str, folder: Path, hosts: str, port: str = "0", key: str = "") -> None:
    copy_connection.STALL_S = copy_connection.SAMPLE_S_MAX = STALL_S
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if what == "addresses":
        from holdfast.train.copies import own_addresses

        os.environ["MASTER_ADDR"] = hosts
        print(own_addresses())
        return
    of = hosts.replace(",", " "), int(port)
    if what == "receive":
        print(CopyService(folder, Mappings()).serve(KEY, of[0], 0), flush=True)
        time.sleep(600)
    elif what == "send":
        send(folder, of, key.encode() or KEY)
    else:
        paths = CopyPaths()
        print(paths.fastest(of, KEY)[0])
        fetch(folder, of, KEY, "/runs", (int(key), 7, int(key)), 0, paths=paths)


main(*[Path(each) if at == 1 else each for at, each in enumerate(sys.argv[1:])])  # type: ignore[arg-type]
