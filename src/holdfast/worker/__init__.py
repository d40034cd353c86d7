"""Code that runs inside a worker process; standard library only."""

from holdfast.worker.drain import at_step, beat, on_stop, should_save, should_stop

__all__ = ["at_step", "beat", "on_stop", "should_save", "should_stop"]
