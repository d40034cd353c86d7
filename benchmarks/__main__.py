"""The command: run the rows, print the table, write the results."""

from __future__ import annotations

import argparse
import sys

from benchmarks import report
from benchmarks.harness import run_row
from benchmarks.rows import ALL


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="holdfast beside torchrun, in turn, on the same scripts"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="a row to run (again for more): " + ", ".join(r.name for r in ALL),
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="at most N repetitions of each")
    parser.add_argument("--no-write", action="store_true", help="print only, write no results")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - {row.name for row in ALL}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")

    about = report.facts()
    results = []
    for row in ALL:
        if options.only and row.name not in options.only:
            continue
        print(f"{row.name}: {row.title}", file=sys.stderr, flush=True)
        results.append(run_row(row, options.repeat, lambda text: print(text, file=sys.stderr, flush=True)))
    print("\n" + report.table(results) + report.errors(results))
    if not options.no_write:
        print(f"written: {report.write(results, about)}")
    return 0 if all(result.kept(metric) is not False for result in results for metric in result.row.metrics) else 1


if __name__ == "__main__":
    sys.exit(main())
