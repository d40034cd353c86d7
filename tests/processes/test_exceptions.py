"""An exception is reported when it leaves the program: the job does not wait for what that process does before it ends."""

from __future__ import annotations


def test_the_generation_ends_while_exit_functions_still_run(site) -> None:
    """And they run to their end, before the next generation begins."""
    script = site.script(
        """
import atexit, signal
if ROUND:
    note("again")
    sys.exit()
def stop(*_):
    note("stopped")
    os._exit(1)
signal.signal(signal.SIGTERM, stop)
meet()
if RANK == 1:
    hold()
def upload():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end = time.monotonic() + 10 * SLOWNESS
    while not notes("stopped") and time.monotonic() < end:
        time.sleep(0.01)
    note("uploaded", stopped=len(notes("stopped")))
atexit.register(upload)
raise ValueError("the loss is nan")
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done == 0, agent.text
    order = [note["event"] for note in site.trail() if note["event"] in ("stopped", "uploaded", "again")]
    assert order == ["stopped", "uploaded", "again", "again"], agent.text
    failed = [each for each in agent.events("worker_failed") if not each["after_stop"]]
    assert [(each["rank"], each["message"]) for each in failed] == [(0, "ValueError: the loss is nan")]
    assert [each["rank"] for each in agent.events("worker_raised")] == [0]


def test_the_exception_of_a_forked_child_is_its_own(site) -> None:
    script = site.script(
        """
if os.fork() == 0:
    raise ValueError("only the child")
os.wait()
"""
    )
    done, agent = site.run("--standalone", script)
    assert done == 0, agent.text
    assert not agent.events("worker_raised")
