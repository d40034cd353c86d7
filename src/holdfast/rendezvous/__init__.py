"""Finds the coordinator, or decides which agent hosts it."""
