"""What a snapshot of a training job is, on disk and in memory.

Standard library and `holdfast.protocol.errors` only: no torch, so that the command line and the saver process can use it.
The format and its promises are told in docs/snapshots.md.
"""
