"""Holds what a command printed with --json against its schema: tests that read such an output read it by `checked`."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from tools import json_schemas


@functools.cache
def validator(command: str) -> Draft202012Validator:
    """Of the schema, in which every field of a document must be named. Users' may have more, so that fields can be
    added."""
    return Draft202012Validator(json_schemas.document(command, closed=True))


def checked(command: str, text: str) -> Any:
    """The document that `holdfast COMMAND --json` has printed; without the version, which is in each."""
    document = json.loads(text)
    problem = best_match(validator(command).iter_errors(document))
    if problem is not None:
        problems = [each for each in problem.context or [problem] if "'error' is" not in each.message]
        problem = min(problems, key=lambda each: len(each.message))
        pytest.fail(f"holdfast {command} --json is not as its schema says: {problem.json_path}: {problem.message}")
    assert document.pop("schema") == 1
    return document
