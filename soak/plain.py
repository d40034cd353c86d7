"""A training script without torch, for a short soak: its ranks talk through rank 0 over TCP.

    holdfast run … soak/plain.py SITE

As with torch, a rank that dies makes the others fail, and a network that is cut makes them wait. What it writes down,
and the loop of steps, are in training.py.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import training

LOOK_EVERY_S = 0.05
STATE = b"x" * 20_000
"""About as large as a snapshot of train.py."""


class TcpGroup:
    """Rank 0 listens and writes its address into SITE; the others come to it with their rank."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        generation = "-".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        place = training.SITE / f"meet-{generation}"
        self._peers = self._accept(place) if self.rank == 0 else [self._connect(place)]

    def _accept(self, place: Path) -> list[Any]:
        with socket.create_server(("", 0)) as server:
            fresh = place.with_suffix(".new")
            fresh.write_text(json.dumps([socket.gethostname(), server.getsockname()[1]]))
            fresh.rename(place)
            peers: dict[int, Any] = {}
            while len(peers) < self.world - 1:
                file = server.accept()[0].makefile("rw")
                peers[json.loads(file.readline())] = file
        return list(peers.values())

    def _connect(self, place: Path) -> Any:
        """Until rank 0 is there: an address may be one of an earlier generation that met at the same port."""
        while True:
            try:
                host, port = json.loads(place.read_text())
                file = socket.create_connection((host, port)).makefile("rw")
            except OSError:
                time.sleep(LOOK_EVERY_S)
                continue
            file.write(f"{self.rank}\n")
            file.flush()
            return file

    def _give(self, value: Any) -> None:
        for peer in self._peers:
            peer.write(json.dumps(value) + "\n")
            peer.flush()

    def _take(self) -> list[Any]:
        lines = [peer.readline() for peer in self._peers]
        if not all(lines):
            raise ConnectionError("a peer is gone")
        return [json.loads(line) for line in lines]

    def from_first(self, words: list[str]) -> list[str]:
        if self.rank == 0:
            self._give(words)
            return words
        return list(self._take()[0])

    def summed(self, numbers: list[int]) -> list[int]:
        if self.rank == 0:
            sums = [sum(each) for each in zip(numbers, *self._take(), strict=True)]
            self._give(sums)
            return sums
        self._give(numbers)
        return list(self._take()[0])


class NoModel:
    """The samples are counted by the loop; nothing is computed."""

    def load(self, payload: bytes) -> None:
        assert payload == STATE

    def dump(self) -> bytes:
        return STATE

    def begin(self) -> None:
        """Every rank has it."""

    def train(self, samples: list[int], batch: int, world: int) -> None:
        """Costs nothing."""


if __name__ == "__main__":
    training.run(TcpGroup(), NoModel())
