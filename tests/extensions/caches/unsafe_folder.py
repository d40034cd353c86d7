"""Folders into which another user could put what workers would execute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FAULTS = ("others write", "link", "file", "others own it")


def make_unsafe(folder: Path, fault: str, *, mode: int = 0o770) -> None:
    """Make the folder with one of the FAULTS. `mode`: its mode if others write."""
    if fault == "others write":
        folder.mkdir()
        folder.chmod(mode)
    elif fault == "link":
        elsewhere = folder.with_name("elsewhere")
        elsewhere.mkdir(mode=0o700)
        folder.symlink_to(elsewhere)
    elif fault == "file":
        folder.write_text("")
    elif os.geteuid() == 0:
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
    else:
        pytest.skip("only root can give a folder to another user")
