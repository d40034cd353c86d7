"""`--otel URL`: the run and its generations as spans of OpenTelemetry."""
