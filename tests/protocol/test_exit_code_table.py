"""The table of exit codes, and what is held against it."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast import cli
from holdfast.protocol.exit_codes import EXIT_CODES, EXIT_SIGNAL_BASE, EXIT_USAGE, Scheduler

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"


def test_no_code_stands_twice_or_can_be_that_of_a_signal() -> None:
    numbers = [each.number for each in EXIT_CODES]
    assert len(numbers) == len(set(numbers))
    assert all(0 < number < EXIT_SIGNAL_BASE for number in numbers)


def test_whoever_asks_for_the_end_of_the_job_says_what_the_scheduler_is_to_do() -> None:
    assert [each.number for each in EXIT_CODES if each.asks and each.scheduler is Scheduler.COUNT] == []


def test_the_page_for_schedulers_has_a_column_for_each_code_that_a_worker_asks_by() -> None:
    (head,) = re.findall(r"^\| scheduler \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    columns = {int(number) for number in re.findall(r"\d+", head)}
    assert {each.number for each in EXIT_CODES if each.asks} == {number for number in columns if number < 128}


def test_the_plain_command_has_the_same_code_for_bad_usage() -> None:
    """It imports no module of its own before a command is chosen."""
    assert cli.EXIT_USAGE == EXIT_USAGE
