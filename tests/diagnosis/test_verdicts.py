"""The verdict's rules that one failure alone does not show: hangs, lost nodes, finished ranks, which nodes are meant."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.causes.find import rules
from holdfast.diagnosis.screen import render
from holdfast.protocol.exit_codes import EXIT_HUNG
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind, job_exit_code
from holdfast.protocol.rank_progress import Finding, Frame, HangKind, RankSample, RankStory
from tests.corpus.telling import GLOO_CLOSED, SITE, cut, fails, named, watchdog

HANG = Finding(
    kind=HangKind.HUNG,
    code="HF240",
    text="rank 3 on a is in time.sleep at data.py:17 for 71 s;\n7 others wait in all_reduce at train.py:42",
    culprits=(3,),
)
MISSING = "ModuleNotFoundError: No module named 'flash_attn'"


def evidence(*failures: Failure, hosts: tuple[str, ...] = ("a", "b"), **more: object) -> Evidence:
    plain = Evidence(generation=2, restarts=1, failures=failures, lost_nodes=(), gave_up="none left", hosts=hosts)
    return structs.replace(plain, **more)


def test_a_hang_names_who_was_waited_for() -> None:
    hung = fails(3, code=-9)
    verdict = judge(evidence(hang=HANG, hung=hung))
    assert (verdict.code, verdict.culprit) == ("HF240", hung)
    assert (
        verdict.cause
        == "rank 3 on a is in time.sleep at data.py:17 for 71 s; 7 others wait in all_reduce at train.py:42"
    )
    assert verdict.advice


def test_the_rank_that_hung_is_shown_with_its_stack_and_its_last_output() -> None:
    hung = structs.replace(fails(3, code=-9), stack="Stack (most recent call last):\n    time.sleep(3600)")
    end = structs.replace(fails(3, code=-15, late=True), stderr_tail="shard 17 is late", step=7)
    verdict = judge(evidence(end, hang=HANG, hung=hung))
    assert verdict.culprit is not None
    assert (verdict.culprit.stderr_tail, verdict.culprit.step) == ("shard 17 is late", 7)
    assert verdict.collateral == (), "its end is no victim of itself"
    shown = render(Outcome(kind=OutcomeKind.FAILED, exit_code=EXIT_HUNG, code="HF240", verdict=verdict), "/runs/x")
    assert shown.splitlines()[-5:] == [
        "where rank 3 hung:",
        "Stack (most recent call last):",
        "    time.sleep(3600)",
        "last lines of rank 3's stderr:",
        "shard 17 is late",
    ]


def test_after_a_hang_there_is_one_exit_code() -> None:
    """Whether the time-out ended it, or a watchdog of torch, or after an exception that did not end the process."""
    raised = fails(3, MISSING, code=-15, late=True)
    hangs = [evidence(hang=HANG, hung=fails(3, code=-9)), evidence(watchdog(0), hang=HANG), evidence(raised, hang=HANG)]
    assert {job_exit_code(judge(each)) for each in hangs} == {EXIT_HUNG}


def test_a_hang_after_an_exception_is_the_exception() -> None:
    """It raised, and an exit function did not end: it was killed with the hang, and is no victim of itself."""
    raised = fails(3, MISSING, code=-15, late=True)
    verdict = judge(evidence(watchdog(0), raised, hang=HANG, hung=fails(3, code=-9)))
    assert (verdict.code, verdict.culprit) == ("HF211", raised)
    assert raised not in verdict.collateral
    assert "flash_attn" in verdict.cause


def test_an_exception_of_another_rank_explains_no_hang() -> None:
    raised = fails(2, MISSING, code=-15, late=True)
    assert judge(evidence(raised, hang=HANG, hung=fails(3, code=-9))).code == "HF240"


def test_a_hang_explains_the_time_outs_that_end_it() -> None:
    verdict = judge(evidence(watchdog(0), watchdog(1), hang=HANG))
    assert verdict.code == "HF240"
    assert verdict.culprit is not None


def test_a_fault_of_its_own_outweighs_a_hang() -> None:
    assert judge(evidence(fails(1, code=-9), hang=HANG)).code == "HF204"


def test_what_a_script_says_of_a_peer_in_its_own_words_is_outweighed_by_any_other_reason() -> None:
    """Its exception may be reported before the death that it is about."""
    said = fails(1, "RuntimeError: Connection closed by peer [127.0.0.1]:4711", line="raise RuntimeError(text)")
    killed = fails(2, code=-9)
    for failures in ((said, killed), (killed, said)):
        assert judge(evidence(*failures)).culprit == killed
    assert judge(evidence(said, cut(0))).culprit == said


def test_a_lost_node_explains_complaints_but_no_own_fault() -> None:
    lost = evidence(cut(0), lost_nodes=("b (silent)",))
    assert judge(lost).code == "HF306"
    assert judge(structs.replace(lost, failures=(cut(0), fails(1, MISSING)))).code == "HF211"


def test_no_failure_at_all() -> None:
    verdict = judge(evidence())
    assert (verdict.code, verdict.culprit, job_exit_code(verdict)) == ("HF200", None, 1)


def test_only_what_the_stop_ended() -> None:
    verdict = judge(evidence(cut(0, late=True), fails(1, code=-9, late=True)))
    assert (verdict.code, verdict.culprit) == ("HF200", None)
    assert len(verdict.collateral) == 2


def test_finished_ranks_are_named() -> None:
    verdict = judge(evidence(cut(0), cut(2), done=(1, 3)))
    assert verdict.code == "HF229"
    assert "ranks 1, 3 had ended with exit code 0" in verdict.cause


def test_a_module_that_is_missing_on_one_node_only() -> None:
    verdict = judge(evidence(fails(4, MISSING), fails(5, MISSING), cut(0)))
    assert verdict.cause.endswith("; only on b, not on a")


def test_a_module_that_is_missing_everywhere() -> None:
    assert judge(evidence(fails(4, MISSING), fails(0, MISSING))).cause.endswith("; on all nodes")


def test_one_node_alone_is_not_compared() -> None:
    assert judge(evidence(fails(0, MISSING), hosts=("a",))).cause.endswith(
        "No module named 'flash_attn', at train.py:10 `loss.backward()`"
    )


def test_many_nodes_are_not_all_listed() -> None:
    hosts = tuple(f"n{number}" for number in range(40))
    cause = judge(evidence(fails(3, MISSING, on="n7"), hosts=hosts)).cause
    assert cause.endswith("; only on n7, not on n0, n1, n2 and 36 more")


def test_the_facts_of_its_machine_are_in_the_advice() -> None:
    full = structs.replace(fails(4, "OSError: [Errno 28] No space left on device"), facts={"disks": "/data 100% full"})
    assert judge(evidence(full)).advice.endswith("b: /data 100% full")


def test_the_missing_rank_of_a_barrier_is_told() -> None:
    says = "RuntimeError: [Rank 0]: Rank 5 failed to pass monitoredBarrier in 2000 ms"
    assert judge(evidence(fails(0, says))).cause.endswith("; missing: rank 5")


def test_the_exit_code_of_a_culprit_that_we_hastened_is_not_our_signal() -> None:
    verdict = judge(evidence(cut(0), fails(6, "KeyError: 'tokens'", code=-15, late=True)))
    assert (named(verdict), job_exit_code(verdict)) == (6, 1)


def test_ten_thousand_failures_are_judged_and_the_first_is_blamed() -> None:
    crowd = [cut(rank) for rank in range(4096)]
    culprit = fails(9, MISSING)
    verdict = judge(evidence(*crowd, culprit, *crowd))
    assert verdict.culprit is culprit


def test_hostile_texts_end() -> None:
    for piece in (
        "a" * 16_000,
        "Traceback (most recent call last):\n" * 400,
        "gloo " * 3000,
        '  File "x", line 1\n' * 800,
    ):
        verdict = judge(
            evidence(structs.replace(fails(0, GLOO_CLOSED), message=piece, traceback=piece, stderr_tail=piece))
        )
        assert verdict.code.startswith("HF2")


def test_what_a_worker_said_last_is_told() -> None:
    said = "loading\nno samples match the filter\n[W1121 14:16:34 ProcessGroupGloo.cpp:1] Warning: not destroyed\n"
    verdict = judge(evidence(fails(1, code=1, stderr=said), hosts=("a",)))
    assert verdict.cause == "rank 1 on a ended with exit code 1: no samples match the filter"
    assert verdict.advice == ""


def test_of_a_bar_that_redraws_itself_its_last_state_is_told() -> None:
    verdict = judge(evidence(fails(1, code=4, stderr="  1%|#  \r 50%|## \n"), hosts=("a",)))
    assert verdict.cause.endswith("exit code 4: 50%|##")


def test_who_said_nothing_is_looked_for_in_the_script() -> None:
    verdict = judge(evidence(fails(1, code=3), hosts=("a",)))
    assert verdict.cause.endswith("ended with exit code 3")
    assert "os._exit" in verdict.advice


def test_a_script_that_refuses_its_arguments_is_quoted_with_its_error_not_its_usage() -> None:
    said = "usage: train.py [-h] --lr LR\ntrain.py: error: the following arguments are required: --lr\n"
    verdict = judge(evidence(fails(0, code=2, stderr=said), hosts=("a",)))
    assert verdict.code == "HF232"
    assert verdict.cause.endswith("train.py: error: the following arguments are required: --lr")


def test_a_script_made_with_click_is_quoted_with_its_error_too() -> None:
    said = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --fancy\n"
    verdict = judge(evidence(fails(0, code=2, stderr=said), hosts=("a",)))
    assert verdict.code == "HF232"
    assert verdict.cause.endswith("Error: No such option: --fancy")


def test_a_count_of_errors_is_told_with_the_first_of_them() -> None:
    said = "ValidationError: 2 validation errors for TrainConfig\nmax_seq_length\n  Input should be a valid integer [type=int_parsing]"
    verdict = judge(evidence(fails(0, said), hosts=("a",)))
    assert "for TrainConfig max_seq_length Input should be a valid integer" in verdict.cause


def test_a_file_that_hides_a_library_is_named() -> None:
    failure = fails(1, "AttributeError: module 'random' has no attribute 'shuffle'")
    hidden = structs.replace(failure, facts={"hides": "/data/job/random.py hides the library random"})
    verdict = judge(evidence(hidden, hosts=("a",)))
    assert verdict.code == "HF211"
    assert "/data/job/random.py hides the library random" in verdict.advice


def test_a_crash_ends_in_the_script_not_in_what_runs_it() -> None:
    said = (
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n"
        '  File "/job/train.py", line 4 in <module>\n'
        '  File "/opt/lib/holdfast/worker/bootstrap.py", line 162 in run\n\n'
        "Extension modules: numpy._core, torch._C (total: 2)\n"
    )
    verdict = judge(evidence(fails(1, code=-6, stderr=said)))
    screen = render(Outcome(kind=OutcomeKind.FAILED, exit_code=134, verdict=verdict), "/runs/x")
    assert screen.splitlines()[-1] == '  File "/job/train.py", line 4 in <module>'


def test_a_fork_that_was_refused_says_nothing_of_the_program() -> None:
    refused = fails(0, "fork: Resource temporarily unavailable", code=1)
    verdict = judge(evidence(structs.replace(refused, started=False)))
    assert verdict.code == "HF231"
    assert "ulimit -u" in verdict.advice
    assert "x bit" not in verdict.advice


def screen_of(*failures: Failure, folder: str = "/h/me/.local/state/holdfast/runs/brave-otter_abcdefgh") -> list[str]:
    outcome = Outcome(kind=OutcomeKind.FAILED, exit_code=1, verdict=judge(evidence(*failures)))
    return render(outcome, folder, home="/h/me", runs="/h/me/.local/state/holdfast/runs").splitlines()


def test_victims_that_said_the_same_are_one_line_of_the_screen() -> None:
    rows = [line for line in screen_of(fails(3, MISSING), *map(cut, (0, 1, 2, 6))) if line.startswith("  because")]
    assert len(rows) == 1
    assert rows[0].startswith("  because of it ranks 0-2, 6: ")
    assert rows[0].endswith("; in their logs")


def test_what_a_victim_said_is_cut_between_words() -> None:
    (row,) = (line for line in screen_of(fails(3, MISSING), cut(0)) if line.startswith("  because"))
    assert "Connection closed by peer [10.0.0.2]:40364. " in row
    assert row.endswith("…; in its log")
    assert f" {row.removesuffix('…; in its log').rpartition(' ')[2]} " in GLOO_CLOSED


def test_the_screen_names_the_run_by_what_can_be_said_and_no_long_path() -> None:
    culprit = structs.replace(
        fails(3, MISSING),
        stderr_file="/h/me/.local/state/holdfast/runs/brave-otter_abcdefgh/attempt_0/3/stderr.log",
        error_file="/h/me/.local/state/holdfast/runs/brave-otter_abcdefgh/attempt_0/3/error.json",
    )
    shown = screen_of(culprit)
    assert "  log          holdfast logs brave-otter --rank 3" in shown
    assert "  run folder   ~/.local/state/holdfast/runs/brave-otter_abcdefgh" in shown
    assert not any("attempt_0" in line for line in shown)
    elsewhere = screen_of(culprit, folder="/data/logs/job_1")
    assert f"  log          {culprit.stderr_file} on {culprit.host}" in elsewhere
    own = screen_of(
        structs.replace(culprit, stderr_file="/data/logs/job_1/attempt_0/3/stderr.log"), folder="/data/logs/job_1"
    )
    assert "  log          holdfast logs /data/logs/job_1 --rank 3" in own


# --- where it happened, who left, and who waited in what --------------------------------------------------------------

DIST = f"{SITE}/torch/distributed/distributed_c10d.py"
WAITED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv "
    "operation to complete"
)


def waits(rank: int, line: int, source: str, frame: str) -> Failure:
    traceback = f'Traceback (most recent call last):\n  File "/data/job/train.py", line {line}, in <module>\n    {source}\n{frame}{WAITED}\n'
    return structs.replace(fails(rank, WAITED), traceback=traceback)


def in_barrier(rank: int) -> Failure:
    return waits(rank, 31, "dist.barrier()", f'  File "{DIST}", line 9, in barrier\n    work.wait()\n')


def in_backward(rank: int) -> Failure:
    frame = f'  File "{SITE}/torch/_tensor.py", line 9, in backward\n    torch.autograd.backward(self)\n'
    return waits(rank, 25, "loss.backward()", frame)


def test_a_headline_says_where_and_in_which_step() -> None:
    failed = structs.replace(fails(1, "AssertionError", line="assert x.shape[0] == 5"), step=7)
    verdict = judge(evidence(failed, hosts=("a",)))
    assert verdict.cause == "rank 1 on a raised AssertionError, at train.py:10 `assert x.shape[0] == 5`, after 7 steps"


def test_a_headline_does_not_repeat_what_was_raised() -> None:
    failed = fails(1, "ValueError: no label", line='raise ValueError("no label")')
    assert judge(evidence(failed, hosts=("a",))).cause == "rank 1 on a raised ValueError: no label, at train.py:10"


def test_a_headline_names_the_place_in_the_script_and_not_in_a_library() -> None:
    failed = fails(1, "ValueError: bad", frames=(f"{SITE}/pandas/core/frame.py", "/opt/x/holdfast/worker/bootstrap.py"))
    assert "at train.py:10" in judge(evidence(failed)).cause


def test_a_headline_of_a_crash_names_its_innermost_line_of_the_script() -> None:
    said = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        f'  File "{SITE}/numpy/x.py", line 3 in dot\n  File "/job/model.py", line 44 in forward\n  File "/job/train.py", line 9 in <module>\n'
    )
    assert judge(evidence(fails(1, code=-11, stderr=said), hosts=("a",))).cause.endswith(", at model.py:44")


@pytest.mark.parametrize(
    ("source", "code", "cause"),
    [
        ("    raise KeyboardInterrupt\n", "HF201", "raised KeyboardInterrupt, at clf.py:4"),
        (
            "    time.sleep(30)\n",
            "HF235",
            "was ended from outside by SIGINT (interrupted), at clf.py:4 `time.sleep(30)`",
        ),
        (
            "",
            "HF235",
            "was ended by a SIGINT, or by a KeyboardInterrupt that the program raised, at clf.py:4",
        ),
    ],
)
def test_an_interrupt_that_the_script_raises_is_no_signal_from_outside(source: str, code: str, cause: str) -> None:
    """Python kills itself by SIGINT after both."""
    said = (
        'Traceback (most recent call last):\n  File "/job/clf.py", line 8, in <module>\n    main()\n'
        f'  File "/job/clf.py", line 4, in inner\n{source}KeyboardInterrupt\n'
    )
    verdict = judge(evidence(fails(0, code=-2, stderr=said), hosts=("a",)))
    assert (verdict.code, verdict.cause) == (code, f"rank 0 on a {cause}")
    killed = judge(evidence(fails(0, code=-9, stderr=said), hosts=("a",)))
    assert (killed.code, "clf.py" in killed.cause) == ("HF204", False), "it caught the interrupt, and was killed later"


def test_the_rank_that_left_is_the_culprit_and_its_victims_are_the_evidence() -> None:
    left = structs.replace(fails(5, code=0), stderr_tail="no batches left\n", step=20)
    verdict = judge(evidence(cut(0), cut(2), done=(5,), left=(left,)))
    assert (verdict.code, verdict.culprit) == ("HF229", left)
    assert verdict.cause.startswith("rank 5 on b ended with exit code 0 after 20 steps, while rank 0 still needed it")
    assert verdict.cause.endswith("; its last line was: no batches left")
    assert [each.rank for each in verdict.collateral] == [0, 2]
    assert job_exit_code(verdict) == 1
    screen = render(Outcome(kind=OutcomeKind.FAILED, exit_code=1, verdict=verdict), "/runs/x")
    assert "rank 5 (local 1, pid 1005) on b, exit code 0" in screen


def test_steps_are_told_once_if_they_are_the_same() -> None:
    left = structs.replace(fails(5, code=0), step=20)
    victim = structs.replace(cut(0), step=20)
    cause = judge(evidence(victim, cut(2), done=(5,), left=(left,))).cause
    assert cause.count("after 20 steps") == 1
    later = judge(evidence(structs.replace(victim, step=21), cut(2), done=(5,), left=(left,))).cause
    assert "exit code 0 after 20 steps" in later
    assert "after 21 steps" in later


def test_the_last_line_of_a_rank_that_left_may_be_on_its_stdout() -> None:
    left = structs.replace(fails(5, code=0), stderr_tail="", stdout_tail="hello\nrank 5 is done")
    verdict = judge(evidence(cut(0), cut(2), done=(5,), left=(left,)))
    assert verdict.cause.endswith("; its last line was: rank 5 is done")
    screen = render(Outcome(kind=OutcomeKind.FAILED, exit_code=1, verdict=verdict), "/runs/x")
    assert screen.endswith("last lines of rank 5's stdout:\nhello\nrank 5 is done")
    survivor = structs.replace(left, stderr_tail="holdfast: ht.survive: if a rank is lost, the others go on")
    said = judge(evidence(cut(0), cut(2), done=(5,), left=(survivor,))).cause
    assert said.endswith("; its last line was: rank 5 is done"), "what holdfast wrote is not the program's"


def test_a_time_out_of_something_else_is_not_blamed_on_who_had_finished() -> None:
    lock = "filelock._error.Timeout: The file lock 'x' could not be acquired."
    verdict = judge(evidence(fails(1, lock, frames=(f"{SITE}/filelock/_api.py",)), done=(0,)))
    assert (verdict.code, named(verdict)) == ("HF201", 1)


def test_ranks_that_waited_in_different_calls_are_told_with_their_lines() -> None:
    verdict = judge(evidence(in_barrier(0), in_barrier(2), in_backward(1)))
    assert (verdict.code, named(verdict)) == ("HF225", 1)
    assert verdict.cause == (
        "rank 1 on a waited in backward at train.py:25 `loss.backward()`, and rank 0 in barrier at train.py:31 `dist.barrier()`"
    )


def cut_off(failure: Failure) -> Failure:
    closed = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7868."
    return structs.replace(failure, message=closed, traceback=failure.traceback.replace(WAITED, closed))


def test_who_is_cut_off_after_a_time_out_was_in_its_call_too() -> None:
    verdict = judge(evidence(in_backward(2), cut_off(in_backward(0)), in_barrier(1)))
    assert (verdict.code, named(verdict)) == ("HF225", 1)
    verdict = judge(evidence(in_backward(2), in_backward(0), cut_off(in_barrier(1))))
    assert (verdict.code, named(verdict)) == ("HF225", 1)
    assert judge(evidence(cut_off(in_backward(2)), cut_off(in_barrier(1)))).code == "HF210"


def test_ranks_that_waited_in_the_same_call_called_no_different_ones() -> None:
    assert judge(evidence(in_barrier(0), in_barrier(2))).code == "HF209"


def test_the_ranks_of_a_lost_node_are_named() -> None:
    verdict = judge(evidence(cut(0), lost_nodes=("b (silent)",), lost_ranks=(4, 5)))
    assert verdict.cause == "lost b (silent): ranks 4, 5"


def test_a_standstill_without_anybody_waiting_has_a_code_of_its_own() -> None:
    still = structs.replace(
        HANG, kind=HangKind.PAUSED, code="", text="all ranks are in threading._shutdown", culprits=()
    )
    verdict = judge(evidence(hang=still))
    assert verdict.code == "HF246"
    assert verdict.advice


def test_a_hang_that_a_time_out_has_ended_does_not_say_how_its_process_goes_on() -> None:
    stopped = structs.replace(
        HANG, code="HF242", text="rank 3 on b is stopped by a signal (kill -CONT 77 lets it go on)"
    )
    verdict = judge(evidence(watchdog(0), hang=stopped, hung=fails(3, code=-9)))
    assert (verdict.code, verdict.cause) == ("HF242", "rank 3 on b is stopped by a signal")


def test_a_hang_tells_of_a_thread_that_died_before() -> None:
    died = 'Exception in thread Thread-1 (load):\nTraceback (most recent call last):\n  File "t.py", line 3, in load\n    f()\nValueError: bad row\n'
    verdict = judge(evidence(fails(3, code=-15, stderr=died, late=True), hang=HANG))
    assert verdict.cause.endswith("; before, rank 3 lost its thread 'Thread-1 (load)': ValueError: bad row")


# --- time-outs of a collective, with the stacks that were taken before the others were stopped ------------------------


def seen(rank: int, *frames: Frame, source: str = "") -> RankStory:
    sample = RankSample(rank % 4, 2000 + rank, "S", 1.0, frames, source=source)
    return RankStory(rank, "b", rank % 4, 9.0, (sample,))


def script(line: int, file: str = "/data/job/train.py") -> Frame:
    return Frame(file, line, "<module>")


WAITS = (Frame(DIST, 9, "barrier"), script(31))


def test_the_one_that_sleeps_is_named_and_not_the_one_that_waited() -> None:
    sleeps = seen(5, script(17, "/data/job/data.py"), script(60), source="time.sleep(600)")
    verdict = judge(evidence(in_barrier(0), survivors=(seen(2, *WAITS), sleeps)))
    assert (verdict.code, named(verdict)) == ("HF209", 5)
    assert verdict.cause.startswith("rank 5 on b did not join: it was in time.sleep at data.py:17, while rank 0 waited")
    assert "at train.py:31 `dist.barrier()`" in verdict.cause
    assert job_exit_code(verdict) == 1


def test_one_that_waited_elsewhere_is_told_with_both_lines() -> None:
    verdict = judge(
        evidence(in_barrier(0), survivors=(seen(2, *WAITS), seen(5, Frame(DIST, 8, "all_reduce"), script(44))))
    )
    assert (verdict.code, named(verdict)) == ("HF225", 5)
    assert "waited in all_reduce at train.py:44, and rank 0 in barrier at train.py:31" in verdict.cause


def test_a_survivor_that_is_on_its_way_out_or_waits_too_is_not_blamed() -> None:
    leaving = seen(5, Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"))
    verdict = judge(evidence(in_barrier(0), survivors=(seen(2, *WAITS), leaving)))
    assert (verdict.code, named(verdict)) == ("HF209", 0)


def test_where_most_did_not_come_the_one_that_waited_is_named() -> None:
    elsewhere = [seen(rank, script(60), source="time.sleep(9)") for rank in (1, 2, 3)]
    verdict = judge(evidence(in_barrier(0), survivors=tuple(elsewhere)))
    assert named(verdict) == 0


def differs(rank: int, own: str, other: int, others: str) -> Failure:
    said = "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: CollectiveFingerPrint({}), but Rank {} is running collective: CollectiveFingerPrint({})."
    return fails(rank, said.format(rank, own, other, others))


def test_of_ranks_whose_collectives_differ_the_odd_one_is_named() -> None:
    reduces = "SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[2], TensorDtypes=Float"
    first, third = (differs(rank, reduces, 1, "SequenceNumber=0OpType=REDUCE") for rank in (0, 2))
    second = differs(1, "SequenceNumber=1OpType=BARRIER", 0, "SequenceNumber=0OpType=GATHER")
    verdict = judge(evidence(first, third, second))
    assert verdict.code == "HF225"
    assert verdict.culprit is second
    assert verdict.cause.startswith("rank 1 on a called another collective than its peers")
    alone = judge(evidence(first))
    assert (alone.culprit, alone.noticed_by) == (None, first)
    assert job_exit_code(alone) == 1


def test_the_rank_that_a_barrier_names_is_the_culprit() -> None:
    complaint = fails(0, "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 4000 ms")
    stopped = structs.replace(fails(2, code=-15), after_stop=True)
    verdict = judge(evidence(complaint, stopped))
    assert (verdict.code, verdict.culprit) == ("HF209", stopped)
    assert verdict.cause.startswith("rank 2 on a did not join: rank 0 timed out in a collective")


def test_the_rules_are_made_without_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict and the thread that reads the rules ahead may be first at the same moment. msgspec's decoder crashes
    when two threads are the first to use a type."""

    def decode(*_: object) -> None:
        raise AssertionError("the decoder was used")

    monkeypatch.setattr("msgspec.convert", decode)
    assert rules.__wrapped__() == rules()


@pytest.mark.parametrize(
    "text", ["local rank 1 failed to open its shard", "tensor-parallel rank 1: loss is not finite"]
)
def test_a_rank_that_is_counted_within_a_part_is_not_the_one_of_the_job(text: str) -> None:
    own = fails(5, f"RuntimeError: {text}")
    stopped = structs.replace(fails(1, code=-15), after_stop=True)
    assert judge(evidence(own, stopped)).culprit is own


def test_of_two_halves_in_different_collectives_none_is_blamed() -> None:
    said = "torch.distributed.DistBackendError: [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType={}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
    first, second = fails(0, said.format(0, "ALLREDUCE")), fails(1, said.format(1, "BROADCAST"))
    for order in ((first, second), (second, first)):
        verdict = judge(evidence(*order))
        assert (verdict.code, verdict.culprit, verdict.noticed_by) == ("HF225", None, order[0])
        assert "unknown which rank is wrong" in verdict.cause
        assert "rank 0 ALLREDUCE" in verdict.cause
