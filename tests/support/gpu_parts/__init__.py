"""Parts of a campaign (benchmarks/gpu) that work, fail, hang, and cannot run: its logic is tested with these."""
