"""The job's single authority as a pure state machine. Start reading at `coordinator_machine.py`."""
