"""What runs inside a worker process; standard library only."""

from holdfast.worker.drain import on_stop, should_stop

__all__ = ["on_stop", "should_stop"]
