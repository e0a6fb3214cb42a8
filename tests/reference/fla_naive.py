"""The naive functions of flash-linear-attention, from the installed fla-core, without importing the package.

`import fla` needs Triton, which a machine without a GPU has no use for; the naive functions themselves are plain torch. So
their definitions are taken out of the installed source files and executed unchanged.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange


@functools.cache
def fla_function(file: str, name: str):
    """Function `name` of fla/ops/<file>. Raises if fla-core is not installed or no longer has it."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        raise ImportError("fla-core is not installed: it is one of the test requirements")
    path = Path(spec.submodule_search_locations[0], "ops", file)
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ImportError(f"{path} has no function {name}")
    namespace = {"torch": torch, "F": F, "rearrange": rearrange}
    exec(compile(ast.Module(found, []), str(path), "exec"), namespace)
    return namespace[name]
