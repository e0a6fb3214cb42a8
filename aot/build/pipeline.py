"""A build from matrix to artifact folder: compile what the cache does not have, check, link, assemble, verify.

specs -> keys -> cache or worker processes -> BuiltKernel -> lint -> libcula.so -> artifacts/ -> verify
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from aot.build import assemble, host, lint, link, manifest, sass, toolchain
from aot.build.built import BuiltKernel, KernelKeys, gpu_kernel
from aot.build.cache import Cache, key_of, source_hashes
from aot.build.header import Header, read_header
from aot.build.job import Job
from aot.build.params import read_params
from aot.build.progress import error, kernel_facts, print_failures, progress_line, say, summary_table
from aot.build.scheduler import Outcome, run_jobs
from aot.build.verify import verify
from aot.matrix import ROOT, KernelSpec

# Seconds of a compile that was never timed here; only their order counts.
GUESS = {"cutlass": 8.0, "host": 6.0, "cute_dsl": 1.0}


@dataclass(frozen=True)
class Request:
    specs: tuple[KernelSpec, ...]  # what to build
    matrix: tuple[KernelSpec, ...]  # all kernels of the matrix
    out: Path
    build_dir: Path  # cache, logs, report
    workers: int
    werror: bool = False
    allow_partial: bool = False
    root: Path = ROOT


@dataclass
class Report:
    """build/report.json: what a build did. Not shipped."""

    seconds: dict[str, float] = field(default_factory=dict)  # of each compile, this build's or an earlier one's
    compiled: int = 0
    cached: int = 0
    total_seconds: float = 0.0


def default_workers() -> int:
    """Cores that this process may use, with 2 GB of free memory each (nvcc on CuTe headers takes 1 to 1.5 GB)."""
    cores = len(os.sched_getaffinity(0))
    try:
        available = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return cores
    return max(1, min(cores, available // (2 << 20)))


@contextmanager
def _lock(build_dir: Path):
    """One build at a time in a build folder. The kernel drops the lock when the process ends, however it ends."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with open(build_dir / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is running in {build_dir}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load_seconds(path: Path) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in json.loads(path.read_bytes())["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # only decides the order of compiles


def make_jobs(request: Request, seconds: dict[str, float]) -> list[Job]:
    """One job for every GPU kernel and C++ source, cached or not."""

    def expected(name: str, kind: str) -> float:
        return seconds.get(name, GUESS[kind])

    root, jobs = request.root, []
    kernel_key = KernelKeys(root)
    for spec in request.specs:
        if spec.is_gpu:
            name = spec.kernel_id
            key, hashes = kernel_key(spec)
            jobs.append(Job(name, spec.toolchain, key, spec, root, hashes, expected(name, spec.toolchain)))
    dlpack, tools = toolchain.dlpack_header(), toolchain.identity("host")
    for source in host.find_sources(root):
        hashes = source_hashes(root, host.source_files(source, root))
        key = key_of(
            source=source.name, sources=hashes, dlpack=source_hashes(dlpack.parent, [dlpack]),
            flags=host.flags(source, request.werror), tools=tools,
        )  # fmt: skip
        jobs.append(Job(source.name, "host", key, (source, request.werror), root, hashes, expected(source.name, "host")))
    return jobs


def shipped_files(library: bytes, kernels: list[BuiltKernel], header: Header, root: Path) -> dict[str, bytes]:
    """Path in the artifact folder -> bytes, all but manifest.json."""
    archs = sorted({kernel.spec.arch for kernel in kernels}, key=header.archs.get)
    values = {
        "CULA_VERSION": header.version, "CULA_VERSION_MAJOR": str(header.major), "CULA_ARCHS": ";".join(archs), "CULA_ARCHS_SPACED": " ".join(archs),
    }  # fmt: skip

    def template(name: str) -> bytes:
        text = (root / "aot/capi/cmake" / name).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        return text.encode()

    files = {manifest.cubin_path(kernel): kernel.cubin for kernel in kernels if kernel.cubin}
    return files | {
        "lib/libcula.so": library,
        "include/cula.h": (root / "aot/capi/include/cula.h").read_bytes(),
        "include/dlpack.h": toolchain.dlpack_header().read_bytes(),
        "lib/cmake/cula/culaConfig.cmake": template("culaConfig.cmake.in"),
        "lib/cmake/cula/culaConfigVersion.cmake": template("culaConfigVersion.cmake.in"),
        "lib/pkgconfig/cula.pc": template("cula.pc.in"),
    }


def build(request: Request) -> int:
    """Returns an exit code: 0 done, 1 something failed, 130 interrupted. Prints as it goes."""
    start = time.monotonic()
    with _lock(request.build_dir):
        try:
            return _build(request, start)
        except KeyboardInterrupt:
            error("interrupted; finished compiles are kept, the same command goes on from here")
            return 130


def _build(request: Request, start: float) -> int:
    root = request.root
    store = Cache(request.build_dir / "cache")
    report_path = request.build_dir / "report.json"
    seconds = _load_seconds(report_path)
    header = read_header(root / "aot/capi/include/cula.h")

    declared = functools.cache(lambda path: read_params(root / path))

    if any(spec.is_gpu for spec in request.specs):
        toolchain.nvdisasm()  # missing: said now, and not after all compiles
    jobs = make_jobs(request, seconds)
    by_name = {job.name: job for job in jobs}
    entries = {job.name: entry for job in jobs if (entry := store.load(job.key))}
    missing = [job for job in jobs if job.name not in entries]
    failures: list[tuple[str, str]] = []
    kernels: dict[str, BuiltKernel] = {}

    def check(job: Job) -> str:
        kernel, problems = gpu_kernel(job.payload, declared(job.payload.params), job.key, entries[job.name])
        if problems:
            failures.append((job.name, "\n".join(f"error: {problem}" for problem in problems)))
        else:
            kernels[job.name] = kernel
        return kernel_facts(kernel) if kernel.info else ""

    for job in jobs:
        if job.kind != "host" and job.name in entries:
            check(job)
    say(f"{len(jobs)} compiles: {len(jobs) - len(missing)} from the cache, {len(missing)} to do, {request.workers} at a time")

    done = 0

    def on_done(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        job, facts = outcome.job, ""
        entry = None if outcome.error else store.load(job.key)
        if entry is None:
            failures.append((job.name, outcome.error or "error: the result was not in the cache"))
            facts = "FAILED"
        else:
            entries[job.name] = entry
            seconds[job.name] = round(outcome.seconds, 2)
            before = len(failures)
            facts = f"object {len(entry.files['object.o']) / 1024:.0f} KB" if job.kind == "host" else check(job)
            facts += "  REFUSED" if len(failures) > before else ""
        say(progress_line(done, len(missing), outcome.seconds, job.name, facts))

    try:
        run_jobs(missing, store, request.workers, on_done)
    finally:
        _write_report(report_path, request, Report(seconds, len(missing), len(jobs) - len(missing), round(time.monotonic() - start, 2)))
    failures += _check_code(kernels, store)
    if failures:
        print_failures(failures, request.build_dir / "logs")
        hosts_failed = any(by_name[name].kind == "host" for name, _ in failures)
        if hosts_failed or not request.allow_partial:
            error(f"nothing was written to {request.out}; finished compiles are kept")
            return 1

    wanted = {spec.kernel_id for spec in request.specs}
    archs = {spec.arch for spec in request.specs}
    complete = not failures and all(spec.kernel_id in wanted for spec in request.matrix if spec.arch in archs)
    if not complete and not request.allow_partial:
        say(
            f"compiled. This is a part of the matrix of {', '.join(sorted(archs))}, so {request.out} stays as it is (--allow-partial writes it)"
        )
        return 0

    all_kernels = [kernels[job.name] for job in jobs if job.name in kernels]
    all_kernels += [BuiltKernel(spec, declared(spec.params)) for spec in request.specs if not spec.is_gpu]
    objects = {job.name: (job.key, entries[job.name].files["object.o"]) for job in jobs if job.kind == "host"}
    try:
        library = link.link_library(all_kernels, objects, header, root, store)
    except link.LinkError as failure:
        print_failures([("libcula.so", str(failure))], request.build_dir / "logs")
        return 1
    files = shipped_files(library, all_kernels, header, root)
    changed = assemble.assemble(request.out, files, manifest.to_text(manifest.make_manifest(all_kernels, files, header, complete)))
    violations = verify(request.out, request.matrix, root, request.allow_partial)
    if missing or changed:
        say("\n" + summary_table(all_kernels))
    if violations:
        say()
        for violation in violations:
            error(str(violation))
        error(f"{request.out} does not pass verification: {len(violations)} violations")
        return 1
    took = time.monotonic() - start
    state = "written" if changed else "unchanged"
    say(
        f"{'' if missing or not changed else chr(10)}{request.out}: {len(all_kernels)} kernels, libcula.so {len(library) / 2**20:.1f} MB, "
        f"verified, {state}{'' if complete else ', PARTIAL'} ({took:.1f} s)"
    )
    return 0


def _check_code(kernels: dict[str, BuiltKernel], store: Cache) -> list[tuple[str, str]]:
    """What is wrong with the machine code of kernels, which are removed then; the others get lint's word for it."""
    failures, names = [], list(kernels)
    found = sass.read_facts([(kernels[name].spec.arch, kernels[name].cubin, kernels[name].entry) for name in names], store)
    for name, facts in zip(names, found):
        if problems := lint.lint_code(kernels[name].spec, facts):
            failures.append((name, "\n".join(f"error: {problem}" for problem in problems)))
            del kernels[name]
        else:
            kernels[name] = replace(kernels[name], code=lint.word(facts))
    return failures


def _write_report(path: Path, request: Request, report: Report) -> None:
    git = ["git", "-C", str(request.root)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    text = json.dumps(
        {
            **vars(report), "machine": platform.platform(), "workers": request.workers, "unix_time": int(time.time()),
            "commit": commit.stdout.strip() or None, "dirty": bool(dirty.stdout.strip()) if dirty.returncode == 0 else None,
        },
        indent=1, sort_keys=True,
    )  # fmt: skip
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, path)
