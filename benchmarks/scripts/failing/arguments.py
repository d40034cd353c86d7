"""Command lines and configurations that a script does not accept."""

from __future__ import annotations

import argparse
import os
import sys

from .parts import every, one, script


@every("0 1", "HF232", says="--leraning-rate", arguments=("--leraning-rate", "0.1"))
def option_misspelt() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--learning-rate", type=float)
    parser.parse_args()


@every("0 1", "HF232", says="--epochs", arguments=("--epochs", "ten"))
def option_malformed() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--epochs", type=int)
    parser.parse_args()


@every("0 1", "HF232", says="--fancy", arguments=("--fancy",))
def option_unknown_to_click() -> None:
    import click

    click.command()(lambda: None)(sys.argv[2:])


@every("0 1", "HF232")
def override_of_hydra() -> None:
    print(
        "Could not override 'model.hiden_size'.\nTo append to your config use +model.hiden_size=512\n"
        "Key 'hiden_size' is not in struct\n    full_key: model.hiden_size\n    object_type=dict\n\n"
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
        file=sys.stderr,
    )
    sys.exit(1)


@one(1, "HF201", says="while parsing a flow sequence")
def yaml_is_broken() -> None:
    import yaml

    yaml.safe_load("model:\n  layers: [2, 3\n  width: 4\n")


@one(1, "HF201", says="NUM_SHARDS")
def variable_is_no_number() -> None:
    os.environ["NUM_SHARDS"] = "auto"
    if not os.environ["NUM_SHARDS"].isdigit():
        raise ValueError(f"NUM_SHARDS must be a number, not {os.environ['NUM_SHARDS']!r}")


class ValidationError(ValueError):
    pass


@one(0, "HF201", says="max_seq_length")
def pydantic_finds_an_error() -> None:
    raise ValidationError(
        "2 validation errors for TrainConfig\nmax_seq_length\n  Input should be a valid integer, unable to parse string "
        "as an integer [type=int_parsing, input_value='4k', input_type=str]\n"
        "    For further information visit https://errors.pydantic.dev/2.11/v/int_parsing\ntokens_file\n"
        "  Field required [type=missing, input_value={'max_seq_length': '4k'}, input_type=dict]\n"
        "    For further information visit https://errors.pydantic.dev/2.11/v/missing"
    )


OLD = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--batch", type=int, default=8)
print(parser.parse_args().local_rank)
"""
NEW = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
print(parser.parse_args().batch)
"""
script("local-rank-wanted", "0 1", "HF233", files={"train.py": OLD})
script("local-rank-given", "0 1", "HF233", files={"train.py": NEW}, arguments=("--local-rank=0",))
