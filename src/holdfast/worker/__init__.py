"""What runs inside a worker process; standard library only."""

from holdfast.worker.beat import at_step, beat
from holdfast.worker.drain import on_stop, should_stop

__all__ = ["at_step", "beat", "on_stop", "should_stop"]
