"""What a cubin says about its kernels, read from the ELF file itself: no GPU, no driver, no cuobjdump.

The `.nv.info` sections hold records (format u8, attribute u8, then a 16-bit value, or a 16-bit length and a payload). NVIDIA does
not document the attributes; those below were decoded on cubins of both toolchains, and tests compare them with what ptxas
prints and with what the driver reports.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from aot.build.elf import Elf, ElfError

EM_CUDA = 190
# From sm_90 on the first 1 KB of a block's shared memory is the system's. A kernel that has shared variables counts it in the size
# of its section; ptxas -v, the limit per block and the driver do not.
_RESERVED_SMEM, _RESERVED_SYMBOL = 1024, ".nv.reservedSmem.offset0"
_SIZED = 4  # record format: 16-bit length, then the payload; all others hold their value in the 16 bits

# attribute: payload
_MAX_THREADS = 0x05  # 3 u32: __launch_bounds__
_PARAM_BANK = 0x0A  # u32 symbol, u16 base, u16 size
_REQUIRED_BLOCK = 0x10  # 3 u32: required block shape
_FRAME_SIZE = 0x11  # u32 symbol, u32 bytes of local memory a thread
_PARAM = 0x17  # u32 index, u16 ordinal, u16 offset, u32 whose value >> 18 is the size
_PARAM_BYTES = 0x19  # value: bytes of all parameters
_REGISTER_CAP = 0x1B  # value: the most registers that the compiler may use, 255 unless __maxnreg__ or -maxrregcount says otherwise
_REGISTERS = 0x2F  # u32 symbol, u32 registers a thread
_TOOLKIT = 0x37  # u32: 130 is 13.0


class CubinError(ElfError):
    """The file is no cubin, is damaged, or lacks what every cubin has."""


@dataclass(frozen=True)
class Param:
    ordinal: int
    offset: int  # from the start of the parameters
    size: int


@dataclass(frozen=True)
class Kernel:
    entry: str
    registers: int
    local_bytes: int  # stack frame a thread: spills and local arrays
    static_smem: int  # without the system's part
    params: tuple[Param, ...]
    param_bytes: int
    param_base: int  # where the first parameter is in the constant bank
    required_block: tuple[int, int, int] | None  # the only block that may be launched
    max_block: tuple[int, int, int] | None  # from __launch_bounds__: x * y * z is the largest number of threads
    register_cap: int = 255


@dataclass(frozen=True)
class CubinInfo:
    sm: int  # 90, 100, 103, 120
    toolkit: int  # 130 is 13.0; 0 if not stated
    kernels: dict[str, Kernel]


def _records(data: bytes):
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise CubinError("a .nv.info section ends inside a record")
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = b""
        if form == _SIZED:
            payload, at = data[at : at + value], at + value
            if len(payload) != value:
                raise CubinError("a .nv.info section ends inside a record")
        yield attribute, value, payload


def read_cubin(data: bytes) -> CubinInfo:
    """Raises CubinError for anything that is not a whole cubin."""
    try:
        return _read(Elf(data))
    except CubinError:
        raise
    except (ElfError, struct.error, ValueError, IndexError) as error:
        raise CubinError(str(error)) from error


def _read(elf: Elf) -> CubinInfo:
    if elf.machine != EM_CUDA:
        raise CubinError(f"not a cubin: ELF machine {elf.machine}, not {EM_CUDA}")
    # ABI 7 (CUDA 12) has the SM number in the lowest byte of the flags, ABI 8 (CUDA 13) in the second.
    sm = elf.flags & 0xFF if elf.abi_version <= 7 else elf.flags >> 8 & 0xFF

    symbols = elf.symbols()
    registers, frames = {}, {}
    common = elf.section(".nv.info")
    if common is None:
        raise CubinError("no .nv.info section")
    for attribute, _, payload in _records(elf.bytes_of(common)):
        if attribute in (_REGISTERS, _FRAME_SIZE):
            symbol, number = struct.unpack("<II", payload)
            (registers if attribute == _REGISTERS else frames)[symbols[symbol].name] = number

    reserved = _RESERVED_SMEM if any(symbol.name == _RESERVED_SYMBOL for symbol in symbols) else 0
    kernels, toolkit = {}, 0
    for section in elf.sections:
        if not section.name.startswith(".nv.info."):
            continue
        entry = section.name.removeprefix(".nv.info.")
        if elf.section(f".nv.constant0.{entry}") is None:
            continue  # a device function that is called, not a kernel
        params, param_bytes, param_base, required, limit, cap = [], 0, 0, None, None, 255
        for attribute, value, payload in _records(elf.bytes_of(section)):
            if attribute == _PARAM:
                _, ordinal, offset, size = struct.unpack("<IHHI", payload)
                params.append(Param(ordinal, offset, size >> 18))
            elif attribute == _PARAM_BYTES:
                param_bytes = value
            elif attribute == _REGISTER_CAP:
                cap = value
            elif attribute == _PARAM_BANK:
                _, param_base, _ = struct.unpack("<IHH", payload)
            elif attribute == _REQUIRED_BLOCK:
                required = struct.unpack("<III", payload)
            elif attribute == _MAX_THREADS:
                limit = struct.unpack("<III", payload)
            elif attribute == _TOOLKIT:
                (toolkit,) = struct.unpack("<I", payload)
        if entry not in registers or entry not in frames or elf.section(f".text.{entry}") is None:
            raise CubinError(f"kernel {entry} has no code, register count or frame size")
        shared = elf.section(f".nv.shared.{entry}")
        kernels[entry] = Kernel(
            entry=entry,
            registers=registers[entry],
            local_bytes=frames[entry],
            static_smem=max(0, shared.size - reserved) if shared else 0,
            params=tuple(sorted(params, key=lambda param: param.ordinal)),
            param_bytes=param_bytes,
            param_base=param_base,
            required_block=required,
            max_block=limit,
            register_cap=cap,
        )
    if not kernels:
        raise CubinError("no kernel in it")
    # Called device functions have frames of their own.
    called = max((size for name, size in frames.items() if name not in kernels), default=0)
    if called:
        kernels = {name: Kernel(**vars(kernel) | {"local_bytes": kernel.local_bytes + called}) for name, kernel in kernels.items()}
    return CubinInfo(sm=sm, toolkit=toolkit, kernels=kernels)
