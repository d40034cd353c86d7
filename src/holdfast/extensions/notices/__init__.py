"""Reports a job's turns to people (--notify)."""
