"""Files, folders, disks, locks and descriptors."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

from .parts import every, one, rank


@one(1, "HF217", says="/datasets/imagenet/train")
def folder_missing() -> None:
    os.listdir("/datasets/imagenet/train")


@one(1, "HF217 HF201", says="IsADirectoryError")
def folder_in_place_of_a_file() -> None:
    open(tempfile.mkdtemp(prefix="holdfast-bench-"), "rb").close()


@one(0, "HF217")
def mount_is_stale() -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/team/shards/00017.bin")


@one(1, "HF217")
def disk_cannot_be_read() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@one(1, "HF218", says="/root")
def not_my_folder() -> None:
    folder = Path("/root") if os.geteuid() == 0 else Path("/proc/1/fd")
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    (folder / "checkpoint-100").mkdir()


@one(0, "HF218")
def mounted_read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/opt/models/step-10/model.bin")


def small_disk() -> Path:
    """A disk of 256 KiB that this process alone sees, or the folder of /dev/full's kind where it may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        raise OSError(ctypes.get_errno(), "no mount of its own")
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=256k"):
        raise OSError(ctypes.get_errno(), "no tmpfs")
    return folder


@one(1, "HF214")
def disk_full() -> None:
    with (small_disk() / "train.log").open("w") as file:
        for step in range(100_000):
            file.write(f"step {step} loss 2.31\n")


@one(0, "HF214")
def save_of_torch_on_a_full_disk() -> None:
    import torch

    torch.save({"weight": torch.zeros(400, 400)}, small_disk() / "model.pt")


@one(1, "HF214")
def save_of_safetensors_on_a_full_disk() -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(400, 400)}, small_disk() / "model.safetensors")


@one(1, "HF214")
def file_larger_than_allowed() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 100_000)
        file.flush()


@one(1, "HF214")
def quota_used_up() -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/scratch/hub/blobs/ab12.incomplete")


@one(1, "HF230")
def sockets_use_up_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = [socket.socket() for _ in range(1000)]
    print(len(kept))


@one(1, "HF230")
def pipes_use_up_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    kept = [subprocess.Popen(["sleep", "5"], stdin=subprocess.PIPE) for _ in range(100)]
    print(len(kept))


@every("1", "HF201", says="could not be acquired")
def lock_is_held() -> None:
    from filelock import FileLock

    lock = FileLock(Path(tempfile.gettempdir(), "cache.lock"))
    if rank() == 0:
        with lock:
            time.sleep(30)
    time.sleep(1)
    lock.acquire(timeout=0.5)


@one(1, "HF201", says="no such table")
def table_missing() -> None:
    sqlite3.connect(":memory:").execute("select * from samples")


@one(1, "HF201", says="CalledProcessError")
def child_fails() -> None:
    subprocess.run(["sh", "-c", "exit 3"], check=True)


@one(1, "HF217 HF202 HF201", says="ffmpeg-of-ours")
def program_missing() -> None:
    subprocess.run(["ffmpeg-of-ours", "-i", "a.mp4"], check=True)
