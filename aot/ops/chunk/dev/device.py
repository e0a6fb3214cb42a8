"""KDA prefill on a GPU through the driver: cubins, launch, and the host plan in its first form. For dev/gpu_check.py."""
import ctypes
import os

import numpy as np
import torch
from cuda.bindings import driver as cu

CHUNK, DIM, RECORD_BYTES = 32, 128, 29184
PREP_SMEM, CARRY_SMEM = 60464, 70144
STATE_SMEM = {"": 107648, "mma": 107648, "mma2": 73856}  # by form
CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INT64_MIN = -(2**63)


def check(result):
    if result[0] != 0:
        raise RuntimeError(f"{result[0]}")
    return result[1] if len(result) == 2 else result[1:]


class Kernel:
    """One cubin. Arguments are given as ('p'|'q'|'i'|'f', value): pointer, 64-bit, 32-bit, float32."""

    def __init__(self, path, smem, threads=128):
        data = open(path, "rb").read()
        self.library = check(cu.cuLibraryLoadData(data, None, None, 0, None, None, 0))
        self.kernel = check(cu.cuLibraryEnumerateKernels(1, self.library))[0]
        self.function = check(cu.cuKernelGetFunction(self.kernel))
        self.smem, self.threads = smem, threads
        attribute = cu.CUfunction_attribute
        check(cu.cuFuncSetAttribute(self.function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))
        # Without the largest carveout two kernels that fit an SM together are not put there together.
        check(cu.cuFuncSetAttribute(self.function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
        get = lambda a: check(cu.cuFuncGetAttribute(a, self.function))
        self.registers, self.local = get(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS), get(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.occupancy = check(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, smem))

    def launcher(self, grid, args, pdl):
        values = tuple(v for _, v in args)
        types = tuple({"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}[t] for t, _ in args)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.smem
        config.hStream = torch.cuda.current_stream().cuda_stream
        if pdl:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return lambda: check(cu.cuLaunchKernelEx(config, self.function, (values, types), 0))


class Prefill:
    def __init__(self, folder, form=""):
        """form: "" sm90's own state kernel; "mma", "mma2" that of archs without wgmma, compiled for sm_90a (build.py)."""
        if form not in STATE_SMEM:
            raise ValueError(f"no form {form!r}; there are: mma, mma2")
        self.folder, self.cache, self.form = folder, {}, form
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def kernel(self, name, smem, threads=128):
        if name not in self.cache:
            self.cache[name] = Kernel(os.path.join(self.folder, name + ".cubin"), smem, threads)
        return self.cache[name]

    def plan(self, q, k, v, gate, beta, out, *, cu_seqlens=None, a_log=None, dt_bias=None, raw=True, lower_bound=0.0, beta_kind=1, l2norm=True,
             scale=None, state_in=None, state_out=None, read_index=None, write_index=None, null_slot=None, layout="vk", overlap=True,
             prep_blocks=None, workspace=None, head_group=None, segments=1, exact=False, chained=False, suffix="", state_suffix=""):  # fmt: skip
        """q,k [B,T,H,128], v,out,gate [B,T,HV,128], beta [B,T,HV]; states [slots,HV,128,128]. -> dict of launch functions."""
        B, T, H, _ = q.shape
        HV = v.shape[2]
        N = B if cu_seqlens is None else cu_seqlens.numel() - 1
        chunks = B * -(-T // CHUNK) if cu_seqlens is None else T // CHUNK + N
        records_bytes = chunks * HV * RECORD_BYTES
        flag_words = (chunks + 2 * N * (1 + segments * chained)) * HV
        flag_bytes = -(-flag_words * 4 // 128) * 128
        carry_bytes = N * HV * segments * 2 * DIM * DIM * 4 if segments > 1 else 0
        if workspace is None:
            workspace = torch.full((records_bytes + flag_bytes + carry_bytes,), 0xFF, dtype=torch.uint8, device=q.device)
        records, flags = workspace.data_ptr(), workspace.data_ptr() + records_bytes
        carry = flags + flag_bytes
        index = lambda x: 0 if x is None else {torch.int32: 1, torch.int64: 2}[x.dtype]
        ptr = lambda x: ("p", 0 if x is None else x.data_ptr())
        code = lambda x: 3 if x is None else CODE[x.dtype]
        if head_group is None:
            groups = 1 if chained else -(-HV // (self.sms // 2))
            head_group = -(-HV // groups)
        strides = lambda x: [("q", x.stride(i)) for i in range(3)]
        modes = raw | code(gate) << 1 | code(a_log) << 3 | code(dt_bias) << 5 | beta_kind << 7 | code(beta) << 9 | l2norm << 11 | index(cu_seqlens) << 12
        prep_args = [ptr(x) for x in (q, k, gate, a_log, dt_bias, beta, cu_seqlens)] + [("p", records), ("p", flags)]
        prep_args += strides(q) + strides(k) + strides(gate) + strides(beta) + [("q", T)]
        prep_args += [("i", x) for x in (HV, HV // H, head_group, N, chunks, segments if N == 1 and not chained else 1, 1 if exact else segments, flag_words, modes)] + [("f", DIM**-0.5 if scale is None else scale), ("f", lower_bound)]
        state_args = [("p", records), ("p", flags), ("p", carry)] + [ptr(x) for x in (v, out, cu_seqlens, state_in, state_out, read_index, write_index)]
        slot = lambda s: [("q", 0 if s is None else s.stride(0)), ("q", 0 if s is None else s.stride(1))]
        count = lambda s: ("q", 0 if s is None else s.shape[0])
        state_args += strides(v) + strides(out) + slot(state_in) + slot(state_out) + [count(state_in), count(state_out)]
        state_args += [("q", INT64_MIN if null_slot is None else null_slot), ("q", T)]
        state_args += [("i", x) for x in (HV, head_group, N, chunks, segments)]
        state_args += [("p", 0)] * 2 + [("q", 0)] * 5  # no checkpoints
        state_args += [("i", index(cu_seqlens) | index(read_index) << 2 | index(write_index) << 4 | chained << 8)]
        state = next((s for s in (state_in, state_out) if s is not None), None)
        names = f"{NAME[v.dtype]}_{'fp32' if state is None else NAME[state.dtype]}_{layout}"
        form = f"_{self.form}" if self.form else ""
        prep = self.kernel(f"prep_{NAME[q.dtype]}" + ("_gf32" if gate.dtype == torch.float32 else "") + suffix, PREP_SMEM, 256)
        blocks = prep_blocks or (2 if overlap else 3)
        launches = dict(keep=(workspace, cu_seqlens, read_index, write_index), workspace_bytes=workspace.numel())
        launches["prep"] = prep.launcher(max(1, min(chunks * HV, self.sms * blocks)), prep_args, False)
        order = ["prep"]
        if segments > 1 and not chained:
            launches["scan"] = self.kernel(f"scan_{names}{form}", STATE_SMEM[self.form]).launcher(4 * HV * N * (segments - 1), state_args, overlap)
            launches["carry"] = self.kernel("carry", CARRY_SMEM).launcher(16 * HV * N, [("p", carry), ("p", flags), ptr(cu_seqlens), ("q", T)] + [("i", x) for x in (HV, chunks, segments, index(cu_seqlens))], overlap)
            order += ["scan", "carry"]
        launches["state"] = self.kernel(f"state_{names}{form}{state_suffix}", STATE_SMEM[self.form]).launcher(max(1, 2 * HV * N * segments), state_args, overlap)
        order += ["state"]

        def run():
            for name in order:
                launches[name]()

        launches["run"] = run
        return launches
