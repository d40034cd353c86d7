"""What runs inside a worker process; standard library only."""

from holdfast.worker.beat import beat
from holdfast.worker.drain import on_stop, should_stop

__all__ = ["beat", "on_stop", "should_stop"]
