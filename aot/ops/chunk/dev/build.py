"""Cubins of the kernels for sm_90a into a folder, for device.py: build.py FOLDER NVCC [mma] [mma2]  (offline, no GPU)

mma, mma2: also the state kernel that archs without wgmma get, so that an H200 can check it: by mma.sync with 3 stages (sm100, sm103)
or 2 (sm120). Prep and carry are the same sources everywhere."""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3]))
PREP = {"prep_bf16": [], "prep_bf16_gf32": ["-DCULA_GATE_F32"], "prep_fp16": ["-DCULA_IO_FP16"], "prep_fp16_gf32": ["-DCULA_IO_FP16", "-DCULA_GATE_F32"]}
STATE = {"": ("wgmma", 3), "mma": ("mma", 3), "mma2": ("mma", 2)}  # loop and stages; file names: device.py


def nvcc_cubin(folder, nvcc, name):
    source = "kda_carry.cu" if name == "carry" else "kda_prep.cu"
    command = [nvcc, "-std=c++17", "-O3", "-lineinfo", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", *PREP.get(name, []), str(HERE.parent / source), "-o", str(folder / f"{name}.cubin")]
    r = subprocess.run(command, capture_output=True, text=True)
    print(name, [l.split(":")[-1].strip() for l in r.stderr.splitlines() if "spill" in l or "Used" in l or "error" in l])
    r.check_returncode()


if __name__ == "__main__":
    folder, nvcc, forms = Path(sys.argv[1]), sys.argv[2], ["", *sys.argv[3:]]
    if unknown := set(forms) - set(STATE):
        sys.exit(f"build.py: no form {', '.join(sorted(unknown))}; there are: mma, mma2")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: nvcc_cubin(folder, nvcc, n), [*PREP, "carry"]))
    from aot.ops.chunk import state

    for form in forms:
        for io in ("bf16", "fp16"):
            for s in ("fp32", "bf16"):
                for layout in ("vk", "kv"):
                    for scan in (False, True):
                        r = state.compile_state(io, s, layout, str(Path(nvcc).parent / "ptxas"), scan, "sm_90a", *STATE[form])
                        name = f"{'scan' if scan else 'state'}_{io}_{s}_{layout}_{form}".rstrip("_")
                        print(name, [l.split(":")[-1].strip() for l in r["report"].splitlines() if "spill" in l or "Used" in l])
                        (folder / f"{name}.cubin").write_bytes(r["cubin"])
