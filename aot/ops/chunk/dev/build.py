"""Cubins of the two kernels into a folder, for device.py: build.py FOLDER NVCC  (offline, no GPU)"""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PREP = {"prep_bf16": [], "prep_bf16_gf32": ["-DCULA_GATE_F32"], "prep_fp16": ["-DCULA_IO_FP16"], "prep_fp16_gf32": ["-DCULA_IO_FP16", "-DCULA_GATE_F32"]}


def nvcc_cubin(folder, nvcc, name):
    source = "kda_carry.cu" if name == "carry" else "kda_prep.cu"
    command = [nvcc, "-std=c++17", "-O3", "-lineinfo", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", *PREP.get(name, []), str(HERE.parent / source), "-o", str(folder / f"{name}.cubin")]
    r = subprocess.run(command, capture_output=True, text=True)
    print(name, [l.split(":")[-1].strip() for l in r.stderr.splitlines() if "spill" in l or "Used" in l or "error" in l])
    r.check_returncode()


if __name__ == "__main__":
    folder, nvcc = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: nvcc_cubin(folder, nvcc, n), [*PREP, "carry"]))
    import state

    for io in ("bf16", "fp16"):
        for s in ("fp32", "bf16"):
            for layout in ("vk", "kv"):
                for scan in (False, True):
                    r = state.compile_state(io, s, layout, str(Path(nvcc).parent / "ptxas"), scan)
                    print(io, s, layout, scan, [l.split(":")[-1].strip() for l in r["report"].splitlines() if "spill" in l or "Used" in l])
                    (folder / f"{'scan' if scan else 'state'}_{io}_{s}_{layout}.cubin").write_bytes(r["cubin"])
