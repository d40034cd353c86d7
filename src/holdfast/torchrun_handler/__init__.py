"""holdfast's coordinator for plain torchrun: `torchrun --rdzv-backend=holdfast …`.

torch imports this module at every start of torchrun, whatever backend is asked for, because it loads every entry point of its
group `torchrun.handlers`. So nothing is imported here, and nothing can fail, before a handler is really wanted.

    handler.py      torch's interface: stores, errors. The only file here that imports torch
    membership.py   the thread beside torchrun's, and what the two say to each other
    member.py       the agent's machine and the meeting, with torchrun in the place of our worker group
    settings.py     torchrun's parameters as ours
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point names: torch calls it on import, and what it returns when `--rdzv-backend=holdfast` is given."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Raises HoldfastError when the parameters cannot be meant."""
    from holdfast.torchrun_handler.handler import HoldfastRendezvous

    return HoldfastRendezvous(params)
