"""The agent's child processes (supervisor, workers, store server, saver) and the output that workers print."""
