"""holdfast's coordinator for plain torchrun: `torchrun --rdzv-backend=holdfast …`.

torch imports this module at every start of torchrun, whatever the backend, because it loads every entry point of its
group `torchrun.handlers`. So nothing is imported here, and nothing can fail, before a handler is requested.

    handler.py      torch's interface: stores, errors. The only file here that imports torch
    members.py      the thread beside torchrun's, and the requests between the two
    member.py       the agent's machine and its link, with torchrun instead of our worker group
    settings.py     torchrun's parameters as ours
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
