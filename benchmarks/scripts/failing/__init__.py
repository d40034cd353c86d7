"""The catalogue of failures, with the truth about each: the rank that an expert blames, and the causes that one accepts.

It was written before the rules were looked at, and a case is added as it happened: words are not chosen to fit a rule.
"""

from __future__ import annotations

from .parts import CASES, Case, play

# Each adds its cases to CASES.
from . import (  # noqa: F401
    arguments,
    files,
    foreign,
    imports,
    machine,
    network,
    nodes,
    python,
    signals,
    torch_data,
    torch_groups,
    torch_steps,
)

__all__ = ["CASES", "Case", "play"]
