"""Runs compile jobs in worker processes, longest first, one job a worker at a time.

Own workers instead of concurrent.futures: a compiler that crashes must fail its own kernel and not the whole pool, and Ctrl-C
must stop nvcc too. Each worker is the leader of its own process group, spawned (the DSL starts threads when it is imported,
which a fork would not survive) and imports the DSL once. Workers write into the cache themselves, so an interrupted build has
kept all that was finished.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from aot.build.cache import Cache, source_hashes
from aot.build.job import CompileError, Job


@dataclass(frozen=True)
class Outcome:
    job: Job
    seconds: float
    error: str = ""  # "": the result is in the cache


def compile_job(job: Job, workdir: Path):
    """Dispatch by toolchain. Compiler packages are imported here, in the worker, and only those that the job needs."""
    if job.kind == "cute_dsl":
        from aot.build import compile_cutedsl

        return compile_cutedsl.compile_kernel(job.payload, job.root, workdir)
    if job.kind == "cutlass":
        from aot.build import compile_cutlass

        return compile_cutlass.compile_kernel(job.payload, job.root, workdir)
    if job.kind == "host":
        from aot.build import host

        source, werror = job.payload
        return host.compile_source(source, werror, job.root, workdir)
    raise ValueError(f"unknown kind of job {job.kind!r}")


def _work(connection: Connection, cache_folder: Path, scratch: Path) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    cache = Cache(cache_folder)
    # One folder for all jobs of this worker, emptied in between: the DSL remembers the one in which it was imported.
    workdir = Path(tempfile.mkdtemp(dir=scratch))
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the parent is gone
            return
        start, error = time.monotonic(), ""
        with tempfile.TemporaryFile() as printed:  # what compilers print counts only when they fail, and would break progress lines
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            try:
                compiled = compile_job(job, workdir)
                if source_hashes(job.root, [job.root / path for path in job.sources]) != job.sources:
                    raise CompileError("error: a source was changed while it was compiled: build again")
                cache.store(job.key, compiled.files, compiled.facts)
            except CompileError as failure:
                error = str(failure)
            except Exception:  # whatever a kernel's own Python does wrong
                error = traceback.format_exc()
            if error:
                sys.stdout.flush()
                sys.stderr.flush()
                printed.seek(0)
                error = printed.read().decode("utf-8", "replace") + error
        for path in workdir.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        connection.send((time.monotonic() - start, error))


class _Worker:
    def __init__(self, context, cache: Cache, scratch: Path):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, cache.folder, scratch), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        self.connection.send(job)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # it has not made its process group yet
        self.process.join()


def run_jobs(jobs: Iterable[Job], cache: Cache, workers: int, on_done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Compiles all jobs and returns their outcomes in order of completion. A failed job does not stop the others.

    on_done is called in this process after each. Raises KeyboardInterrupt after Ctrl-C or SIGTERM, with no process left behind."""
    queue = sorted(jobs, key=lambda job: (-job.seconds, job.name))
    if not queue:
        return []
    context = multiprocessing.get_context("spawn")
    cache.folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="cula-build-"))
    team: list[_Worker] = []
    outcomes: list[Outcome] = []

    def done(worker: _Worker, seconds: float, error: str) -> None:
        outcome = Outcome(worker.job, seconds, error)
        worker.job = None
        outcomes.append(outcome)
        on_done(outcome)

    def terminate(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        while queue or any(worker.job for worker in team):
            while queue and (idle := next((worker for worker in team if worker.job is None), None)):
                idle.give(queue.pop(0))
            while queue and len(team) < workers:
                team.append(_Worker(context, cache, scratch))
                team[-1].give(queue.pop(0))
            for ready in wait([worker.connection for worker in team if worker.job]):
                worker = next(worker for worker in team if worker.connection is ready)
                try:
                    seconds, error = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    code = worker.process.exitcode
                    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
                    team.remove(worker)
                    done(worker, 0.0, f"the compiler process {how}")
                else:
                    done(worker, seconds, error)
    finally:
        for worker in team:
            worker.kill()
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes
