"""Where the coordinator is, and who may be it."""
