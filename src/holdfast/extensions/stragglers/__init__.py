"""Stragglers: ranks and nodes that slow down the others at every step."""
