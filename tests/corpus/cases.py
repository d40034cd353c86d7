"""All faults that were written down by hand: who is to blame and what it is called."""

from __future__ import annotations

from tests.corpus.cases_gpu import GPU
from tests.corpus.cases_machine import MACHINE
from tests.corpus.cases_network import NETWORK
from tests.corpus.cases_script import HARD, SCRIPT
from tests.corpus.telling import Case

CASES: list[Case] = [*GPU, *NETWORK, *MACHINE, *SCRIPT, *HARD]
