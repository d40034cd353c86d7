"""A slow cable, for kernels without netem: every frame arrives later, in both directions.

    python delayline.py CABLE BRIDGE DELAY_MS JITTER_MS      in the network namespace of the bridge

Moves the cable to a bridge of its own and joins the two bridges by two TAP devices, between which the frames wait. TAPs
make the kernel finish checksums and segments in software, which raw sockets on a veth would not. On SIGTERM all is
put back.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES_MAX = 70_000
BURST = 64


def ip(*words: str) -> None:
    subprocess.run(["ip", "link", *words], check=True)


def tap(name: str, bridge: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    ip("set", name, "txqueuelen", "5000", "master", bridge, "up")
    return fd


def carry(ends: tuple[int, int], delay_s: float, jitter_s: float) -> None:
    """For ever. Frames of one direction keep their order."""
    waiting: list[tuple[float, int, int, bytes]] = []
    last_s = dict.fromkeys(ends, 0.0)
    number = 0
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, out, frame = heapq.heappop(waiting)
            try:
                os.write(out, frame)
            except OSError:  # the cable is out: lost, as on any cable
                continue
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], pause_s)
        for fd in ready:
            out = ends[1] if fd == ends[0] else ends[0]
            for _ in range(BURST):
                try:
                    frame = os.read(fd, FRAME_BYTES_MAX)
                except BlockingIOError:
                    break
                last_s[out] = max(last_s[out], time.monotonic() + delay_s + random.uniform(-jitter_s, jitter_s))
                number += 1
                heapq.heappush(waiting, (last_s[out], number, out, frame))


def main() -> None:
    cable, bridge, delay_ms, jitter_ms = sys.argv[1:]
    own = f"b{cable}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ip("add", own, "type", "bridge")
    try:
        ip("set", own, "up")
        ends = (tap(f"i{cable}", own), tap(f"o{cable}", bridge))
        ip("set", cable, "master", own)
        carry(ends, float(delay_ms) / 1e3, float(jitter_ms) / 1e3)
    finally:
        ip("set", cable, "master", bridge)
        ip("del", own)


if __name__ == "__main__":
    main()
