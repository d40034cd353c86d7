"""Snapshots of a training job, on disk and in memory.

Standard library and `holdfast.protocol.errors` only: no torch, so that the command line and the saver process can use
it. docs/snapshots.md describes the format and its promises.
"""
