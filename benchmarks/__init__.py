"""holdfast beside torchrun, on the same scripts, in one run: `make bench` or `python -m benchmarks --help`."""
