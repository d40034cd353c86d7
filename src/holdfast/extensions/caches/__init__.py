"""Compiled kernels are kept on the node over restarts and jobs (--cache-dir)."""
