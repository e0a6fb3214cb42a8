"""PTX translated to Python: the instructions that the state kernel by mma.sync is made of, written from the PTX manual.

ptx_run.py runs it. Registers hold bit patterns as integers, also those of floats.
"""

from __future__ import annotations

import re

import numpy as np

SHARED = 1024  # where shared memory begins; its first bytes would hide a pointer that was never set
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def f32(bits):
    return float(np.uint32(bits).view(np.float32))


def bits32(value):
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def bf16_bits(bits):
    """Of float32 bits, rounded to nearest even; NaN stays NaN."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF


def fp16_bits(bits):
    with np.errstate(over="ignore"):
        return int(np.float16(f32(bits)).view(np.uint16))


def signed(x, width):
    return x - (1 << width) if x >> (width - 1) & 1 else x


def quotient(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


class Barrier:
    """An mbarrier: its phase is over when all arrivals and all bytes that were announced have come."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def turn(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1

    def arrive(self, expected):
        assert self.pending > 0, "more arrivals at a barrier than it counts"
        self.bytes += expected
        self.pending -= 1
        self.turn()

    def came(self, size):
        self.bytes -= size
        self.turn()


def statements(text):
    """(label, None) or (None, statement) in order; names of inner blocks are made their own."""
    body = re.sub(r"//[^\n]*", "", text[text.index("{", text.index(".entry")) + 1 : text.rindex("}")])
    scopes, number = [], 0
    renames: list[dict] = []
    for raw in re.findall(r"[^;:{}]+:(?!:)|\{(?=\s*\.reg)|\}|(?:[^;{}:]|::|\{[^;{}]*\})+;", body):
        part = " ".join(raw.split()).rstrip(";").strip()
        if part == "{":
            number += 1
            scopes.append(number)
            inner = body_of_block(body, number)
            renames.append({name: f"{name}_{number}" for name in inner})
        elif part == "}":
            if scopes:
                scopes.pop()
                renames.pop()
        elif part.startswith((".reg", ".pragma")) or not part:
            continue
        else:
            for names in renames:
                part = re.sub(r"(?<![%\w.$])([A-Za-z_]\w*)\b(?![\w.])", lambda m: names.get(m[1], m[1]), part)
            yield (part[:-1], None) if part.endswith(":") else (None, part)


def body_of_block(body, number):
    """Registers and labels that the `number`-th inner block declares."""
    start = [m.start() for m in re.finditer(r"\{(?=\s*\.reg)", body)][number - 1]
    depth, end = 0, start
    while True:
        depth += {"{": 1, "}": -1}.get(body[end], 0)
        if depth == 0:
            break
        end += 1
    block = body[start:end]
    registers = [name.strip() for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]+);", block) for name in declared.split(",")]
    return registers + re.findall(r"(?:^|[;{\s])([A-Za-z_]\w*)\s*:(?!:)", block)


def split(operands):
    return [word.strip() for word in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", operands)]


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
WARP_WIDE = ("shfl.sync", "vote.sync", "elect.sync", "bar.warp.sync", "ldmatrix.", "stmatrix.", "mma.sync")


class Program:
    """Segments of straight code as Python functions of (registers, thread), and the instructions between them."""

    def __init__(self, text):
        self.numbers: dict[str, int] = {}
        self.getters: dict[str, object] = {}
        self.parameters = re.findall(r"\.param \.(u64|u32) (\w+)", text[: text.index(")", text.index(".entry"))])
        steps, labels = [], {}
        for label, statement in statements(text):
            if label is not None:
                labels[label] = len(steps)
            else:
                steps.append(statement)
        self.segments, lines, first = {}, [], 0
        starts = set(labels.values())

        def close(at, goes_to):
            nonlocal lines
            if lines:
                name = f"segment_{first}"
                source = f"def {name}(r, t):\n" + "".join(f" {line}\n" for line in lines) + f" return {goes_to}\n"
                scope = dict(globals())
                exec(compile(source, name, "exec"), scope)
                self.segments[first] = scope[name]
            lines = []

        for at, statement in enumerate(steps):
            if at in starts and lines:
                close(at, at)
            if not lines:
                first = at
            guard, opcode, operands = re.fullmatch(r"(?:@(!?[%\w]+) )?(\S+)\s*(.*)", statement).groups()
            condition = f"if {'not ' if guard[0] == '!' else ''}{self.value(guard.lstrip('!'))}: " if guard else ""
            words = split(operands)
            if opcode in ("bra", "bra.uni"):
                lines.append(f"{condition}return {labels[words[0]]}" if condition else f"return {labels[words[0]]}")
                close(at, at + 1)
            elif opcode.startswith(WARP_WIDE) or opcode in ("bar.sync", "ret") or opcode.startswith("mbarrier.try_wait"):
                assert not guard
                close(at, at)
                self.segments[at] = (opcode, words)
                for name in re.findall(r"%\w+|P\d*_\d+", " ".join(words)):
                    self.number(name)
            else:
                lines += [condition + line for line in self.translate(opcode, words)]
        close(len(steps), len(steps))

    def number(self, name):
        return self.numbers.setdefault(name, len(self.numbers))

    def getter(self, word):
        """Function of threads -> the word's value in each: a register, a number, an address."""
        if word not in self.getters:
            code = self.address(word) if word[0] == "[" else self.value(word)
            self.getters[word] = eval(f"lambda threads: [{code} for t in threads for r in [t.registers]]", globals())
        return self.getters[word]

    def value(self, word):
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", word):
            return str(int(word[2:], 16))
        if re.fullmatch(r"-?\d+", word):
            return f"({int(word)} & M64)" if int(word) < 0 else word
        special = {"%tid.x": "t.index", "%ctaid.x": "t.block", "%laneid": "(t.index & 31)", "__dynamic_shmem__0": str(SHARED)}
        return special.get(word) or f"r[{self.number(word)}]"

    def address(self, word):
        base, _, offset = word.strip("[]").partition("+")
        return f"({self.value(base)} + {int(offset or 0)})"

    def translate(self, opcode, words):
        parts = opcode.split(".")
        kind, width = parts[0], {"64": 64, "32": 32, "16": 16}.get(parts[-1][1:], 0)
        mask = f"& {(1 << width) - 1}" if width else ""
        v = [self.value(word) if word[0] not in "[{" else word for word in words]
        number = lambda word: f"signed({self.value(word)} {mask}, {width})" if parts[-1][0] == "s" else f"({self.value(word)} {mask})"
        if opcode.startswith("ld.param"):
            return [f"{v[0]} = t.parameters[{[name for _, name in self.parameters].index(words[1].strip('[]'))}]"]
        if kind == "mov":
            if words[0][0] == "{":
                targets = split(words[0].strip("{}"))
                return [f"{self.value(x)} = {v[1]} >> {i * width // len(targets)} & {(1 << width // len(targets)) - 1}" for i, x in enumerate(targets)]
            if words[1][0] == "{":
                sources = split(words[1].strip("{}"))
                return [f"{v[0]} = " + " | ".join(f"{self.value(x)} << {i * width // len(sources)}" for i, x in enumerate(sources))]
            return [f"{v[0]} = {v[1]} {mask}"]
        if kind in ("ld", "st"):
            space = "shared" if "shared" in opcode else "global"
            place, data = (words[1], words[0]) if kind == "ld" else (words[0], words[1])
            items, size = split(data.strip("{}")), width // 8
            if kind == "ld":
                lines = [f"x = t.memory.read({space!r}, {self.address(place)}, {size * len(items)})"]
                result = [f"x >> {i * width} & {(1 << width) - 1}" for i in range(len(items))]
                if parts[-1] == "s32":
                    result = ["signed(x, 32) & M64"]
                return ["; ".join(lines + [f"{self.value(x)} = {e}" for x, e in zip(items, result)])]
            value = " | ".join(f"({self.value(x)} & {(1 << width) - 1}) << {i * width}" for i, x in enumerate(items))
            return [f"t.memory.write({space!r}, {self.address(place)}, {size * len(items)}, {value})"]
        if kind in ("add", "sub") and parts[-1] != "f32":
            return [f"{v[0]} = ({v[1]} {'+' if kind == 'add' else '-'} {v[2]}) {mask}"]
        if kind in ("and", "or", "xor"):
            sign = {"and": "&", "or": "|", "xor": "^"}[kind]
            return [f"{v[0]} = ({v[1]} {sign} {v[2]}) {mask or '& 1'}"]
        if kind == "not":
            return [f"{v[0]} = ~{v[1]} {mask or '& 1'}"]
        if opcode.startswith("mul.wide"):
            return [f"{v[0]} = {number(words[1])} * {number(words[2])} & M64"]
        if opcode.startswith("mul.lo"):
            return [f"{v[0]} = {v[1]} * {v[2]} {mask}"]
        if opcode.startswith("mad.lo"):
            return [f"{v[0]} = ({v[1]} * {v[2]} + {v[3]}) {mask}"]
        if opcode == "mul.f32":
            return [f"{v[0]} = bits32(f32({v[1]}) * f32({v[2]}))"]
        if kind in ("min", "max"):
            return [f"{v[0]} = {kind}({number(words[1])}, {number(words[2])}) {mask}"]
        if kind == "div":
            return [f"{v[0]} = quotient({number(words[1])}, {number(words[2])}) {mask}"]
        if kind == "shl":
            return [f"{v[0]} = {v[1]} << min({v[2]}, {width}) {mask}"]
        if kind == "shr":
            return [f"{v[0]} = {number(words[1])} >> min({v[2]}, {width}) {mask}"]
        if kind == "setp":
            return [f"{v[0]} = int({number(words[1])} {COMPARE[parts[1]]} {number(words[2])})"]
        if kind == "selp":
            return [f"{v[0]} = {v[1]} {mask} if {v[3]} else {v[2]} {mask}"]
        if kind == "brev":
            return [f"{v[0]} = int(format({v[1]}, '032b')[::-1], 2)"]
        if kind == "clz":
            return [f"{v[0]} = 32 - {v[1]}.bit_length()"]
        if opcode in ("cvt.s64.s32", "cvt.u64.u32", "cvt.u32.u64"):
            return [f"{v[0]} = {'signed(' + v[1] + ', 32) & M64' if opcode == 'cvt.s64.s32' else v[1] + ' & M32'}"]
        if opcode == "cvt.f32.bf16":
            return [f"{v[0]} = {v[1]} << 16"]
        if opcode == "cvt.f32.f16":
            return [f"{v[0]} = bits32(np.uint16({v[1]}).view(np.float16))"]
        if match := re.fullmatch(r"cvt\.rn\.(bf16|f16)(x2)?\.f32", opcode):
            to = "bf16_bits" if match[1] == "bf16" else "fp16_bits"
            return [f"{v[0]} = {to}({v[1]}) << 16 | {to}({v[2]})" if match[2] else f"{v[0]} = {to}({v[1]})"]
        if opcode.startswith("mbarrier.init"):
            return [f"t.team.barriers[{self.address(words[0])}] = Barrier({v[1]})"]
        if opcode.startswith("mbarrier.arrive"):
            expected = v[2] if "expect_tx" in opcode else "0"
            return [f"t.team.barriers[{self.address(words[1])}].arrive({expected})"]
        if opcode.startswith("cp.async.bulk.shared::cta.global"):
            return [f"t.team.bulk.append(({self.address(words[0])}, {self.address(words[1])}, {v[2]}, {self.address(words[3])}))"]
        if opcode.startswith("cp.async.cg.shared.global"):
            return [f"t.copies.append(({self.address(words[0])}, {self.address(words[1])}, {v[3]}))"]
        if opcode == "cp.async.commit_group":
            return ["t.commit()"]
        if opcode == "cp.async.wait_group":
            return [f"t.wait({v[0]})"]
        if kind in ("fence", "griddepcontrol", "nanosleep"):
            return ["pass"]  # a label may be here
        raise NotImplementedError(f"{opcode} {', '.join(words)}")
