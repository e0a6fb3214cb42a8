"""libcula.so opened: prototypes, version check, errors as exceptions. One a process, opened at the first call."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import warnings
from ctypes import POINTER, byref, c_uint16, cast
from dataclasses import dataclass

from . import abi, artifacts, errors

_lock = threading.Lock()
_library: Library | None = None


@dataclass(frozen=True)
class KernelInfo:
    """What the library says of one of its kernels (cula_kernel_desc)."""

    id: str
    entry_symbol: str
    param_sizes: tuple[int, ...]
    op: str
    arch: str
    max_dynamic_smem: int
    smem_carveout: int


class Library:
    """Functions of cula.h. `gil` has those that read Python objects: they run with the GIL held, the others without."""

    def __init__(self, described: artifacts.Artifacts):
        self.artifacts = described
        self._kernels: dict[int, KernelInfo] = {}
        path = str(described.library)
        try:
            if (size := described.library.stat().st_size) != described.library_size:  # opening a truncated one ends the process
                raise errors.ArtifactError(f"{path} has {size} bytes, but the manifest says {described.library_size}: the file was damaged or "
                                           f"comes from another build; {artifacts.AGAIN}")
            self.c, self.gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        except OSError as error:
            raise errors.ArtifactError(f"{path} does not open: {error}; {artifacts.AGAIN}") from None
        for name, (result, arguments) in abi.FUNCTIONS.items():
            try:
                function = getattr(self.gil if name == "cula_bind_objects" else self.c, name)
            except AttributeError:
                raise errors.VersionError(f"{path} has no {name}: it is older than this loader ({_dots(abi.VERSION)}); {artifacts.SAME_VERSION}") from None
            function.restype, function.argtypes = result, arguments
        number = self.c.cula_version()
        self.version = (number >> 16, number >> 8 & 255, number & 255)
        if self.version[0] != abi.VERSION[0] or self.version[:2] < abi.VERSION[:2]:
            raise errors.VersionError(f"{path} is version {_dots(self.version)}, this loader needs {abi.VERSION[0]}.{abi.VERSION[1]} or a "
                                      f"later minor version; {artifacts.SAME_VERSION}")
        if _dots(self.version) != described.package_version:
            raise errors.ArtifactError(f"{path} is version {_dots(self.version)}, but manifest.json beside it describes "
                                       f"{described.package_version}: they come from two builds; {artifacts.AGAIN}")

    @property
    def kernel_count(self) -> int:
        return self.c.cula_kernel_count()

    def kernel(self, index: int) -> KernelInfo:
        found = self._kernels.get(index)
        if found is None:
            found = self._kernels[index] = self._describe(index)
        return found

    def _describe(self, index: int) -> KernelInfo:
        desc = abi.new(abi.KernelDesc)
        self.check(self.c.cula_kernel_info(index, byref(desc)))
        sizes = cast(desc.param_sizes, POINTER(c_uint16))[: desc.param_count] if desc.param_count else []
        return KernelInfo(desc.id.decode(), desc.entry_symbol.decode(), tuple(sizes), _name(abi.OPS, desc.op), _name(abi.ARCHS, desc.arch),
                          desc.max_dynamic_smem, desc.smem_carveout)

    def fast(self, name: str):
        """The function without argtypes: ctypes then passes prebuilt byref() and c_xxx objects on, 0.1 us less an argument."""
        function = (self.gil if name == "cula_bind_objects" else self.c)[name]
        function.restype = ctypes.c_int32
        return function

    def build_info(self) -> dict:
        import json

        return json.loads(self.c.cula_build_info())

    def last_error(self) -> str:
        size = 1024
        while True:
            text = ctypes.create_string_buffer(size)
            needed = self.c.cula_last_error(text, size)
            if needed < size:
                return text.value.decode(errors="replace")
            size = needed + 1

    def check(self, status: int) -> None:
        """Raises the exception of a status that is not CULA_OK, with the library's message."""
        if status:
            kind = errors.BY_STATUS.get(status, errors.InternalError)
            raise kind(_in_words_of_python(self.last_error()))


# Messages of the library name fields and enumerators of cula.h; what a function here has in the place of one. LOG_HEAD and LOG_CHANNEL are one
# word in Python, where the op tells which it is.
_PYTHON_NAMES = (("has_null_slot is 1", "null_slot is given"), (" is missing (NULL)", " is missing"), ("CPU tensors take a NULL stream", "CPU tensors take no stream"))
_PYTHON_WORDS = {name.upper(): name for names in (abi.GATE_KINDS, abi.BETA_KINDS, abi.PREFILL_VARIANTS) for name in names} | {
    "LOG_HEAD": "log", "LOG_CHANNEL": "log", "CONST_HEAD": "decay"}
_ENUMERATOR = re.compile(rf"\b({'|'.join(_PYTHON_WORDS)})\b")


def _in_words_of_python(text: str) -> str:
    for field, said in _PYTHON_NAMES:
        text = text.replace(field, said)
    return _ENUMERATOR.sub(lambda found: repr(_PYTHON_WORDS[found[0]]), text)


def _check_environment() -> None:
    """Says so where the library will take CULA_NUM_THREADS for not set (aot/common/cpu/cpu_count.h)."""
    text = os.environ.get("CULA_NUM_THREADS")
    if text is not None and not (re.fullmatch(r"\s*\+?[0-9]+", text) and 1 <= int(text) <= 4096):
        warnings.warn(f"CULA_NUM_THREADS={text!r} is no number from 1 to 4096: it counts as not set", RuntimeWarning, stacklevel=3)


def library() -> Library:
    """The library of this process. Raises ArtifactError if there is none; the next call looks again."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = Library(artifacts.read(artifacts.find()))
                _check_environment()
    return _library


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _name(table: dict[str, int], number: int) -> str:
    return next((name for name, value in table.items() if value == number), str(number))


