"""Needs what this machine does not have."""

from benchmarks.gpu.measuring import not_here

not_here("8 GPUs are needed")
