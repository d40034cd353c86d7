"""`python -m tools.again`: run what failed in the last run of the tests again, each test five times and alone.

Some of the tests break real processes on a busy machine, and one failure in some thousand runs is not seen before it
happens. Continuous integration asks here whether a failure repeats. A test that fails once more, more than three that
failed, or a failure that belongs to no test: the answer is 1. A test that passes is printed all the same: it is a bug
of the product until shown otherwise.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FAILED_MAX = 3
TIMES = 5


def failed_tests(cache: Path) -> list[str]:
    """The tests that failed last, as pytest's cache has them. The names of groups (`test@group`) are left out."""
    try:
        recorded = json.loads((cache / "v/cache/lastfailed").read_text())
    except FileNotFoundError:
        return []
    return [re.sub(r"@[^@\]]+$", "", test) for test in recorded]


def main() -> int:
    """Whether the failures repeat: 1 if they do, or if nothing is known of them."""
    tests = failed_tests(Path(".pytest_cache"))
    if not 0 < len(tests) <= FAILED_MAX:
        print(f"{len(tests)} tests failed; they are run again when they are 1 to {FAILED_MAX}", flush=True)
        return 1
    for test in tests:
        for _ in range(TIMES):
            if subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test], check=False).returncode:
                print(f"failed again: {test}", flush=True)
                return 1
    print(f"UNSTEADY, failed once and passed {TIMES} times, to be mended:", *tests, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
