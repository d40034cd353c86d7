"""No torch: writes BENCH_LINES lines of 100 bytes to stdout, each with its rank and number."""

import os
import sys

LINES = int(os.environ["BENCH_LINES"])
RANK = int(os.environ["RANK"])
FILLER = "x" * 100

out = sys.stdout.buffer
for first in range(0, LINES, 1000):
    out.write(
        b"".join(f"line {RANK} {number:08d} {FILLER}"[:99].encode() + b"\n" for number in range(first, first + 1000))
    )
out.flush()
