"""`holdfast config show|schema`: the options that a run would get here, and where each value comes from; a JSON schema
of holdfast.toml, for editors.

Knows the table of options. config.py reads the files and decides what a value may be; tests hold the schema against it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from holdfast.cli import config, grammar
from holdfast.cli.config import LISTED, OPTIONS_BY_KEY
from holdfast.cli.option_table import FLAG, FLOAT, INT, LIST, OPTIONS, Option, wrapped
from holdfast.cli.plan import OptionValue, option_lines, option_values
from holdfast.cli.printing import print_json
from holdfast.protocol.errors import UsageError

WAYS = ("show", "schema")
USAGE = """\
usage: holdfast config show [options of holdfast run] [script]
       holdfast config schema

show    every option of holdfast run, its value, and where it comes from: the command line, a variable,
        the project's file, the user's file, the Slurm step or the default; starts nothing
schema  a JSON schema of holdfast.toml, for editors: holdfast config schema > holdfast.schema.json

options of show, besides those of a run:
  --json  print JSON
  --help  print this text, and exit"""
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class ConfigData(TypedDict):
    """The options that a run would get."""

    files: list[str]
    """The configuration files that were read, those that count more first."""
    options: list[OptionValue]


JSON_FORMS = {"config": ((ConfigData,),)}


def main_config(argv: Sequence[str]) -> int:
    """Run `holdfast config` with these arguments. Returns the exit status. Raises HoldfastError."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if argv[:1] == ["schema"]:
        if argv[1:] not in ([], ["--json"]):
            raise UsageError(f"holdfast config schema takes no {argv[1]}")
        print(json.dumps(schema(), indent=1))
        return 0
    if argv[:1] != ["show"]:
        raise UsageError(f"holdfast config: write one of {', '.join(WAYS)}; holdfast config --help explains them")
    return show(argv[1:])


def show(argv: Sequence[str]) -> int:
    from holdfast.cli.under_slurm import complete

    files: list[config.ReadFile] = []

    def configure(given: Mapping[str, object], sources: Mapping[str, str]) -> grammar.Configured:
        files.extend(config.files(given, sources))
        return config.together(files, given)

    parsed = grammar.parse(argv, os.environ, OPTIONS, needs_script=False, configure=configure)
    if parsed.values.help:
        print(USAGE)
        return 0
    if "SLURM_STEP_ID" in os.environ:
        parsed, _ = complete(parsed, os.environ)
    if parsed.values.json:
        print_json(ConfigData(files=[file.path for file in files], options=option_values(parsed)))
        return 0
    names = ", then ".join(config.shown(file.path) for file in files) or "none"
    print("\n".join([f"configuration files: {names}", "", *option_lines(parsed)]))
    return 0


# --- the schema -------------------------------------------------------------------------------------------------------


def schema() -> dict[str, object]:
    """The JSON schema of holdfast.toml. Keys may be written with dashes and with underscores."""
    keys = {key: {"description": option.help, **values(option)} for key, option in OPTIONS_BY_KEY.items()}
    keys |= {key.replace("-", "_"): value for key, value in keys.items()}
    return {
        "$schema": DRAFT,
        "title": "holdfast.toml",
        "description": " ".join(wrapped("Options of holdfast run, by their long names without the dashes.", 80)),
        "type": "object",
        "properties": keys,
        "additionalProperties": False,
    }


def values(option: Option) -> dict[str, Any]:
    """The values that the option takes in a file."""
    if option.kind == FLAG:
        return {"type": "boolean"}
    if option.kind == INT:
        return {"type": "integer"}
    if option.kind == FLOAT:
        return {"type": "number"}
    text = {"enum": list(option.choices)} if option.choices else {"type": "string"}
    is_list = option.kind == LIST or option.metavar.endswith(LISTED)
    forms: list[dict[str, Any]] = [text]
    if option.number_too or is_list:
        forms.append({"type": "integer"})
    if is_list:
        forms.append({"type": "array", "items": {"type": ["string", "integer"]}})
    if option.dest == "rdzv_conf":
        forms.append({"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}})
    return text if len(forms) == 1 else {"anyOf": forms}
