"""A worker that logs as many megabytes a second as it is told to: the training script of the patience soak.

    holdfast run … soak/chatty.py SITE      SITE/rate holds megabytes a second; SITE/finish ends it well

Standard library only. What it has written so far is kept in SITE/written-HOST, beside the disk under the logs.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

LINE = b"step 123456 loss 0.123456789 " + b"x" * 98 + b"\n"
CHUNK = LINE * 2048
ROUND_S = 0.1


def main() -> None:
    site = Path(sys.argv[1])
    account = os.open(site / f"written-{socket.gethostname()}", os.O_WRONLY | os.O_CREAT)
    written, round_begins_s = 0, time.monotonic()
    while not (site / "finish").exists():
        owed = float((site / "rate").read_text() or 0.0) * 1e6 * ROUND_S
        while owed > 0:
            done = os.write(1, CHUNK[: round(owed)])
            written, owed = written + done, owed - done
        os.pwrite(account, f"{written:020d}\n".encode(), 0)
        round_begins_s = max(round_begins_s + ROUND_S, time.monotonic() - ROUND_S)
        time.sleep(max(0.0, round_begins_s - time.monotonic()))


if __name__ == "__main__":
    main()
