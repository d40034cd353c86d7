"""One node's agent as a pure state machine. Start reading at `agent.py`."""
