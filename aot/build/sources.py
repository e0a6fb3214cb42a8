"""Which files of the project one compile reads: the part of its cache key that is sources.

By following #include "..." and Python imports from the file that is compiled. So editing a header rebuilds what includes it
and nothing else. The compile steps check the result against what the compiler says that it read (`undeclared`): a file that
was read but is not part of the key would let a stale result pass as a fresh one.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

# Also what is included through a macro: #define CULA_PARAMS_FILE "aot/ops/gates/params_gate.def"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*(?:include|define[ \t]+\w+)[ \t]*"([^"\n]+)"', re.M)


class SourceError(RuntimeError):
    """A source that is named does not exist, or reads files that its cache key does not cover."""


def include_closure(source: Path, include_dirs: tuple[Path, ...]) -> list[Path]:
    """`source` and all that it includes by quotes, directly or not, as far as it is found beside the including file or in
    include_dirs. What is found nowhere is the compiler's business."""
    if not source.is_file():
        raise SourceError(f"{source} does not exist")
    found, todo = set(), [source.resolve()]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in _INCLUDE.findall(path.read_bytes()):
            candidates = (folder / name.decode() for folder in (path.parent, *include_dirs))
            hit = next((candidate for candidate in candidates if candidate.is_file()), None)
            if hit:
                todo.append(hit.resolve())
    return sorted(found)


def _module_file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def import_closure(module: str, root: Path) -> list[Path]:
    """The file of `module` and of all modules under root that it imports, directly or not, with their packages."""
    if _module_file(root, module) is None:
        raise SourceError(f"module {module} does not exist in {root}")
    found, todo = {}, [module]
    while todo:
        name = todo.pop()
        if name in found or (path := _module_file(root, name)) is None:
            continue
        found[name] = path
        todo += [name.rsplit(".", 1)[0]] if "." in name else []
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parent, *([base] if base else [])])
                todo += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return sorted(found.values())


def depfile_paths(text: str) -> list[Path]:
    """The prerequisites of a make dependency file (-MD)."""
    words = re.sub(r"\\\n", " ", text).partition(": ")[2]
    return [Path(word.replace("\\ ", " ")) for word in re.findall(r"(?:\\ |\S)+", words)]


def undeclared(read, declared, root: Path) -> list[str]:
    """Files under root that were read but are not declared. Those of virtual environments and of the build do not count:
    they are identified by their versions."""
    root = root.resolve()
    known = {path.resolve() for path in declared}
    extra = []
    for path in {Path(path).resolve() for path in read} - known:
        if path.is_relative_to(root) and not {".venv", "build", "site-packages"} & set(path.relative_to(root).parts):
            extra.append(path.relative_to(root).as_posix())
    return sorted(extra)
