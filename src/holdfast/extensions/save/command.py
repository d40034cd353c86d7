"""`holdfast save`: has all ranks of a running job save at their next safe point."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.asking import ask_job
from holdfast.cli.printing import Parser, SentToNodes, print_json
from holdfast.extensions.save.messages import SAVE_S
from holdfast.protocol.extension import Sent

JSON_FORMS = {"save": ((SentToNodes,),)}


def main_save(argv: Sequence[str]) -> int:
    """Run `holdfast save` with these arguments. Returns 0 when all ranks will save. Raises HoldfastError."""
    chosen = save_parser().parse_args(argv)
    entry, answer = ask_job(chosen.run, "save", Sent, within_s=SAVE_S)
    if chosen.json:
        print_json({"run": entry.name, "nodes": answer.nodes})
    else:
        print(f"{entry.name}: all ranks save at their next safe point, and go on")
    return 0


def save_parser() -> Parser:
    made = Parser(
        prog="holdfast save",
        description="Have all ranks of a running job save to the disk at their next safe point, and go on. "
        "The script needs ht.Snapshots, or holdfast.worker.should_save().",
    )
    made.add_run()
    made.add_json()
    return made
