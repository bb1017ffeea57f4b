"""It tells machines what is going on: metrics for Prometheus, spans for OpenTelemetry, log lines with their place."""
