"""The Markdown of the project: links lead somewhere, code that is marked as runnable runs, the folder map is the folder.

A fenced block directly after the comment `<!-- runnable -->` is run from the root of the repository; `<!-- runnable: needs torch -->` is
skipped where that module is not installed.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(os.environ.get("CULA_ARTIFACTS", ROOT / "artifacts"))
SKIPPED_FOLDERS = {".venv", "artifacts", "build", "dist", ".git", "node_modules", ".pytest_cache"}


def markdown() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    return [path for path in ROOT.rglob("*.md") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)]


PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(markdown())}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(text: str) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ +(.*)$", without_code(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_pages_were_found():
    assert {"README.md", "docs/abi.md", "docs/states-and-indices.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    bad = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(PAGES[page])):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            bad.append(target)
        elif anchor and anchor not in anchors(file.read_text()):
            bad.append(target)
    assert not bad, f"{page}: dead links {bad}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_the_text_exist(page):
    """`aot/archs.py` and the like; names with a placeholder or a star are left out."""
    named = re.findall(r"`((?:aot|loader|python|tests|docs|examples|benchmarks|requirements)/[\w./-]+)`", PAGES[page])
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing, f"{page}: no such path: {missing}"


def test_every_test_folder_is_described():
    folders = {path.name for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists() or list(path.glob("test_*.py"))}
    assert not [name for name in folders if f"`tests/{name}/`" not in PAGES["docs/testing.md"]]


@pytest.mark.parametrize("page", PAGES)
def test_pages_do_not_name_a_machine(page):
    assert not re.search(r"/home/|/root/", PAGES[page]) and str(ROOT) not in PAGES[page]


def runnable() -> list:
    cases = []
    for page, text in PAGES.items():
        pattern = r"^<!-- runnable(?:: needs ([\w ]+))? -->\n```(\w+)\n(.*?)^```"
        for match in re.finditer(pattern, text, flags=re.S | re.M):
            line = text.count("\n", 0, match.start()) + 2
            cases.append(pytest.param((match.group(1) or "").split(), match.group(2), match.group(3), id=f"{page}:{line}"))
        assert text.count("\n<!-- runnable") == len(re.findall("\n" + pattern[1:], text, flags=re.S | re.M)), page
    return cases


@pytest.mark.parametrize("needs, language, code", runnable())
def test_runnable_block(needs, language, code, tmp_path):
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "loader")])
    if language == "python":
        command = [sys.executable, "-c", code]
    elif language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", code]
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    elif language in ("c", "cpp"):
        source, program = tmp_path / f"block.{language}", tmp_path / "block"
        source.write_text(code)
        compiler = ["cc", "-std=c99"] if language == "c" else ["c++", "-std=c++17"]
        library = ARTIFACTS / "lib"
        build = [*compiler, "-Wall", "-Wextra", "-Werror", f"-I{ARTIFACTS / 'include'}", str(source), f"-L{library}", "-lcula",
                 f"-Wl,-rpath,{library}", "-o", str(program)]
        built = subprocess.run(build, capture_output=True, text=True, timeout=300)
        assert built.returncode == 0, built.stderr
        command = [str(program)]
    else:
        pytest.fail(f"no rule to run {language}")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def folder_map() -> list[str]:
    """Paths of the block after `<!-- folder map -->` in the README: two spaces of indent a level, the name is the first word."""
    block = re.search(r"^<!-- folder map -->\n```\n(.*?)^```", PAGES["README.md"], flags=re.S | re.M).group(1)
    paths, parents = [], []
    for line in block.splitlines():
        level = (len(line) - len(line.lstrip(" "))) // 2
        name = line.split()[0]
        parents[level:] = [name.rstrip("/")]
        paths.append("/".join(parents) + ("/" if name.endswith("/") else ""))
    return paths


def test_folder_map_exists():
    missing = [path for path in folder_map() if path != "artifacts/" and not (ROOT / path).exists() and not path.startswith("artifacts/")]
    wrong_kind = [path for path in folder_map() if (ROOT / path).exists() and (ROOT / path).is_dir() != path.endswith("/")]
    assert not missing and not wrong_kind, (missing, wrong_kind)


def test_folder_map_is_complete():
    """Every tracked folder of the first level, every folder of aot/ and every op family is in the map."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {path.split("/")[0] + "/" for path in tracked if "/" in path and not path.startswith(".")}
    folders |= {"/".join(path.split("/")[:2]) + "/" for path in tracked if path.startswith("aot/") and path.count("/") > 1}
    folders |= {"/".join(path.split("/")[:3]) + "/" for path in tracked if path.startswith("aot/ops/") and path.count("/") > 2}
    assert not folders - set(folder_map())
