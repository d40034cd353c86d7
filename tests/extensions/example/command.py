"""The command: prints the folder of each host."""

from __future__ import annotations

from holdfast.cli.asking import ask_job
from tests.extensions.example.messages import Folders


def main_where(argv: list[str]) -> int:
    _, answer = ask_job(argv[0] if argv else None, "where", Folders)
    for host, folder in sorted(answer.folders.items()):
        print(f"{host}: {folder}")
    return 0
