"""Runs a translated kernel (ptx.py) on the CPU, thread by thread.

Every load and store is checked against the buffers that were given; copies that are asynchronous happen as late as they may, or as
soon (`late`), so that a missing wait and a buffer that is filled too early both show. Shared memory starts as NaN. Warp-wide
instructions need all 32 lanes; a block in which nothing moves any more is reported.
"""

from __future__ import annotations

import random

import numpy as np

from tests.chunk.ptx import M32, M64, SHARED, WARP_WIDE, split

STRETCH = 200  # segments of a thread before others have their turn: one may be waiting for memory that another writes
ROUNDS = 20000

class Memory:
    """Global buffers by address, and the shared memory of one block."""

    def __init__(self, buffers, shared_bytes):
        self.buffers = [(array.ctypes.data, array.nbytes, array.reshape(-1).view(np.uint8)) for array in buffers]
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)

    def place(self, space, address, size):
        if space == "shared":
            offset, view = address - SHARED, self.shared
            if not 0 <= offset <= view.size - size:
                raise IndexError(f"shared memory at {offset}, {size} bytes of {view.size}")
        else:
            for start, length, view in self.buffers:
                if start <= address < start + length:
                    offset = address - start
                    if offset + size > length:
                        raise IndexError(f"{size} bytes at {offset} of a buffer of {length}")
                    break
            else:
                raise IndexError(f"global memory at {address:#x}, {size} bytes: in no buffer")
        if address % size and size in (2, 4, 8, 16):
            raise IndexError(f"{size} bytes at {address:#x}: not aligned")
        return view, offset

    def read(self, space, address, size):
        view, offset = self.place(space, address, size)
        return int.from_bytes(view[offset : offset + size].tobytes(), "little")

    def write(self, space, address, size, value):
        view, offset = self.place(space, address, size)
        view[offset : offset + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)


class Thread:
    def __init__(self, team, index):
        self.team, self.index, self.block, self.memory, self.parameters = team, index, team.block, team.memory, team.parameters
        self.registers = [0] * len(team.program.numbers)
        self.at, self.copies, self.groups, self.done = 0, [], [], False

    def commit(self):
        self.groups.append(self.copies)
        self.copies = []
        if not self.team.late:
            self.wait(0)

    def wait(self, left):
        while len(self.groups) > left:
            for to, source, size in self.groups.pop(0):
                value = self.memory.read("global", source, size) if size else 0
                self.memory.write("shared", to, 16, value)


class Team:
    """One block of a launch. late: asynchronous copies happen when they are waited for; else at once."""

    def __init__(self, program, memory, parameters, block, threads, late, seed):
        self.program, self.memory, self.parameters, self.block, self.late = program, memory, parameters, block, late
        self.barriers, self.bulk, self.random = {}, [], random.Random(seed)
        self.threads = [Thread(self, index) for index in range(threads)]

    def copy_one(self):
        to, source, size, barrier = self.bulk.pop(0)
        into, start = self.memory.place("shared", to, 16)
        out, begin = self.memory.place("global", source, 16)
        assert start + size <= into.size and begin + size <= out.size and size % 16 == 0
        into[start : start + size] = out[begin : begin + size]
        self.barriers[barrier].came(size)

    def advance(self, thread):
        """Up to the next instruction that is not this thread's alone. Whether it moved."""
        segments, moved = self.program.segments, False
        for _ in range(STRETCH):
            if thread.done:
                return moved
            segment = segments[thread.at]
            if callable(segment):
                thread.at = segment(thread.registers, thread)
            elif segment[0] == "ret":
                thread.done = True
            elif segment[0].startswith("mbarrier.try_wait"):
                target, place, parity = segment[1][:3]
                get = lambda word: self.program.getter(word)([thread])[0]
                if self.barriers[get(place)].phase == get(parity) & 1:
                    return moved  # the phase of that parity is still on
                self.put([thread], target, [1])
                thread.at += 1
            else:
                return moved
            moved = True
            if not self.late and self.bulk:
                self.copy_one()
        return moved

    def run(self, meanwhile):
        warps = [self.threads[i : i + 32] for i in range(0, len(self.threads), 32)]
        rounds = 0
        while not all(thread.done for thread in self.threads):
            meanwhile()
            moved, rounds = False, rounds + 1
            assert rounds < ROUNDS, "a loop that waits for memory does not end"
            for warp in self.random.sample(warps, len(warps)):
                for thread in self.random.sample(warp, len(warp)):
                    moved |= self.advance(thread)
                places = {thread.at for thread in warp}
                if len(places) == 1 and not warp[0].done:
                    segment = self.program.segments[places.pop()]
                    if not callable(segment) and segment[0].startswith(WARP_WIDE):
                        self.together(warp, *segment)
                        moved = True
            at = {thread.at for thread in self.threads}
            here = self.program.segments[min(at)]
            if len(at) == 1 and not self.threads[0].done and not callable(here) and here[0] == "bar.sync":
                for thread in self.threads:
                    thread.at += 1
                moved = True
            if not moved:
                if not self.bulk:
                    raise RuntimeError(f"nothing moves: {sorted({x[0] for x in map(self.program.segments.get, at) if not callable(x)})}")
                self.copy_one()
        assert not self.bulk, "the block ended before a copy that it had asked for"

    def together(self, warp, opcode, words):
        get = lambda word: self.program.getter(word)(warp)
        if opcode.startswith("shfl.sync.idx"):
            self.put(warp, words[0], [get(words[1])[lane & 31] for lane in get(words[2])])
        elif opcode.startswith("vote.sync.ballot"):
            self.put(warp, words[0], [sum(bool(x) << i for i, x in enumerate(get(words[1])))] * 32)
        elif opcode.startswith("elect.sync"):
            lane, flag = words[0].split("|")
            self.put(warp, lane, [0] * 32)
            self.put(warp, flag, [1] + [0] * 31)
        elif opcode.startswith(("ldmatrix", "stmatrix")):
            assert ".x4" in opcode
            load = opcode.startswith("ld")
            registers, place = (words[0], words[1]) if load else (words[1], words[0])
            registers = split(registers.strip("{}"))
            addresses = get(place)
            for matrix, register in enumerate(registers):
                rows = [self.memory.place("shared", address, 16) for address in addresses[8 * matrix : 8 * matrix + 8]]
                tile = np.stack([view[at : at + 16].view(np.uint16) for view, at in rows])
                if load:
                    pairs = (tile.T if "trans" in opcode else tile).reshape(32, 2).astype(np.uint32)
                    self.put(warp, register, (pairs[:, 0] | pairs[:, 1] << 16).tolist())
                else:
                    values = np.array(get(register), np.uint32)
                    given = np.stack([values & 0xFFFF, values >> 16], -1).astype(np.uint16).reshape(8, 8)
                    for row, (view, at) in zip(given.T if "trans" in opcode else given, rows):
                        view[at : at + 16] = np.ascontiguousarray(row).view(np.uint8)
        elif opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
            d, a, b, c = ([np.array(get(x), np.uint32) for x in split(word.strip("{}"))] for word in words)
            self.mma(warp, split(words[0].strip("{}")), a, b, c)
        elif opcode != "bar.warp.sync":
            raise NotImplementedError(opcode)
        for thread in warp:
            thread.at += 1

    def mma(self, warp, targets, a, b, c):
        lane = np.arange(32)
        group, pair = lane // 4, 2 * (lane % 4)
        A, B, C = np.empty((16, 16)), np.empty((16, 8)), np.empty((16, 8))
        half = lambda x, i: ((x >> 16 * i & 0xFFFF) << 16).astype(np.uint32).view(np.float32)
        for i in range(2):
            for n in range(4):
                A[group + 8 * (n % 2), pair + i + 8 * (n // 2)] = half(a[n], i)
                C[group + 8 * (n // 2), pair + n % 2] = c[n].view(np.float32)
            for n in range(2):
                B[pair + i + 8 * n, group] = half(b[n], i)
        with np.errstate(invalid="ignore", over="ignore"):
            D = (C + A @ B).astype(np.float32)
        for n, target in enumerate(targets):
            self.put(warp, target, D[group + 8 * (n // 2), pair + n % 2].view(np.uint32).tolist())

    def put(self, warp, name, values):
        if name != "_":
            index = self.program.number(name)
            for thread, value in zip(warp, values):
                thread.registers[index] = value


def launch(program, buffers, parameters, blocks, shared_bytes, threads=128, late=True, seed=0, meanwhile=lambda: None):
    """Blocks one after another. parameters: integers, in the order of the kernel's. meanwhile: called again and again, for what
    another kernel does at the same time."""
    assert len(program.parameters) == len(parameters)
    values = [value & (M64 if kind == "u64" else M32) for (kind, _), value in zip(program.parameters, parameters)]
    for block in range(blocks):
        Team(program, Memory(buffers, shared_bytes), values, block, threads, late, seed + block).run(meanwhile)
