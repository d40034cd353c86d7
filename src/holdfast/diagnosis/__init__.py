"""Turns evidence into verdicts, findings and texts for users."""
