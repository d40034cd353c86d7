"""The page in a real browser, on made-up jobs: each of its elements, both themes, from telephone to wall."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cli import main
from holdfast.dashboard.job_source import ShownJob
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.protocol.rank_progress import Frame, RankStack, StacksView, Stage
from tests.dashboard.test_dashboard_server import STORY, log_job, view
from tests.support.limits import until
from tests.support.pages import MadeUpJob, axe, browsing, served

EVIL = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
LOAD_BYTES_MAX = 300 * 1024
STACKS = StacksView(
    run_id="job",
    generation=2,
    world_size=4,
    ranks=tuple(
        RankStack(rank=rank, host="node0", local_rank=rank, pid=9, state="S", cpu_s=1.0, stack=int(rank != 3))
        for rank in range(4)
    ),
    stacks=((Frame("data.py", 17, "fetch"),), (Frame("train.py", 42, EVIL),)),
)
VERDICT = {
    "code": "HF201",
    "cause": f"rank 1 on b raised ValueError: {EVIL}",
    "advice": "look at the value",
    "culprit": {
        "rank": 1,
        "local_rank": 1,
        "host": "b",
        "pid": 7,
        "exit_code": 1,
        "lived_s": 3.0,
        "started": True,
        "traceback": f"Traceback (most recent call last):\nValueError: {EVIL}",
        "stderr_tail": "",
    },
    "collateral": [
        {"rank": 0, "local_rank": 0, "pid": 6, "host": "a", "exit_code": -6, "message": "connection closed by peer"}
    ],
    "lost_nodes": [],
    "generation": 2,
    "gave_up": "no restarts were allowed",
}


def told(**more: Any) -> dict[str, Any]:
    """A story with two generations, a hang and an excluded node."""
    hang = {
        "at_s": 30.0,
        "what": "hang",
        "text": "rank 3 hangs",
        "generation": 2,
        "code": "HF240",
        "advice": "",
        "groups": [[[3], "is in fetch at data.py:17"], [[0, 1, 2], "wait in all_reduce"]],
        "files": [],
    }
    failed = {**hang, "at_s": 20.0, "what": "failure", "text": EVIL, "generation": 1, "code": "HF201", "groups": []}
    phases = {"form": 0.1, "spawn": 0.2, "first_step": 1.5}
    generation = {"restart_count": 0, "world_size": 4, "began_epoch_s": 10.0, "phases_s": phases, "total_s": 1.8}
    stretches = [
        {"doing": doing, "from_epoch_s": float(at), "to_epoch_s": at + 10.0, "generation": 1 + at // 20}
        for at, doing in ((0, "startup"), (10, "training"), (20, "down"), (30, "hung"))
    ]
    spent = {f"{each['doing']}_s": 10.0 for each in stretches}
    return {
        **STORY,
        "generations": [{**generation, "generation": 1, "why": ""}, {**generation, "generation": 2, "why": EVIL}],
        "history": {"stretches": stretches, "effective": 0.25, "lost_steps": 3, **spent},
        "incidents": [failed, hang],
        "advice": {"HF240": "look where it is", "HF201": "x"},
        "excluded": [{"at": 4e9, "host": "bad7", "for_s": 60.0}],
        "actions": [{"at": 5.0, "what": "stop", "by": f"somebody {EVIL}"}],
        "snapshots": [
            {
                "folder": "/ckpt",
                "count": 3,
                "problems": 0,
                "newest": {"step": 90, "at": 1e9, "took_s": 0.4, "stall_s": 0.0123, "size": 2**30},
            }
        ],
        "curve": [[1.0, 50], [2.0, 100]],
        **more,
    }


class EndedJob(MadeUpJob):
    """It has ended, and how is known."""

    def now(self) -> dict[str, Any]:
        self.outcome = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)
        return {"at": 1.0, "ended": True}


def test_a_tab_that_nobody_sees_gives_its_second_connection_back() -> None:
    """A browser has six for one host: three open pages would leave none for a fourth, nor for a click."""
    states = []
    with served(MadeUpJob(view(), told(logs={"1": [0]}))) as dashboard, browsing(dashboard.visitor().link) as page:
        until(lambda: page.evaluate("window.page.logs.source?.readyState === EventSource.OPEN"), "the logs are open")
        for hidden in ("true", "false"):
            page.evaluate(f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }})")
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            states.append(page.evaluate("window.page.logs.source.readyState === EventSource.CLOSED"))
    assert states == [True, False]


def story_of_logs(folder: Path, **more: Any) -> MadeUpJob:
    """A job with the logs of ranks 4 and 5 in its first generation."""
    source = log_job(folder)
    job = MadeUpJob(view(), told(logs={"1": [4, 5]}, **more))
    job.add_folder(folder)
    assert ShownJob.read(job)
    assert len(job.log_files()) == len(source.log_files()) == 4
    return job


def test_of_stderr_only_errors_are_red_and_colours_are_shown(tmp_path: Path) -> None:
    job = story_of_logs(tmp_path)
    lines = ["1 of 3 done", "a.py:1: UserWarning: old", "\x1b[2K\x1b[1;34mblue\x1b[0m <b>", "ValueError: no"]
    (tmp_path / "attempt_0" / "0" / "stderr.log").write_text("\n".join(lines) + "\n")
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector(".log >> text=ValueError: no")
        shown = page.locator(".log > .stderr").all()
        classes = [each.get_attribute("class").strip() for each in shown]
        assert classes == ["stderr", "stderr warning", "stderr", "stderr error"]
        looks = "each => getComputedStyle(each.lastChild).color"
        assert len({each.evaluate(looks) for each in shown}) == 3
        assert page.inner_text(".log .a1.a34") == "blue"
        own = "each => getComputedStyle(each).color"
        assert page.locator(".log .a34").evaluate(own) == page.locator("#logs .files a").first.evaluate(own)
        assert shown[2].inner_text().split("\n")[-1] == "blue <b>"
        assert (axe(page), page.problems) == ([], [])


def test_the_logs_are_searched_while_a_text_is_typed(tmp_path: Path) -> None:
    job = story_of_logs(tmp_path)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("one\ntwo\nthree\n")
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector(".log >> text=three")
        page.type("#logs input[type=search]", "two")

        def asked() -> list[str]:
            return [url.rpartition("text=")[2] for url in page.requests if "/logs?" in url]

        found = ["generation", "1", "4", "two"]
        # On a busy machine `tw` was searched for before, and finds that line, too.
        until(lambda: page.inner_text(".log").split() == found and asked()[-1] == "two", "only that line is shown")
        texts = asked()
        page.keyboard.press("Tab")
        assert asked() == texts, "asked once"


def test_after_the_end_of_the_job_nothing_is_asked_any_more(tmp_path: Path) -> None:
    job = EndedJob(view(), told(logs={"1": [4, 5]}, outcome={"kind": "succeeded", "exit_code": 0, "message": ""}))
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("header >> text=ended")
        until(lambda: page.evaluate("window.page.logs.source.readyState === EventSource.CLOSED"), "the logs are closed")
        assert "Succeeded" in page.inner_text("#state")
        assert page.evaluate("window.page.source.readyState === EventSource.CLOSED")


def test_a_failure_leads_to_its_lines_in_the_logs(tmp_path: Path) -> None:
    worker = {"at_s": 1.0, "what": "worker", "text": "rank 4: no", "generation": 1, "code": "", "groups": [], "rank": 4}
    failed = {**worker, "what": "failure", "text": "rank 4 failed", "code": "HF201", "advice": "", "rank": -1}
    hang = {**worker, "what": "hang", "text": "rank 5 hangs", "groups": [[[5], "is in fetch"]], "rank": -1}
    job = story_of_logs(tmp_path, incidents=[worker, failed, hang])
    before = "".join(f"line {number}\n" for number in range(500))
    (tmp_path / "attempt_0" / "0" / "stderr.log").write_text(
        f"{before}Traceback (most recent call last):\n  x\nE: no\n{before}"
    )
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_text("of another rank\n")
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector(".log >> text=of another rank")
        assert page.locator("#happened button").all_inner_texts() == [f"log of rank {rank}" for rank in (5, 4, 4)]
        page.click("#happened button >> nth=1")
        page.wait_for_selector(".log .error")
        seen = "each => each.getBoundingClientRect().top - each.parentNode.getBoundingClientRect().top"
        until(lambda: -2 <= page.locator(".log .error").first.evaluate(seen) < 100, "its first line is in view")
        assert "of another rank" not in page.inner_text(".log")
        assert (axe(page), page.problems) == ([], [])


@pytest.mark.parametrize("counts_job", [True, False])
def test_steps_that_each_generation_counts_anew_are_shown_as_such(counts_job: bool) -> None:
    seen = view()
    nodes = [
        replace(each, ranks=tuple(replace(rank, counts_job=counts_job) for rank in each.ranks)) for each in seen.nodes
    ]
    job = MadeUpJob(replace(seen, nodes=tuple(nodes), job_step=0, job_steps=0), told())
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#timeline")
        page.wait_for_selector("#state >> text=steps per second")
        page.focus("#grid")
        page.keyboard.press("End")
        text = "since the start of generation 2"
        assert [text in page.inner_text(part) for part in ("#state", "#ranks")] == [not counts_job] * 2


def test_the_only_host_is_not_drained() -> None:
    with served(MadeUpJob(view(nodes=1), told())) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#nodes >> text=node0")
        assert page.locator("#nodes button[aria-label^=Drain], #nodes button[aria-label^=Exclude]").count() == 0


def test_the_metrics_of_the_snapshots_and_the_loads_are_curves() -> None:
    rows = [[float(at), at * 10, 3.0 - at / 10, 0.5] for at in range(5)]
    job = MadeUpJob(
        view(), told(metrics={"names": ["accuracy", "loss"], "rows": [[*row[:2], row[3], row[2]] for row in rows]})
    )
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#metrics >> text=loss 2.6 at step 40")
        assert page.locator("#metrics canvas").count() == 1
        page.select_option("#metrics select", "accuracy")
        page.wait_for_selector("#metrics >> text=accuracy 0.5 at step 40")
        page.wait_for_selector("#nodes canvas")
        page.select_option("#nodes select", "node1")
        assert page.evaluate("window.page.loadChart.rows[0].slice(1)") == [37, 25, 94]
        assert (axe(page), page.problems) == ([], [])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_hang_is_seen_in_one_look(theme: str) -> None:
    job = MadeUpJob(view(hung=3), told(), STACKS)
    context = {"color_scheme": theme, "viewport": {"width": 1440, "height": 900}}
    with served(job) as dashboard, browsing(dashboard.visitor().link, **context) as page:
        page.wait_for_selector("text=Hanging")
        assert page.title().startswith("Hanging · job")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        verdict = page.inner_text("#verdict")
        for text in ("The job hangs", "rank 3 hangs: the others wait", "rank 3 is in fetch", "look where it is"):
            assert text in verdict
        tiles = page.inner_text("#state")
        for text in ("100", "90 %", "of 100 s", "on 2 nodes", "1 of 3", "41 %", "4100 of 10,000 steps"):
            assert text in tiles
        assert "time left" not in tiles, "a job that hangs has no rate"
        # The grid: counts for a screen reader, the culprit by the keyboard, colours by choice, one node.
        assert "hung: rank 3" in page.get_attribute("#grid", "aria-label")
        page.focus("#grid")
        for key in ("End", "Home", "ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert "rank 3 on node1 (local 3, pid 1003) · hung: in time.sleep at data.py:17 · step 100" in page.inner_text(
            "#ranks"
        )
        before = page.evaluate("document.getElementById('grid').toDataURL()")
        for colour in ("lag", "step", "own"):
            page.select_option("#ranks select >> nth=0", colour)
        page.select_option("#ranks select >> nth=1", label="node1")
        assert page.evaluate("document.getElementById('grid').toDataURL()") != before
        # Generations, steps, stacks, nodes, snapshots, what happened.
        page.click("#timeline button:has-text('2')")
        page.wait_for_selector("text=first step 1.50 s")
        assert "rank 3 is in fetch" in page.inner_text("#timeline")
        assert page.locator("#steps canvas").count() == 1
        assert "own part 40 ms" in page.inner_text("#steps")
        page.click("text=Sample now")
        page.wait_for_selector("#stacks summary:has-text('ranks 0-2')")
        assert "fetch  data.py:17" in page.inner_text("#stacks")
        nodes = page.inner_text("#nodes")
        for text in ("bad7", "37 % of 64", "16.0 GiB, 25 %", "3.00 MiB/s", "2: 91–97 %, up to 62.0 GiB, 71 °C"):
            assert text in nodes
        page.click("#nodes summary >> nth=1")
        page.wait_for_selector("text=GPU 0: 91 %, 60.0 GiB, 75 %, 66 °C >> visible=true")
        snapshots = page.inner_text("#snapshots")
        for text in ("step 90", "10 steps", "1.00 GiB", "12.3 ms"):
            assert text in snapshots
        assert "HF201" in page.inner_text("#happened")
        assert page.title().startswith("Hanging"), "a worker's text is no markup"
        assert page.locator("img").count() == 0
        assert axe(page) == []
        assert page.problems == []
        assert all(url.startswith((dashboard.address, "data:")) for url in page.requests)


def test_a_spare_is_shown_with_the_reason() -> None:
    told_of = view()
    first, second = told_of.nodes
    waits = replace(second.ranks[1], stage=Stage.SPARE)
    nodes = (first, replace(second, ranks=(second.ranks[0], waits)))
    now = replace(told_of, nodes=nodes, spares=(3,), spares_why="rank 3 waits as a spare: they do not fit")
    with served(MadeUpJob(now, told())) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#state >> text=rank 3 waits as a spare: they do not fit")
        assert page.get_attribute("#grid", "aria-label") == "4 ranks: 3 stepping, 1 spare"
        assert "spare" in page.inner_text("#ranks .keys")
        assert page.problems == []


def test_a_page_is_small() -> None:
    with served(MadeUpJob(view(), told())) as dashboard:
        visitor = dashboard.visitor()
        with browsing(visitor.link) as page:
            page.wait_for_selector("text=Training")
            paths = {url.removeprefix(dashboard.address) for url in page.requests if url.startswith(dashboard.address)}
            size = page.evaluate(
                "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)"
            )
        assert {"/job/made-up/", "/static/app.js", "/static/uplot/uPlot.iife.min.js"} <= paths
        assert 50_000 < size < LOAD_BYTES_MAX


@pytest.mark.parametrize("width", [390, 768, 2560])
def test_the_page_fits_every_width_and_a_failure_says_what_to_do(width: int) -> None:
    end = {"kind": "failed", "exit_code": 1, "code": "HF201", "message": "", "verdict": VERDICT}
    job = MadeUpJob(view(), told(outcome=end))
    with served(job) as dashboard, browsing(dashboard.visitor().link, viewport={"width": width, "height": 800}) as page:
        page.wait_for_selector("text=Failed")
        text = page.inner_text("#verdict")
        for part in (
            "HF201: rank 1 on b raised ValueError",
            "look at the value",
            "no restarts were allowed",
            "1 other rank",
        ):
            assert part in text
        assert "connection closed by peer" not in text, "the victims are folded"
        page.click("#verdict summary")
        assert "connection closed by peer" in page.inner_text("#verdict")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (page.locator("img").count(), page.problems) == (0, [])
        assert axe(page) == []


def test_an_action_is_confirmed_and_leaves_a_trace() -> None:
    job = MadeUpJob(view(), told())
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.click("text=Stop the job")
        page.keyboard.press("Escape")
        page.click("text=Kill the job")
        page.click("dialog >> text=Cancel")
        assert job.asked == []
        page.click("text=Stop the job")
        page.click("dialog button.danger")
        page.wait_for_selector("text=sent to 2 nodes")
        page.click("button[aria-label='Exclude node1']")
        page.click("dialog button.danger")
        page.wait_for_selector("text=Exclude node1: sent to 2 nodes")
        assert ([what for what, _ in job.asked], job.about) == (["stop", "exclude"], "node1")
        page.click("text=readmit")
        page.wait_for_selector("text=Readmit bad7")
        assert job.asked[-1][0] == "readmit"
        assert "somebody <img" in page.inner_text("#actions")


def test_ranks_are_profiled_and_all_are_asked_to_save() -> None:
    job = MadeUpJob(
        view(), told(profiles=[{"at": 7.0, "name": "p-1", "rank": 3, "why": "", "files": ["rank3.trace.json"]}])
    )
    operation = [f"aten::mm {EVIL}", 15, 0.25, 0.5]
    rank = {"rank": 0, "host": "a", "files": [], "operations": [operation], "why": "", "note": "no py-spy"}
    job.profiled = {
        "name": "p-2",
        "ranks": [rank, {**rank, "rank": 1, "operations": [], "why": "it ended"}],
        "silent": ["b"],
    }
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#profiles button")
        assert page.get_attribute("#profiles li a", "href") == "profile/p-1/rank3.trace.json"
        page.fill("#profiles input >> nth=0", "0-1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#profiles >> text=Rank 0: the most expensive operations")
        for text in ("250 ms", "aten::mm <img", "rank 1 on a: it ended", "no py-spy", "b did not answer"):
            assert text in page.inner_text("#profiles")
        page.fill("#profiles input >> nth=0", "none")
        page.click("#profiles button")
        page.wait_for_selector("#actions >> text=write ranks like")
        page.click("text=Save now")
        page.wait_for_selector("text=Save: sent to 2 nodes")
        assert [what for what, _ in job.asked] == ["profile", "save"]
        assert all("from the dashboard at 127.0.0.1" in by for _, by in job.asked)
        assert (axe(page), page.locator("img").count()) == ([], 0)
        assert all("409" in problem for problem in page.problems), "the browser notes the refusal, nothing else"


def test_ten_thousand_ranks_are_drawn_and_go_on_changing() -> None:
    job = MadeUpJob(view(10_000, nodes=1250, steps=1), told())
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("#grid[aria-label^='10,000 ranks']")
        job.view = view(10_000, nodes=1250, steps=7, hung=9_999)
        page.wait_for_selector("text=Hanging")
        assert "hung: rank 9999" in page.get_attribute("#grid", "aria-label")
        assert page.problems == []


def test_the_theme_is_chosen_and_kept() -> None:
    with (
        served(MadeUpJob(view(), told())) as dashboard,
        browsing(dashboard.visitor().link, color_scheme="light") as page,
    ):
        page.wait_for_selector("text=Training")
        page.click("#theme")
        page.reload()
        page.wait_for_selector("text=Training")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


class StalledJob(MadeUpJob):
    """Nothing can be read while `reads` is not set: as on a disk that hangs."""

    def __init__(self) -> None:
        super().__init__(view(), told())
        self.reads = threading.Event()
        self.reads.set()

    def now(self) -> dict[str, Any]:
        self.reads.wait()
        return super().now()


def test_a_page_without_news_says_so_and_goes_on_when_there_are_some() -> None:
    job = StalledJob()
    with served(job) as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("text=live")
        job.reads.clear()
        page.wait_for_selector("text=No connection")
        assert "100" in page.inner_text("#state"), "what was known last stays"
        job.reads.set()
        page.wait_for_selector("text=live")


def run_folder(folder: Path) -> Path:
    """The folder of a run that has failed, whose name is no markup."""
    folder.mkdir(parents=True)
    begins = {"event": "begins", "member": "a#1", "run_id": f"r{EVIL}</script>", "endpoint": "e"}
    generation = {"event": "generation", "generation": 1, "world_size": 2, "nproc": 2, "rank_base": 0}
    phases = {"event": "phases", "generation": 1, "restart_count": 0, "spawn_s": 0.5, "until_monotonic": 2.0}
    ends = {
        "event": "worker_ended",
        "generation": 1,
        "local_rank": 1,
        "rank": 1,
        "pid": 7,
        "exit_code": 1,
        "stopped": False,
    }
    steps = {"event": "progress", "generation": 1, "steps": [5], "began_at": [-1], "at": [-1]}
    events = [begins, {**generation, "restart_count": 0}, phases, steps, {**steps, "time": 9.0, "steps": [9]}, ends]
    lines = [json.dumps({"time": 1.0 + place, "monotonic": 1.0 + place, **each}) for place, each in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "verdict.json").write_text(
        json.dumps({"kind": "failed", "exit_code": 1, "code": "HF201", "verdict": VERDICT})
    )
    return folder


def test_the_first_page_lists_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "running"))
    for name in ("job_k3x0a9zz", "job_k3x0a900", "job_k3x0a911"):
        run_folder(tmp_path / "holdfast" / "runs" / name)
    with served() as dashboard, browsing(dashboard.visitor().link) as page:
        page.wait_for_selector("text=HF201: rank 1 on b raised")
        for name in ("job_k3x0a9zz", "job_k3x0a900", "job_k3x0a911"):
            page.check(f"input[aria-label='Compare {name}']")
        page.wait_for_selector("[aria-label='Two runs'] th:has-text('job_k3x0a911')")
        assert page.locator("input:checked").count() == 2, "the first one has given way"
        rows = page.locator("[aria-label='Two runs'] tbody tr").all_inner_texts()
        assert "end\tfailed\tfailed" in rows
        assert "steps\t9\t9" in rows
        assert axe(page) == []
        page.click("td a")
        page.wait_for_selector("#state >> text=Failed")
        assert (page.locator("img").count(), page.problems) == (0, [])


def test_a_report_is_one_file_that_works_from_a_disk(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    page_file = tmp_path / "page.html"
    assert main(["report", "--html", str(page_file), str(folder)]) == 0
    with browsing(page_file.as_uri()) as page:
        page.wait_for_selector("text=Failed")
        assert "HF201: rank 1 on b raised ValueError" in page.inner_text("#verdict")
        assert "Generations" in page.inner_text("#timeline")
        assert page.locator("#progress canvas").count() == 1
        page.click("#theme")
        assert page.locator("button:visible").count() == 2, "the theme and a generation; nothing to act on"
        assert (page.locator("img").count(), page.problems, page.requests) == (0, [], [page_file.as_uri()])
        assert axe(page) == []
