"""The pictures of the dashboard in docs/pictures, from a real job that hangs, in Debian's Chromium.

python -m tools.screenshots       # or `make screenshots`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, round_ = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100_000):
    time.sleep(0.05 + 0.03 * (rank == 5))
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and round_ == 0 and step == 60:
        raise ValueError("the batch has 31 rows, 32 were expected")
    if rank == 3 and round_ == 1 and step == 200:
        time.sleep(3600)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
"""
WAIT_S = 300.0


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        script, screen = Path(place, "train.py"), Path(place, "screen.txt")
        script.write_text(SCRIPT)
        line = ["--standalone", "--nproc-per-node=8", "--max-restarts=3", "--dashboard=0", "--rdzv-id=bright-otter"]
        command = [sys.executable, "-m", "holdfast", "run", *line, f"--log-dir={place}/logs", str(script)]
        with screen.open("wb") as file:
            job = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            link = wait_for_link(screen)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
                context = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light")
                page = context.new_page()
                page.goto(link)
                take(page)
                browser.close()
        finally:
            job.terminate()
            job.wait()


def take(page: Page) -> None:
    page.wait_for_selector("text=Hanging", timeout=WAIT_S * 1000)
    page.click("text=Sample now")
    page.wait_for_selector("#stacks pre")
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1500)
    page.screenshot(path=PICTURES / "dashboard.png")
    page.click("#theme")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(1500)
    page.screenshot(path=PICTURES / "dashboard-phone.png")
    print(*sorted(PICTURES.glob("dashboard*.png")), sep="\n")


def wait_for_link(screen: Path) -> str:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = re.search(r"dashboard (http://\S+)", screen.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(screen.read_text())


if __name__ == "__main__":
    main()
