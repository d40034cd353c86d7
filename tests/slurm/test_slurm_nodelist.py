"""Slurm's lists of hosts: ours against `scontrol show hostnames`, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.core.errors import EnvironmentValueError
from holdfast.schedulers.slurm_step import HOSTS_MAX, expand

LISTS = [
    *("n1", "n[1-3]", "node[01-03,7]", "a,b[1-2,09-11],c", "r[1-2]n[01-02]"),
    *("n[001-003],m[9-11]", "gpu-a[08-12]", "n[1-2],n4,n[6]"),
]


@pytest.mark.parametrize("text", LISTS)
def test_it_says_what_scontrol_says(text: str, tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    line = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        line,
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")},
        capture_output=True,
        check=True,
    )
    assert list(expand(text)) == done.stdout.decode().split()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", "node7"),
        (" n[1-2] ", "n1 n2"),
        ("n[08-10]", "n08 n09 n10"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("r[0-1]u[1,3]s[8-9]", "r0u1s8 r0u1s9 r0u3s8 r0u3s9 r1u1s8 r1u1s9 r1u3s8 r1u3s9"),  # Slurm orders u before r
        ("n[1-2]-ib", "n1-ib n2-ib"),  # newer than the Slurm that the tests have
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert " ".join(expand(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[",
        "n]",
        "n[[1]]",
        "n[]",
        "n[a-b]",
        "n[3-1]",
        "n[1-]",
        "n[1-99999999]",
        "n[1-300]m[1-300]",
        f"n[0-{HOSTS_MAX}]",
    ],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentValueError):
        expand(text)
