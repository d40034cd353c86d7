"""The pictures of docs/gallery.md in docs/pictures, from real jobs: the loss over a kill, and the course of a run with three failures.

python -m tools.gallery       # part of `make screenshots`; minutes
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
LIMIT_S = 300
STEPS = 120
KILLED_AT = 70
TRAINING = """
import os, signal, sys, time
import torch
from torch import nn
import holdfast.train as ht

folder, faults = sys.argv[1], dict(part.split(":") for part in sys.argv[2:])
torch.manual_seed(0)
rows = torch.randn(256, 16)
data = [(row, row[:4].sin().sum(0, keepdim=True)) for row in rows]
with ht.process_group() as pg, ht.Snapshots(folder, every=None, memory_every=10) as snaps:
    model = ht.ddp(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = ht.DataLoader(data, batch_size=8, shuffle=True, seed=0)
    state = snaps.track(model=model, optimizer=optimizer, loader=loader)
    snaps.resume()
    began = state.step
    for epoch in state.epochs(1000):
        for inputs, targets in loader:
            if state.step == int(os.environ["STEPS"]):
                sys.exit()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            snaps.step(loss=loss)
            if pg.rank == 0:
                print(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} step {state.step} loss {loss.item():.6f}", flush=True)
            fault = faults.get(os.environ["TORCHELASTIC_RESTART_COUNT"], "")
            if pg.rank == 1 and fault and state.step == began + int(fault[1:]):
                if fault[0] == "k":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault[0] == "e":
                    sys.exit(3)
                raise ValueError("the batch has 7 rows, 8 were expected")
"""
LINE = re.compile(r"life (\d+) step (\d+) loss ([\d.]+)")
WIDTH, HEIGHT, MARGIN = 760, 300, 50
CAUSE_CHARACTERS_MAX = 95
GREY, BLUE, ORANGE, RED, GREEN, INK = "#b0b0b0", "#1f77b4", "#e67e00", "#c0392b", "#2e8b57", "#333333"
COLOURS = {"startup": GREY, "training": GREEN, "lost": ORANGE, "hung": RED, "down": RED, "end": BLUE}
WORDS = {
    "startup": "start",
    "training": "training",
    "lost": "steps that were repeated",
    "hung": "hanging",
    "down": "from a failure to the next step",
    "end": "end",
}


class Dot(NamedTuple):
    """The loss of one step, in one life of the job."""

    life: int
    step: int
    loss: float


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        calm, _ = run(folder / "calm", STEPS)
        killed, _ = run(folder / "killed", STEPS, f"0:k{KILLED_AT}")
        # The faults are in order of the restarts, each some steps after its life began.
        _, report = run(folder / "three", STEPS, "0:r45", "1:k25", "2:e30")
    (PICTURES / "loss-over-a-kill.svg").write_text(loss_picture(calm, killed, KILLED_AT), encoding="utf-8")
    (PICTURES / "three-failures.svg").write_text(course_picture(report), encoding="utf-8")
    print(*sorted(PICTURES.glob("*.svg")), sep="\n")


def run(folder: Path, steps: int, *faults: str) -> tuple[list[Dot], dict[str, Any]]:
    """Run a job of two ranks. Returns its losses, and what `holdfast report` says of it, with the cause of the end of
    each generation that failed."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAINING, encoding="utf-8")
    holdfast = [sys.executable, "-m", "holdfast"]
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=5", f"--log-dir={folder}/logs"]
    command = [*holdfast, "run", *options, str(script), str(folder / "snapshots"), *faults]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (run_folder,) = (folder / "logs").iterdir()
    told = subprocess.run([*holdfast, "report", "--json", str(run_folder)], capture_output=True, text=True, check=True)
    dots = [Dot(int(life), int(step), float(loss)) for life, step, loss in LINE.findall(done.stdout)]
    events = map(json.loads, (run_folder / "events.jsonl").read_text(encoding="utf-8").splitlines())
    causes = {each["generation"]: each["cause"] for each in events if each["event"].endswith("coordinator.verdict")}
    return dots, {**json.loads(told.stdout), "causes": causes}


# --- drawing ----------------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """Maps values onto pixels of one axis."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        return round(self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first), 1)


def loss_picture(calm: Sequence[Dot], killed: Sequence[Dot], killed_at: int) -> str:
    """The loss by step: without a failure, and with a kill of one rank."""
    x = Scale(0, max(each.step for each in calm), MARGIN, WIDTH - 20)
    y = Scale(0, max(each.loss for each in (*calm, *killed)), HEIGHT - MARGIN, 20)
    lines = [
        *axes(x, y, "step", "loss"),
        curve(x, y, calm, GREY, 6),
        f'<line x1="{x.at(killed_at)}" y1="20" x2="{x.at(killed_at)}" y2="{HEIGHT - MARGIN}" stroke="{RED}" stroke-dasharray="4"/>',
        label(x.at(killed_at) + 6, 32, f"rank 1 is killed after step {killed_at}", RED),
    ]
    lives = sorted({each.life for each in killed})
    lines += [
        curve(x, y, [each for each in killed if each.life == life], BLUE if life % 2 == 0 else ORANGE, 1.5)
        for life in lives
    ]
    again = [each.step for each in killed if each.life == lives[-1]]
    lines += [
        label(WIDTH - 270, 62, "grey: the same job without a failure", "#777777"),
        label(WIDTH - 270, 80, "blue: before the kill", BLUE),
        label(WIDTH - 270, 98, f"orange: resumed, from step {min(again)} on", ORANGE),
    ]
    return picture(lines, HEIGHT, "The loss of a job with a kill lies on that of a job without one")


def course_picture(report: Mapping[str, Any]) -> str:
    """The course of a run, from its report: what its time was spent on, and why each generation began."""
    stretches = report["history"]["stretches"]
    zero = stretches[0]["from_epoch_s"]
    x = Scale(0, stretches[-1]["to_epoch_s"] - zero, MARGIN, WIDTH - 20)
    lines, height = [], 70 + 24 * len(report["generations"]) + 40
    for each in stretches:
        left, right = x.at(each["from_epoch_s"] - zero), x.at(each["to_epoch_s"] - zero)
        colour = COLOURS[each["doing"]]
        lines.append(
            f'<rect x="{left}" y="20" width="{max(0.5, round(right - left, 1))}" height="28" fill="{colour}"/>'
        )
    seconds = range(0, int(x.high) + 1, max(1, round(x.high / 10)))
    lines += [label(x.at(second), 64, f"{second} s", INK, "middle") for second in seconds]
    for row, each in enumerate(report["generations"]):
        # Not the reason in the report: that is who reported a failure first, which may be a victim.
        cause = report["causes"].get(each["generation"] - 1, each["why"])
        at, why = x.at(each["began_epoch_s"] - zero), f"after {short(cause)}" if cause else "the start"
        lines.append(f'<line x1="{at}" y1="14" x2="{at}" y2="48" stroke="{INK}"/>')
        lines.append(
            label(
                MARGIN,
                92 + 24 * row,
                f"generation {each['generation']}, at {each['began_epoch_s'] - zero:.1f} s: {why}",
            )
        )
    left = float(MARGIN)
    for doing in dict.fromkeys(each["doing"] for each in stretches):
        lines.append(f'<rect x="{left}" y="{height - 26}" width="12" height="12" fill="{COLOURS[doing]}"/>')
        lines.append(label(left + 17, height - 16, WORDS[doing]))
        left += 40 + 7 * len(WORDS[doing])
    effective = report["history"]["effective"]
    return picture(lines, height, f"The course of a run with three failures; {effective:.0%} of its time was training")


def short(cause: str) -> str:
    """The cause without what is in brackets, as far as a line has room."""
    return shorten(re.sub(r" \([^)]*\)", "", cause), CAUSE_CHARACTERS_MAX, placeholder=" …")


def axes(x: Scale, y: Scale, x_name: str, y_name: str) -> list[str]:
    bottom = HEIGHT - MARGIN
    lines = [f'<path d="M{MARGIN} 20V{bottom}H{WIDTH - 20}" fill="none" stroke="{INK}"/>']
    lines += [label(x.at(step), bottom + 18, str(step), INK, "middle") for step in range(0, int(x.high) + 1, 20)]
    for part in range(5):
        value = y.high * part / 4
        lines.append(label(MARGIN - 6, y.at(value) + 4, f"{value:.1f}", INK, "end"))
    return [*lines, label(WIDTH / 2, HEIGHT - 10, x_name, INK, "middle"), label(8, 14, y_name)]


def curve(x: Scale, y: Scale, dots: Sequence[Dot], colour: str, width: float) -> str:
    points = " ".join(f"{x.at(each.step)},{y.at(each.loss)}" for each in dots)
    assert all(one.step < two.step for one, two in pairwise(dots)), "one life makes each step once"
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def label(x: float, y: float, text: str, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def picture(lines: Sequence[str], height: int, title: str) -> str:
    body = "\n".join(lines)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" role="img">'
    return f"{head}\n<title>{escape(title)}</title>\n{background}\n{body}\n</svg>\n"


if __name__ == "__main__":
    main()
