"""The coordinator of a job as a pure state machine. Start reading at `coordinator.py`."""
