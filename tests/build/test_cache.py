"""The store of compiled results, and what its keys depend on."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest

from aot.build import sources
from aot.build.cache import Cache, key_of, source_hashes

FILES = {"kernel.cubin": b"\x7fELF" + bytes(range(256)), "log": b""}


@pytest.fixture
def cache(tmp_path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.store("ab12", FILES, {"entry": "k", "block": [1, 2, 3]})
    return made


def test_what_is_stored_is_loaded(cache):
    entry = cache.load("ab12")
    assert entry.files == FILES and entry.facts == {"entry": "k", "block": [1, 2, 3]}
    assert cache.load("ab13") is None


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "kernel.cubin").write_bytes(FILES["kernel.cubin"][:-1]),
    lambda folder: (folder / "kernel.cubin").write_bytes(b"\0" * 260),
    lambda folder: (folder / "kernel.cubin").unlink(),
    lambda folder: (folder / "result.json").unlink(),
    lambda folder: (folder / "result.json").write_text(""),
    lambda folder: (folder / "result.json").write_text("[]"),
    lambda folder: (folder / "result.json").write_text('{"files": {"kernel.cubin": null}, "facts": {}}'),
    lambda folder: (folder / "result.json").write_text('{"files": {}}'),
    lambda folder: (folder / "result.json").write_bytes(b"\xff\xfe"),
], ids=["cut", "zeroed", "no file", "no marker", "empty marker", "list", "null", "no facts", "not text"])  # fmt: skip
def test_a_damaged_entry_is_a_miss_and_goes_away(cache, damage):
    damage(cache.path("ab12"))
    assert cache.load("ab12") is None
    assert not cache.path("ab12").exists()
    cache.store("ab12", FILES, {})
    assert cache.load("ab12").files == FILES


def test_storing_over_a_damaged_entry_repairs_it(cache):
    (cache.path("ab12") / "kernel.cubin").write_bytes(b"")
    cache.store("ab12", FILES, {})
    assert cache.load("ab12").files == FILES


def test_storing_over_a_good_entry_keeps_it_and_leaves_nothing_behind(cache):
    before = os.stat(cache.path("ab12")).st_ino
    cache.store("ab12", FILES, {})
    assert os.stat(cache.path("ab12")).st_ino == before
    assert [path.name for path in cache.path("ab12").parent.iterdir()] == ["ab12"]


def _store_often(folder, start):
    start.wait()
    for round_ in range(40):
        Cache(folder).store(f"key{round_}", {"kernel.cubin": b"x" * 50000}, {})


def test_racing_writers_all_succeed(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    writers = [context.Process(target=_store_often, args=(tmp_path, start)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert all(Cache(tmp_path).load(f"key{round_}").files == {"kernel.cubin": b"x" * 50000} for round_ in range(40))
    assert not [path for path in tmp_path.rglob(".new-*")]


def test_keys_ignore_order_and_see_every_value():
    assert key_of(a=1, b={"x": [1, 2], "y": None}) == key_of(b={"y": None, "x": (1, 2)}, a=1)
    different = [dict(a=1), dict(a=2), dict(a="1"), dict(a=True), dict(a=None), dict(a=[1]), dict(b=1), dict(a={"1": 1})]
    assert len({key_of(**parts) for parts in different}) == len(different)


@pytest.mark.parametrize("value", [1.5, b"bytes", {1: 2}, {"s": {3}}, object()])
def test_what_cannot_be_hashed_reliably_is_an_error(value):
    with pytest.raises(TypeError, match="cannot be part of a cache key"):
        key_of(value=value)


def test_source_hashes_see_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    paths = [tmp_path / "b", tmp_path / "a"]
    first = source_hashes(tmp_path, paths)
    assert list(first) == ["a", "b"]
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").write_text("1")
    swapped = source_hashes(tmp_path, paths)
    assert swapped != first and set(swapped.values()) == set(first.values())
    assert json.dumps(first)  # fit for a key


# ------------------------------------------------------------------------------------------- which sources a compile reads


@pytest.fixture
def tree(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write(
        "op/k.cu",
        '#include <cute/tensor.hpp>\n#  include "local.cuh"\n#include "common/deep.cuh"\n#define LIST "op/p.def"\n#include LIST\n',
    )
    write("op/local.cuh", '#include "local.cuh"\n#include "absent.h"\n')
    write("op/p.def", "")
    write("op/unused.cuh", "")
    write("common/deep.cuh", '#include "deeper.cuh"\n')
    write("common/deeper.cuh", '// "quoted" in a comment\n')
    write("pkg/__init__.py", "")
    write("pkg/a.py", "import os\nfrom pkg import b\nfrom .sub import c as d\ndef f():\n    import pkg.late\n")
    write("pkg/b.py", "import pkg.a\n")
    write("pkg/late.py", "")
    write("pkg/unused.py", "")
    write("pkg/sub/__init__.py", "from .. import b\n")
    write("pkg/sub/c.py", "from ..names import n\n")
    write("pkg/names.py", "n = 1\n")
    return tmp_path


def names(root, paths):
    return [path.relative_to(root).as_posix() for path in paths]


def test_includes_are_followed(tree):
    found = names(tree, sources.include_closure(tree / "op/k.cu", (tree,)))
    assert found == ["common/deep.cuh", "common/deeper.cuh", "op/k.cu", "op/local.cuh", "op/p.def"]


def test_imports_are_followed(tree):
    found = names(tree, sources.import_closure("pkg.a", tree))
    assert found == ["pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/late.py", "pkg/names.py", "pkg/sub/__init__.py", "pkg/sub/c.py"]


def test_a_source_that_is_not_there_is_named(tree):
    with pytest.raises(sources.SourceError, match=r"op/none\.cu does not exist"):
        sources.include_closure(tree / "op/none.cu", (tree,))
    with pytest.raises(sources.SourceError, match=r"module pkg\.none does not exist"):
        sources.import_closure("pkg.none", tree)


def test_a_read_file_outside_of_the_key_is_found(tree):
    text = "object.o: op/k.cu \\\n  /usr/include/stdio.h op/with\\ space.h \\\n .venv/x/y.h\n"
    read = [tree / path for path in sources.depfile_paths(text)]
    assert names(tree, [path for path in read if path.is_relative_to(tree)]) == ["op/k.cu", "op/with space.h", ".venv/x/y.h"]
    assert sources.undeclared(read, [tree / "op/k.cu"], tree) == ["op/with space.h"]
