"""Prometheus metrics and health checks of an agent and its job. Off by default."""
