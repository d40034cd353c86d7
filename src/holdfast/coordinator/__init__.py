"""The job's single authority as a pure state machine; `machine.py` is where to begin reading."""
