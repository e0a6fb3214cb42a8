#!/usr/bin/env python3
"""Command line of the build: list, build, verify, clean. The logic is in aot/build/."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when run through a link or from another folder

from aot.archs import ARCHS, parse_archs
from aot.matrix import ROOT, MatrixError, expand_all, select

FILTERS = ("op", "io", "state", "k", "layout", "toolchain")

HELP = """\
commands:
  list     print the kernels of the matrix that the filters select; --explain also what is excluded, and why
  build    compile them, link libcula.so, write artifacts/ and verify it
  verify   check artifacts/ offline: files, hashes, archs, parameters, spills, exports, glibc versions
  lint     check the machine code of artifacts/ against the matrix, as each build does: tensor-core instructions, waits, loads in loops
  clean    remove artifacts/; --cache also compiled results

examples:
  build_kernels.py list --arch sm90 --op 'kda_*' --k 128
  build_kernels.py build --arch sm90                        what `make artifacts ARCH=sm90` runs
  build_kernels.py build --arch sm90 --op l2norm            compile a part into the cache, to try a change
  build_kernels.py verify --artifacts artifacts

Filters take globs and commas: --op 'kda_*,l2norm' --io bf16,fp16. A kernel is named by its configuration:
op.arch.io[.s<state>][.k<k>][.v<v>][.<layout>][.<variant>], for example kda_decode.sm90.bf16.sfp32.k128.vk."""


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parallel compiles; allowed: 1 to 1024")
    return int(text)


def _archs(text: str) -> tuple[str, ...]:
    try:
        return parse_archs(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build_kernels.py", description="Builds the kernels of cula and the library that holds them.", epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="{list,build,verify,lint,clean}")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def add_filters(command: argparse.ArgumentParser, default: str) -> None:
        names = f"{', '.join(ARCHS)}, all, or a list; cpu is always added"
        command.add_argument("--arch", type=_archs, default=default, metavar="ARCH", help=f"{names} (default: {default})")
        for axis in FILTERS:
            command.add_argument(f"--{axis}", metavar="GLOB", help=f"only kernels whose {axis} matches")

    listing = add("list", "print the selected kernels")
    add_filters(listing, "all")
    listing.add_argument("--explain", action="store_true", help="also print what the matrix excludes, and why, and how each is built")

    building = add("build", "compile, link, assemble and verify")
    add_filters(building, "sm90")
    building.add_argument(
        "-j", "--jobs", type=_workers, metavar="N", help="parallel compiles (default: cores, if there are 2 GB of memory for each)"
    )
    building.add_argument("--out", type=Path, default=ROOT / "artifacts", metavar="DIR", help="artifact folder (default: artifacts)")
    building.add_argument("--build-dir", type=Path, default=ROOT / "build", metavar="DIR", help="cache, logs and report (default: build)")
    building.add_argument("--werror", action="store_true", help="warnings of the C++ compiler are errors")
    building.add_argument(
        "--allow-partial", action="store_true", help='write artifacts of a filtered or failed build too, marked "complete": false'
    )
    building.add_argument(
        "--demo",
        action="store_true",
        help="end with a real decode call on the CPU, and on the GPU if there is one, checked against float64",
    )

    checking = add("verify", "check an artifact folder offline")
    checking.add_argument("--artifacts", type=Path, default=ROOT / "artifacts", metavar="DIR")
    checking.add_argument("--allow-partial", action="store_true", help="accept a folder that was built with build --allow-partial")

    linting = add("lint", "disassemble the kernels of an artifact folder and check them against the matrix")
    linting.add_argument("--artifacts", type=Path, default=ROOT / "artifacts", metavar="DIR")
    linting.add_argument("--explain", action="store_true", help="a line for each kernel: what a MachineCode of it has to say")

    cleaning = add("clean", "remove artifacts/")
    cleaning.add_argument("--cache", action="store_true", help="remove build/ too: compiled results, logs, report")
    return parser


def _select(options, specs: list) -> list:
    """What the filters leave. Each may match something and all of them together nothing: a typing mistake too, and no empty list."""
    patterns = {axis: getattr(options, axis) for axis in FILTERS}
    chosen = select(specs, **patterns)
    if not chosen:
        given = ", ".join(f"--{axis} {pattern!r}" for axis, pattern in patterns.items() if pattern is not None)
        raise ValueError(f"no kernel of {', '.join(options.arch)} matches all of {given}, though each of them matches some")
    return chosen


def _list(options, expansion) -> int:
    specs = [spec for spec in expansion.specs if spec.arch in options.arch]
    chosen = _select(options, specs)
    for spec in chosen:
        print(f"{spec.kernel_id:50}  {spec.toolchain:8}  {spec.compile}" if options.explain else spec.kernel_id)
    if options.explain:
        excluded = [(spec, reason) for spec, reason in expansion.excluded if spec.arch in options.arch]
        for spec, reason in excluded:
            print(f"excluded: {spec.kernel_id}: {reason}")
        print(f"{len(chosen)} kernels, {len(excluded)} excluded by the matrix")
    return 0


def _build(options, expansion) -> int:
    from aot.build import pipeline

    specs = [spec for spec in expansion.specs if spec.arch in options.arch]
    request = pipeline.Request(
        specs=tuple(_select(options, specs)), matrix=expansion.specs,
        out=options.out.resolve(), build_dir=options.build_dir.resolve(), workers=options.jobs or pipeline.default_workers(),
        werror=options.werror, allow_partial=options.allow_partial,
    )  # fmt: skip
    code = pipeline.build(request)
    if code == 0 and options.demo:
        from aot.build import demo

        code = demo.run(request.out)
    return code


def _verify(options, expansion) -> int:
    from aot.build.verify import verify

    violations = verify(options.artifacts, expansion.specs, ROOT, options.allow_partial)
    for violation in violations:
        print(violation)
    print(f"{options.artifacts}: {f'{len(violations)} violations' if violations else 'every file, kernel and symbol is as it should be'}")
    return 1 if violations else 0


def _lint(options, expansion) -> int:
    from aot.build.verify import lint_artifacts

    lines, refused = lint_artifacts(options.artifacts, expansion.specs, options.explain)
    for line in lines:
        print(line)
    print(
        f"{options.artifacts}: {f'the machine code of {refused} kernels is refused' if refused else 'the machine code is as the matrix says'}"
    )
    return 1 if refused else 0


def _clean(options) -> int:
    for folder in [ROOT / "artifacts", *([ROOT / "build"] if options.cache else [])]:
        shutil.rmtree(folder, ignore_errors=False) if folder.exists() else None
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "clean":
            return _clean(options)
        return {"list": _list, "build": _build, "verify": _verify, "lint": _lint}[options.command](options, expand_all())
    except (MatrixError, ValueError) as error:
        message = str(error)
    except RuntimeError as error:  # ToolError, SourceError, AssembleError, SassError: they say what to do
        message = f"{type(error).__name__}: {error}"
    except BrokenPipeError:  # list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
