"""Where jobs are started by somebody else: what a scheduler tells its processes, and what it is to be told.

Knows text: environment variables, batch scripts, answers of the scheduler's own commands. Knows nothing of agents.
"""
