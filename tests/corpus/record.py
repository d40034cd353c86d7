"""Run a fault of faults.toml for real, three ranks over gloo, and keep what the coordinator heard of it.

    python tests/corpus/record.py            every fault
    python tests/corpus/record.py NAME ...   these

Writes recorded/NAME.json: the evidence in order of arrival, places on this machine made neutral. The texts are torch's,
gloo's and Python's own; record again with a new torch and look at what changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded"
TIMEOUT_S = 90
RANKS = 3

RUNNER = """
import sys, msgspec
import holdfast.diagnosis.causes as verdicts
judge = verdicts.judge
def keep(evidence):
    with open(sys.argv[1], "wb") as file:
        file.write(msgspec.json.encode(evidence))
    return judge(evidence)
verdicts.judge = keep
from holdfast.cli import main
sys.exit(main(sys.argv[2:]))
"""


def record(body: str) -> dict[str, object]:
    """The evidence of one run. Raises OSError where nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "train.py").write_text(body)
        (place / "runner.py").write_text(RUNNER)
        line = [sys.executable, "runner.py", "kept.json", "run", "--standalone", "--nproc-per-node", str(RANKS)]
        line += ["--preload", "none", "--log-dir", "logs", "--shutdown-timeout", "8", "train.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(line, cwd=place, env=environment, timeout=TIMEOUT_S, capture_output=True, check=False)
        text = (place / "kept.json").read_text()
    for ours, neutral in neutral_places(folder):
        text = text.replace(ours, neutral)
    evidence: dict[str, object] = json.loads(text)
    return evidence


def neutral_places(folder: str) -> list[tuple[str, str]]:
    host = os.uname().nodename.partition(".")[0]
    site = str(Path(os.__file__).parent)
    packages = next(place for place in sys.path if place.endswith("site-packages"))
    return [
        (folder, "/data/job"),
        (packages, "/opt/venv/lib/python3.11/site-packages"),
        (sys.prefix, "/opt/venv"),
        (str(HERE.parent.parent / "src"), "/opt/venv/lib/python3.11/site-packages"),
        (site, "/usr/lib/python3.11"),
        (f'"host":"{host}"', '"host":"a"'),
        (host, "a"),
    ]


def main(names: list[str]) -> None:
    data = tomllib.loads((HERE / "faults.toml").read_text())
    RECORDED.mkdir(exist_ok=True)
    for name in names or list(data["fault"]):
        fault = data["fault"][name]
        try:
            evidence = record(data["common"] + fault["script"])
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        case = {"culprits": fault["culprits"], "code": fault["code"], "evidence": evidence}
        (RECORDED / f"{name}.json").write_text(json.dumps(case, indent=1) + "\n")
        print(name, len(evidence["failures"]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
