"""Threads are tried before a job starts, on machines of each kind."""

from __future__ import annotations

import threading

import pytest

from holdfast.inherited import provide_processes

STACK_BYTES_MIN = 128 * 1024
"""PTHREAD_STACK_MIN of aarch64; of x86_64 it is 16 KiB."""


def test_threads_are_tried_where_each_needs_a_larger_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job started on aarch64: it asked for 64 KiB, which is refused there."""
    real, asked = threading.stack_size, []

    def of_aarch64(size: int = 0) -> int:
        asked.append(size)
        if 0 < size < STACK_BYTES_MIN:
            raise ValueError(f"size not valid: {size} bytes")
        return real(size)

    before = real()
    monkeypatch.setattr(threading, "stack_size", of_aarch64)
    provide_processes(2)
    assert len(asked) == 2
    assert real() == before
