"""Snapshots of a training job, on disk and in memory.

Standard library and `holdfast.protocol.errors` only: no torch, so that the command line and the saver process can use
it. docs/internals/snapshot-format.md describes the format, docs/snapshots.md what is promised.
"""
