"""The verdict's rules that one failure alone does not show: hangs, lost nodes, finished ranks, which nodes are meant."""

from __future__ import annotations

from msgspec import structs

from holdfast.core.hang import Finding, HangKind
from holdfast.core.outcome import Evidence, Failure, Outcome, OutcomeKind, job_exit_code
from holdfast.insight.screen import render
from holdfast.insight.verdicts import judge
from tests.corpus.telling import GLOO_CLOSED, cut, fails, watchdog

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


def test_a_hang_explains_the_time_outs_that_end_it() -> None:
    verdict = judge(evidence(watchdog(0), watchdog(1), hang=HANG))
    assert verdict.code == "HF240"
    assert verdict.culprit is not None


def test_a_fault_of_its_own_outweighs_a_hang() -> None:
    assert judge(evidence(fails(1, code=-9), hang=HANG)).code == "HF204"


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
    assert "rank 1, 3 had ended with exit code 0" in verdict.cause


def test_a_module_that_is_missing_on_one_node_only() -> None:
    verdict = judge(evidence(fails(4, MISSING), fails(5, MISSING), cut(0)))
    assert verdict.cause.endswith("; only on b, not on a")


def test_a_module_that_is_missing_everywhere() -> None:
    assert judge(evidence(fails(4, MISSING), fails(0, MISSING))).cause.endswith("; on all nodes")


def test_one_node_alone_is_not_compared() -> None:
    assert judge(evidence(fails(0, MISSING), hosts=("a",))).cause.endswith("No module named 'flash_attn'")


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
    assert verdict.culprit is not None
    assert (verdict.culprit.rank, job_exit_code(verdict)) == (6, 1)


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
    assert rows[0].startswith("  because of it rank 0-2, 6: ")
    assert rows[0].endswith("; in their logs")


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
