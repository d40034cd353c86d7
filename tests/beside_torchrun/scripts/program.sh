#!/bin/sh
# The probe as a program of its own: what --no-python gets, read without Python.
exec "$PROBE_PYTHON" -u "$(dirname "$0")/probe.py" "$@"
