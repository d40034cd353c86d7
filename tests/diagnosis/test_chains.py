"""Which exception of a failure tells its cause: chains, groups, threads, old tracebacks, and ends without an exception."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.diagnosis.causes.exception_text import ExceptionText
from holdfast.diagnosis.causes.find import cause_of
from tests.corpus.telling import BECAUSE, GLOO_CLOSED, HANDLING, HEAD, fails


def traced(says: str, line: str = "f(x)") -> str:
    return f'{HEAD}  File "/data/job/train.py", line 18, in step\n    {line}\n{says}\n'


def ended(stderr: str, code: int = 1) -> tuple[str, str]:
    cause = cause_of(structs.replace(fails(1, code=code), stderr_tail=stderr))
    return cause.code, cause.line


def test_an_accident_in_finally_is_not_the_cause() -> None:
    removed = traced("FileNotFoundError: [Errno 2] No such file or directory: 'x.lock'", "os.remove('x.lock')")
    code, line = ended(traced("ValueError: sample 17 has no label") + HANDLING + removed)
    assert (code, line.partition(",")[0]) == ("HF201", "raised ValueError: sample 17 has no label")
    assert ended(traced("torch.OutOfMemoryError: CUDA out of memory.") + HANDLING + removed)[0] == "HF207"


def test_what_was_tried_first_is_not_the_cause_of_what_failed_then() -> None:
    missing = traced("FileNotFoundError: [Errno 2] No such file or directory: 'model.bin'", "open('model.bin')")
    assert ended(missing + HANDLING + traced("urllib.error.HTTPError: HTTP Error 503: Busy"))[0] == "HF238"
    assert ended(missing + HANDLING + traced("NameError: name 'fh' is not defined", "fh.close()"))[0] == "HF217"


def test_an_exception_that_explains_another_leads_to_it() -> None:
    full = traced("OSError: [Errno 28] No space left on device", "f.write(x)")
    told = traced("RuntimeError: could not save step 4", "raise RuntimeError(text) from error")
    assert ended(full + BECAUSE + told)[0] == "HF214"
    code, line = ended(traced("ValueError: bad row") + BECAUSE + told)
    assert (code, line) == (
        "HF201",
        "raised ValueError: bad row, and because of it RuntimeError: could not save step 4",
    )


def test_the_middle_of_a_chain_counts() -> None:
    middle = traced("torch.OutOfMemoryError: CUDA out of memory.", "y = x @ w")
    code, _ = ended(
        traced("KeyError: 'cache'", "cache['x']")
        + HANDLING
        + middle
        + HANDLING
        + traced("AttributeError: 'NoneType' object has no attribute 'close'", "log.close()")
    )
    assert code == "HF207"


def test_a_peer_that_goes_while_the_own_exception_is_handled_is_no_cause() -> None:
    code, line = ended(traced("KeyError: 'input_ids'") + HANDLING + traced(GLOO_CLOSED, "dist.barrier()"))
    assert code == "HF201"
    assert line.startswith("raised KeyError: 'input_ids'")


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/data/job/train.py", line 9, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "/data/job/train.py", line 7, in main
    |     raise ExceptionGroup("inner", errors)
    | ExceptionGroup: inner (2 sub-exceptions)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "/data/job/train.py", line 4, in load
      |     open("a.bin")
      | FileNotFoundError: [Errno 2] No such file or directory: 'a.bin'
      +---------------- 2 ----------------
      | ValueError: second
      +------------------------------------
"""


@pytest.mark.parametrize("recorded", [False, True])
def test_the_first_exception_inside_of_a_group_is_told(recorded: bool) -> None:
    failure = structs.replace(fails(1), stderr_tail=GROUP)
    if recorded:
        outer = "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"
        failure = structs.replace(failure, message=outer, error_type="ExceptionGroup", traceback=GROUP)
    cause = cause_of(failure)
    assert cause.code == "HF217"
    assert "No such file or directory: 'a.bin'" in cause.line


def test_a_thread_that_died_is_the_cause_of_the_wait_for_it() -> None:
    thread = "Exception in thread Thread-1 (load):\n" + traced("PermissionError: [Errno 13] Permission denied: '/d/x'")
    code, line = ended(thread + traced("_queue.Empty", "batches.get(timeout=10)"))
    assert code == "HF218"
    assert line.startswith("lost its thread 'Thread-1 (load)', which has no permission: PermissionError")
    assert ended(thread + traced("ZeroDivisionError: division by zero"))[1].startswith("raised ZeroDivisionError")
    assert ended(thread, code=3)[0] == "HF218"


@pytest.mark.parametrize("code", [1, 3, 120])
def test_a_traceback_is_the_cause_if_it_is_the_last_thing_on_stderr(code: int) -> None:
    said = traced("FileNotFoundError: [Errno 2] No such file or directory: 'cache.bin'")
    warning = "/opt/x.py:3: UserWarning: leaked\n  warnings.warn('leaked')\n"
    assert ended(said, code)[0] == "HF217"
    assert ended(said + warning, code)[0] == "HF217"
    assert ended(said + "giving up: no data\n", code) == ("HF205", f"ended with exit code {code}: giving up: no data")
    assert ended(said + BECAUSE.lstrip() + traced("ValueError: x") + "so we stop\n", code)[1].endswith(": so we stop")


def test_a_message_of_several_lines_is_no_later_word() -> None:
    said = traced("RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: 'a'.")
    assert ended(said)[0] == "HF237"
    asserted = traced(
        "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    )
    assert ended(asserted)[0] == "HF221"


def test_a_signal_needs_no_traceback() -> None:
    assert ended(traced("KeyError: 'cache'"), -9)[0] == "HF204"


def test_what_native_code_wrote_before_it_aborted_is_told() -> None:
    dump = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n  File "a.py", line 9 in f\n'
    )
    code, line = ended(f"loading\npython: kernel.c:12: launch: Assertion `n > 0' failed.\n{dump}", -6)
    assert (code, line) == (
        "HF223",
        "crashed in native code by SIGABRT (native code gave up): python: kernel.c:12: launch: Assertion `n > 0' failed.",
    )
    assert ended(f"100%|##| 3/3 [00:01, 2.7it/s]\n{dump}", -6)[1].endswith("(native code gave up)")


def test_stacks_of_faulthandler_are_no_last_words() -> None:
    stacks = 'Thread 0x00007f (most recent call first):\n  File "/data/job/train.py", line 19 in <module>\n'
    assert ended(f"Timeout (0:00:05)!\n{stacks}") == (
        "HF205",
        "ended with exit code 1: Timeout (0:00:05)!, by faulthandler.dump_traceback_later",
    )
    assert ended(f"no data left\n{stacks}")[1] == "ended with exit code 1: no data left"


def test_the_last_words_on_stdout_are_told_if_stderr_has_none() -> None:
    end = structs.replace(fails(1, code=2), stderr_tail="", stdout_tail="step 3\nFATAL: checksum differs\n")
    assert cause_of(end).line == "ended with exit code 2: FATAL: checksum differs"
    noise = structs.replace(end, stderr_tail="a.py:3: UserWarning: old\n  warnings.warn('old')\n")
    assert cause_of(noise).line == "ended with exit code 2: FATAL: checksum differs"
    assert cause_of(structs.replace(end, stderr_tail="no GPU\n")).line == "ended with exit code 2: no GPU"


SURVIVES = "holdfast: ht.survive: if a rank is lost, the others keep their processes and wait for its replacement\n"
RECEIVE_FAILED = (
    "[rank0]:[W1129 04:05:30.1 TCPStore.cpp:106] [c10d] recvValue failed on SocketImpl(fd=4): Connection reset by peer\n"
    "Exception raised from recvBytes at /pytorch/Utils.hpp:697 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f05 in /venv/libc10.so)\n"
    "frame #31: _start + 0x21 (0x55cb in /venv/bin/python)\n\n"
)
SHORT_OF_MEMORY = "holdfast: rank 1 ran out of memory with 64 samples at once: this optimizer step is done in parts\n"


WARNS = (
    "/job/train.py:9: RuntimeWarning: holdfast: no snapshots in memory: no room\nTraining goes on.\n  snaps.resume()\n"
)


@pytest.mark.parametrize("before", [SURVIVES, RECEIVE_FAILED, SURVIVES + RECEIVE_FAILED, SHORT_OF_MEMORY, WARNS])
def test_what_holdfast_and_traces_of_warnings_say_is_no_reason_of_an_exit(before: str) -> None:
    exited = structs.replace(fails(0, code=7), stderr_tail=before)
    assert cause_of(exited).line == "ended with exit code 7"
    assert cause_of(exited).advice.startswith("no reason of it was kept: look at its output")
    assert ended(f"no data left\n{before}", 7) == ("HF205", "ended with exit code 7: no data left")


def test_what_holdfast_writes_after_a_traceback_shows_that_the_program_went_on() -> None:
    went_on = traced("ValueError: bad row") + SURVIVES
    assert ended(went_on, 7)[1] == "ended with exit code 7"


def test_modules_that_import_each_other_are_not_to_be_renamed() -> None:
    cycle = "cannot import name 'a' from partially initialized module 'alpha' (most likely due to a circular import) (/data/alpha.py)"
    cause = cause_of(fails(0, f"ImportError: {cycle}"))
    assert cause.line.startswith("has modules that import each other: ImportError: cannot import name 'a'")
    assert "rename" not in cause.advice
    hidden = structs.replace(
        fails(0, f"ImportError: {cycle}"), facts={"hides": "/data/alpha.py hides the library alpha"}
    )
    assert "rename" in cause_of(hidden).advice


def test_what_a_log_says_besides_is_not_the_cause_of_an_exit() -> None:
    said = "wandb: View run at https://wandb.ai/a/b\n2026-01-02 INFO connection to https://x.org timed out, again\n"
    assert ended(said, 3) == ("HF205", "ended with exit code 3")


def test_a_bus_error_with_room_in_shared_memory_is_no_full_shared_memory() -> None:
    def code(fact: str, exit_code: int = -7) -> str:
        return cause_of(structs.replace(fails(1, code=exit_code), facts={"shm": fact})).code

    assert code("/dev/shm has 15.6 GiB free of 15.7 GiB") == "HF223"
    assert code("/dev/shm has 15.6 GiB free of 15.7 GiB", 135) == "HF223"
    assert code("/dev/shm has 64 MiB free of 64 MiB") == "HF216"
    assert code("/dev/shm has 1.1 GiB free of 15.7 GiB") == "HF216"
    assert code("") == "HF216"


def test_the_other_spelling_of_local_rank_is_told() -> None:
    said = "usage: t.py [-h] [--local_rank N]\nt.py: error: unrecognized arguments: --local-rank=1\n"
    assert ended(said, 2) == (
        "HF233",
        "knows --local_rank, but was given --local-rank, the spelling of torch's launcher since 2.0",
    )


def test_a_cpu_build_asked_for_nccl_is_sent_to_gloo() -> None:
    cause = cause_of(fails(0, "RuntimeError: Distributed package doesn't have NCCL built in"))
    assert cause.code == "HF219"
    assert "init_process_group('gloo')" in cause.advice


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("holdfast.protocol.errors.TrackingError", "`holdfast explain HF133`"),
        ("mine.TrackingError", ""),  # a class of the program with that name
        ("holdfast.protocol.errors.Fault", ""),
    ],
)
def test_an_error_of_holdfast_s_own_is_explained_by_its_code(kind: str, advice: str) -> None:
    raised = structs.replace(fails(0), stderr_tail=traced(f"{kind}: track(o=…): a str has no state_dict()"))
    assert (cause_of(raised).code, cause_of(raised).advice) == ("HF201", advice)


def test_a_sentence_that_is_no_exception_is_not_said_to_be_raised() -> None:
    """As a torchrun under our coordinator reports its workers."""
    failure = structs.replace(fails(1), message="its torchrun starts its workers again", error_type="", traceback="")
    assert cause_of(structs.replace(failure, stderr_tail="")).line == "failed: its torchrun starts its workers again"


GROUP_ALONE = """  + Exception Group Traceback (most recent call last):
  |   File "/data/job/train.py", line 8, in <module>
  |     raise ExceptionGroup("several", errors)
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: bad row 7
    +---------------- 2 ----------------
    | KeyError: 'row'
    +------------------------------------
"""


def test_a_group_of_exceptions_that_were_never_raised_has_its_own_place() -> None:
    failure = structs.replace(fails(1), message="", error_type="", traceback=GROUP_ALONE, stderr_tail="")
    words = ExceptionText(failure)
    assert (words.text, words.place) == ("ValueError: bad row 7", "train.py:8")
    raised = GROUP_ALONE.replace(
        "    | ValueError", '    |   File "/data/job/data.py", line 3, in row\n    | ValueError'
    )
    assert ExceptionText(structs.replace(failure, traceback=raised)).place == "data.py:3"
    in_torch = structs.replace(failure, traceback=raised.replace("/data/job/", "/data/torch/"))
    assert ExceptionText(in_torch).place == "data.py:3", "a folder may have the name of the library"
