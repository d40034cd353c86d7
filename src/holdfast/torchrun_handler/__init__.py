"""holdfast's coordinator for plain torchrun: `torchrun --rdzv-backend=holdfast …`.

torch loads every entry point of its group `torchrun.handlers`, so it imports this module at every start of torchrun.
This module therefore imports nothing, and nothing can fail, before a handler is requested.

    handler.py      torch's interface: stores, errors. Only this file imports torch
    member.py       the agent's machine in a thread beside torchrun's, and torchrun's parameters as our options
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: torch calls it on import, and calls the result when `--rdzv-backend=holdfast` is given."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler. Raises HoldfastError for invalid parameters."""
    from holdfast.torchrun_handler.handler import HoldfastRendezvous

    return HoldfastRendezvous(params)
