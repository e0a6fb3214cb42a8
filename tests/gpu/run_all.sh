#!/usr/bin/env bash
# Everything that needs the GPU, on a machine that has artifacts/ and a python3 with torch: the tests, then compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=".:loader:python${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest -m gpu -q --durations=10 "$@"
tests/gpu/sanitize.sh
