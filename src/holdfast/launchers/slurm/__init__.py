"""Slurm: batch scripts, and what a step tells its tasks."""
