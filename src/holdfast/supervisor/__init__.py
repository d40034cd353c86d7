"""The processes below the agent: supervisor, workers, store host, and what they print."""
