"""The states of random number generators, as plain values: of Python, torch, numpy and CUDA."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Of those that are in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, struct.pack(f"<{len(words)}I", *words), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def set_random_state(state: Mapping[str, Any], place: tuple[int, int] | None) -> None:
    """`place`: None in the same world; otherwise (rank, world), and every rank gets a seed of its own, made from it all."""
    if place is not None:
        rank, world = place
        seed = hashlib.sha256(state["torch"] + f"/{rank}/{world}".encode()).digest()
        random.seed(seed)
        torch.manual_seed(int.from_bytes(seed[:7], "little"))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(list(seed))
        return
    version, packed, gauss = state["python"]
    random.setstate((version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))
