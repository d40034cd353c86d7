"""`holdfast stacks`: where all ranks of a running job are now."""
