"""One node's agent as a pure state machine; `machine.py` is where to begin reading."""
