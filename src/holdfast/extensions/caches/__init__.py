"""Compiled kernels are kept over restarts and jobs (--cache-dir), and shared between nodes (--cache-from)."""
