"""Starts the dashboard: beside a job with --dashboard, or by `holdfast dashboard`. Its server is holdfast.dashboard."""
