"""Says a few lines on both streams; with `fail`, the first try of rank 0 ends with 3."""

import os
import sys

rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
    for line in range(3):
        print(f"{name} of {rank} try {again}, line {line}", file=stream)
    print(f"a {name} to keep, with commas: 1,2", file=stream)
    print("", file=stream)
    stream.flush()
    stream.buffer.write(b"no text: \xff\xfe\n")
    print(f"{name} ends without a newline", file=stream, end="")
if "fail" in sys.argv and again == "0":
    sys.exit(3)
