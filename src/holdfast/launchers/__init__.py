"""Schedulers, which start jobs: what they tell their processes, and what is submitted to them.

Knows text: environment variables, batch scripts, answers of the scheduler's own commands. Knows nothing of agents.
"""
