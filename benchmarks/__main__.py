"""The command: run the rows, print the table, write the results."""

from __future__ import annotations

import argparse
import sys

from benchmarks import report
from benchmarks.harness import end_on_signals, run_row
from benchmarks.rows import ALL


def main() -> int:
    end_on_signals()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="holdfast beside torchrun, in turn, on the same scripts"
    )
    names = sorted({name for row in ALL for name in (row.name, row.group) if name})
    parser.add_argument("rows", nargs="*", metavar="NAME", help="rows or groups to run: " + ", ".join(names))
    parser.add_argument("--only", action="append", metavar="NAME", help="the same")
    parser.add_argument("--repeat", type=int, metavar="N", help="at most N repetitions of each")
    parser.add_argument("--no-write", action="store_true", help="print only, write no results")
    options = parser.parse_args()
    only = {*options.rows, *(options.only or ())}
    if unknown := only - set(names):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")

    about = report.facts()
    results = []
    for row in ALL:
        if not row.called(only):
            continue
        print(f"{row.name}: {row.title}", file=sys.stderr, flush=True)
        results.append(run_row(row, options.repeat, lambda text: print(text, file=sys.stderr, flush=True)))
        if not options.no_write:  # now: a later row may fail, or be interrupted
            for path in report.write(results[-1:], about):
                print(f"written: {path}", flush=True)
    print("\n" + report.table(results) + report.errors(results))
    if not options.no_write:
        print("`make fmt` makes docs/measured.md from these files")
    return 0 if all(result.kept(metric) is not False for result in results for metric in result.row.metrics) else 1


if __name__ == "__main__":
    sys.exit(main())
