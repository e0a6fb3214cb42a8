"""Where the JAX tests run. JAX takes three quarters of a GPU at its first use unless told not to, and other tests want it too."""

import importlib.util
import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A GPU machine may have torch alone; where CI runs, JAX is pinned.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("jax") is None else []


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """Arrays that a test makes are on this platform."""
    import jax

    try:
        device = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param} here")
    with jax.default_device(device):
        yield request.param
