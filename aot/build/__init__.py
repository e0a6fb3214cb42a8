"""The build: compile the matrix, link libcula.so, assemble and verify artifacts/. Entry point: build_kernels.py."""
