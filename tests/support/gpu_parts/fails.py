"""Measures something, and fails then."""

from benchmarks.gpu.measuring import note

note("before the failure", 2.0, "s")
raise RuntimeError("what was resumed is not what was saved")
