"""`holdfast profile`: profiles of some ranks, over some steps or seconds."""
