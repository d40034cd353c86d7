"""`holdfast stop` and `holdfast kill`: the end of a job on all its nodes."""
