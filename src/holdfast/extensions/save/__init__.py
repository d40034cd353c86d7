"""`holdfast save`: all ranks save at their next safe point, and go on."""
