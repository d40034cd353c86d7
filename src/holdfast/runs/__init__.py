"""Runs of this user on this host, running or ended: finds them, and reads what they have left in their folders."""
