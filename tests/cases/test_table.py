"""README.md of this folder against the tests: no stale name, no case without a row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def defined() -> set[str]:
    names = set()
    for folder in ("cases", "gpu"):
        for file in (TESTS / folder).glob("test_*.py"):
            names.update(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    return names


def test_every_named_test_exists_and_every_numbered_test_is_named():
    named = set(re.findall(r"`(test_\w+)`", (Path(__file__).parent / "README.md").read_text()))
    assert named <= defined()
    assert {n for n in defined() if n.startswith("test_case_")} <= named


def test_every_case_has_a_row_with_a_test_or_a_reason():
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", (Path(__file__).parent / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 54))
    reasons = ("prefill", "training", "verify", "context parallelism", "no such operator here")
    for number, _, what in rows:
        tests = re.findall(r"`(test_case_\w+)`", what)
        assert tests or what.startswith(reasons), number
        for name in tests:
            numbers = {int(n) for n in re.findall(r"(?<=_)\d\d(?=_)", name)}
            own = not what.startswith(reasons)
            assert not own or int(number) in numbers, f"{name} is not about case {number}"
