"""The processes below the agent: keeper, workers, store host, and what they print."""
