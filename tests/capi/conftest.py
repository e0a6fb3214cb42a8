"""Fixtures of the C interface's tests.

Under sanitizers (the interpreter itself is not instrumented, so the runtime must be there first):
    CULA_TEST_SANITIZE=1 LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0 python -m pytest tests/capi
"""

import pytest

from tests.capi import abi, standin


@pytest.fixture(scope="session")
def lib():
    """The library's C++ with a stand-in kernel table."""
    return abi.load(standin.build())
