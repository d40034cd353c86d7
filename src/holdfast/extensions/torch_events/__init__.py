"""torchelastic's events as JSON lines (--event-log-handler console)."""
