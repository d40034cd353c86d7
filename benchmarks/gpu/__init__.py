"""The campaign on a machine with one GPU: `make gpu`, or `python3 -m benchmarks.gpu --help`.

Needs Python 3.11 with torch, and nothing else until it has installed what is missing.
"""
