"""The campaign of `make gpu`, with parts of a few lines: one that fails, or hangs, costs no other."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from benchmarks.gpu import packages, results
from tests.conftest import alive
from tests.support.limits import limit_s

RUN = """
import json, sys
from pathlib import Path
from benchmarks.gpu import results
from benchmarks.gpu.campaign import Part, run

deadlines_s, budget_s, folder = json.loads(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
about = {"device": "cuda", "date": "2026-11-26T17:00:00Z", "commit": "abc", "seconds": "1", "installed": "Nothing."}
parts = [Part(name, name, deadline_s, shows=f"what {name} shows") for name, deadline_s in deadlines_s.items()]
run(parts, {"GPU_PARTS": "tests.support.gpu_parts", "GPU_DEVICE": "cpu"}, folder / "work", budget_s,
    lambda found: results.write(found, about, folder / str(len(found))))
"""


def campaign(folder: Path, *, budget_s: float = 1e6, **deadlines_s: float) -> list[dict[str, object]]:
    """The results of the parts of these names, as they are written after the last one."""
    line = [sys.executable, "-c", RUN, json.dumps(deadlines_s), str(budget_s), str(folder)]
    done = subprocess.run(line, cwd=packages.ROOT, capture_output=True, text=True, timeout=limit_s(100))
    assert done.returncode == 0, done.stderr
    (path,) = (folder / str(len(deadlines_s))).glob("*.json")
    parts: list[dict[str, object]] = json.loads(path.read_text())["parts"]
    return parts


def notes(part: dict[str, object]) -> dict[str, object]:
    return {each["name"]: each.get("value", each.get("text")) for each in part["notes"]}  # type: ignore[attr-defined]


def test_a_part_that_fails_and_one_that_cannot_run_cost_no_other(tmp_path: Path) -> None:
    fails, cannot, works = campaign(tmp_path, fails=limit_s(30), cannot=limit_s(30), works=limit_s(30))
    assert (fails["ended"], cannot["ended"], works["ended"]) == ("FAILED", "not possible here", "done")
    assert notes(fails) == {"before the failure": 2.0}
    assert "what was resumed is not what was saved" in str(fails["error"])
    assert notes(cannot) == {"reason": "8 GPUs are needed"}
    assert notes(works) | {"left behind": 0} == {"left behind": 0, "figure": 1.5, "found": "something"}
    assert not alive(int(str(notes(works)["left behind"]).partition(".")[0]))
    written = [sorted(path.name for path in (tmp_path / number).iterdir()) for number in "123"]
    assert written == [["gpu-cuda.json", "gpu-cuda.md"]] * 3, "the results are there after each part"
    page = (tmp_path / "3" / "gpu-cuda.md").read_text()
    ran, _, missing = page.partition("Not shown by this run:")
    assert "- what works shows\n" in ran
    assert "- what fails shows: FAILED\n- what cannot shows: not possible here\n" in missing


def test_a_part_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    # Until its deadline the first one has to have come to where it hangs. All of that time is waited.
    hangs, works = campaign(tmp_path, hangs=limit_s(3), works=limit_s(60))
    assert (hangs["ended"], works["ended"]) == ("HUNG", "done")
    assert not alive(int(str(notes(hangs)["left behind"]).partition(".")[0]))
    assert "in wait_for_ever" in str(hangs["error"]), "the stacks say where it hung"


def test_a_part_for_which_no_time_is_left_is_not_started(tmp_path: Path) -> None:
    (works,) = campaign(tmp_path, works=30, budget_s=1)
    assert works["ended"] == "not started: no time was left"
    assert not works["notes"]


def test_what_is_missing_and_not_in_the_folder_of_wheels_ends_the_campaign_in_one_line(tmp_path: Path) -> None:
    lacks = "from benchmarks.gpu import packages\npackages.NEEDED = ('no-such-package-of-holdfast',)\n"
    line = f"{lacks}from benchmarks.gpu.__main__ import main\nimport sys\nsys.argv[1:] = ['--device', 'cpu']\nsys.exit(main())"
    environ = {**os.environ, "PYTHONPATH": str(packages.ROOT)}
    done = subprocess.run([sys.executable, "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first.startswith("make gpu: no-such-package-of-holdfast: not installed from ")
    assert first.endswith("run `make gpu-wheels` where there is a network")


def test_what_only_a_gpu_runs_can_be_compiled() -> None:
    """Nobody notices otherwise: the scripts in these tests are texts, and run on no machine of ours."""
    scripts = [path.read_text() for path in (packages.ROOT / "benchmarks" / "gpu").rglob("*.py")]
    for path in (packages.ROOT / "tests" / "gpu").glob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        scripts += [textwrap.dedent(each) for each in texts if isinstance(each, str) and "\n    import " in each]
    assert sum("init_process_group" in each or "process_group(" in each for each in scripts) > 3
    for each in scripts:
        compile(each, "script", "exec")


def test_the_device_names_the_files_of_the_results() -> None:
    assert results.name_of({"device": "NVIDIA H100 80GB HBM3"}, []) == "h100-80gb-hbm3"
