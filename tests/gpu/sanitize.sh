#!/usr/bin/env bash
# compute-sanitizer over tests/gpu/sanitize_cases.py: out-of-bounds and misaligned accesses, races in shared memory, barriers,
# device memory that is read before it was written.
set -euo pipefail
cd "$(dirname "$0")/../.."
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "compute-sanitizer is not installed; set COMPUTE_SANITIZER to its path" >&2; exit 1; }
# One allocation a tensor: with torch's caching allocator an access past the end lands in another live tensor, unseen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=".:loader:python${PYTHONPATH:+:$PYTHONPATH}"
for tool in ${*:-memcheck racecheck synccheck initcheck}; do
  echo "== $tool"
  "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 3 --print-limit 20 "${PYTHON:-python3}" -m tests.gpu.sanitize_cases
done
