"""Compile functions that go wrong, each in its own way."""

import os
import signal
import time


def compile_raise(spec, out_dir):
    print("printed before the failure")
    raise ArithmeticError("the toy does not like this")


def compile_crash(spec, out_dir):
    os.kill(os.getpid(), signal.SIGSEGV)


def compile_nonsense(spec, out_dir):
    return dict(cubin=b"not a cubin", entry="k", block=(1, 1, 1), max_dynamic_smem=0)


def compile_lazily(spec, out_dir):
    __import__("toy.hidden")
    return compile_nonsense(spec, out_dir)


def compile_slowly(spec, out_dir):
    time.sleep(600)
