"""docs/abi.md against cula.h, in both directions: nothing of the header is missing, nothing on the page is made up."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "aot/capi/include/cula.h").read_text()
PAGE = (ROOT / "docs/abi.md").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)

FUNCTIONS = re.findall(r"CULA_API [\w\s*]*?\b(cula_\w+)\(", CODE)
STRUCTS = dict(re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", CODE, flags=re.S))
STRUCTS = {name: body for body, name in STRUCTS.items()}
ENUMERATORS = {name: int(value) for name, value in re.findall(r"\b(CULA_[A-Z0-9_]+) = (\d+)", CODE)}


def fields(body: str) -> list[str]:
    body = re.sub(r"union \{.*?\} (\w+);", r"\1;", body, flags=re.S)
    names = []
    for declaration in body.split(";"):
        words = re.findall(r"\w+", re.sub(r"\[.*?\]", "", declaration))
        if words:
            names.append(words[-1])
    return names


def test_the_header_was_parsed():
    """The parsers above would make every other test pass on an empty list."""
    assert len(FUNCTIONS) == len(set(FUNCTIONS)) == len(re.findall(r"^CULA_API ", CODE, flags=re.M))
    assert len(STRUCTS) == CODE.count("typedef struct")
    assert fields(STRUCTS["cula_decode_args"])[:3] == ["struct_size", "q", "k"]
    assert "value" in fields(STRUCTS["cula_launch_attribute"])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_function_has_a_row_with_its_arguments(function):
    row = re.search(rf"^\| `[^`]*\b{function}\(([^)]*)\)`", PAGE, flags=re.M)
    assert row, f"{function} has no row in the table of calls"
    declared = re.search(rf"\b{function}\((.*?)\)", CODE, flags=re.S).group(1)
    names = [re.findall(r"\w+", part)[-1] for part in declared.split(",")]
    assert re.findall(r"\w+", row.group(1)) == names


@pytest.mark.parametrize("struct", STRUCTS)
def test_struct_and_every_field_is_in_its_section(struct):
    start = re.search(rf"^(?:### )?`{struct}`", PAGE, flags=re.M)
    assert start, f"{struct} has no section"
    section = PAGE[start.start() :]
    end = re.search(r"\n(?:## |### |`cula_)", section[1:])
    section = section[: end.start() + 1] if end else section
    missing = [name for name in fields(STRUCTS[struct]) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", section)]
    assert not missing, f"{struct}: not on the page: {missing}"


@pytest.mark.parametrize("name", ENUMERATORS)
def test_enumerator_is_on_the_page_with_its_value(name):
    assert f"`{name}`" in PAGE
    value = ENUMERATORS[name]
    if name in ("CULA_MAX_LAUNCHES", "CULA_MAX_PARAMS", "CULA_PARAM_BYTES", "CULA_MAX_OBJECTS"):
        return  # capacities: the header is the place to read them
    assert re.search(rf"`{name}` (\| {value} \||\({value}\))", PAGE), f"{name} is not given as {value}"


def test_every_name_on_the_page_exists():
    mentioned = set(re.findall(r"\b(?:cula_[a-z0-9_]+|CULA_[A-Z0-9_]+)\b", PAGE)) - {"cula_xxx_args"}
    unknown = sorted(name for name in mentioned if not re.search(rf"\b{name}\b", HEADER))
    assert not unknown, f"not in cula.h: {unknown}"
