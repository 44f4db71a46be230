"""Sources shown: whatever decorates a function, and a clear error where there is no source."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvlab
from kvlab import costs, runtime, source
from kvlab.cache import NoCache
from kvlab.naive import NaiveCache


def doubled(x):
    """Twice x.

    More about it.
    """
    # a comment stays
    return 2 * x  # `code` in it


@functools.cache
def kept(x):
    """Cached."""
    return x


@dataclass
class Pair:
    """Two numbers."""

    first: int = 0  # the first

    @property
    def sum(self):
        """Their sum."""

        return self.first

    @classmethod
    def made(cls):
        """A pair."""
        return cls()


@runtime.counted
@runtime.autotune([object()] if not runtime.HAS_TRITON else [runtime.triton.Config({"BLOCK": 8})], key=["n"])
@runtime.triton.jit
def kernel(x_ptr, n, BLOCK: runtime.tl.constexpr):
    """A kernel."""
    i = runtime.tl.arange(0, BLOCK)
    runtime.tl.store(x_ptr + i, i, mask=i < n)


def test_docstrings_are_left_out_and_kept_on_demand():
    assert source.text(doubled) == "def doubled(x):\n    # a comment stays\n    return 2 * x  # `code` in it"
    assert '"""Twice x.' in source.text(doubled, docstring=True)
    assert "Two numbers" not in source.text(Pair)
    assert "first: int = 0  # the first" in source.text(Pair)
    assert "Their sum" not in source.text(Pair)


@pytest.mark.parametrize("wrapped", [kernel, kernel.fn, kernel.fn.fn], ids=["counted", "autotuned", "jitted"])
def test_kernels_are_unwrapped(wrapped):
    text = source.text(wrapped)
    assert text.startswith("@runtime.counted\n@runtime.autotune")
    assert "def kernel(x_ptr" in text
    assert "A kernel" not in text


def test_methods_properties_partials_and_caches_are_unwrapped():
    assert source.text(NaiveCache.attend).startswith("def attend(")
    assert source.text(Pair.made).startswith("@classmethod\ndef made(")
    assert source.text(Pair.sum).startswith("@property\ndef sum(")
    assert source.text(functools.partial(doubled, 1)) == source.text(doubled)
    assert source.text(kept).startswith("@functools.cache\ndef kept")
    assert "def dot(a, b, acc)" in source.text(runtime.dot)


def test_what_is_shown_is_python_that_says_the_same():
    for obj in (costs.Hardware, costs.forward, NaiveCache, NoCache, runtime.Counted):
        compile(source.text(obj), "shown", "exec")


def test_location_is_file_and_line():
    file, line = source.location(costs.Hardware).split(":")
    assert file == "kvlab/costs.py"
    lines = Path(costs.__file__).read_text().splitlines()
    assert "class Hardware" in "\n".join(lines[int(line) - 1 : int(line) + 1])


def test_a_script_prints_source_and_difference(capsys):
    kvlab.show(doubled)
    out = capsys.readouterr().out
    assert out.startswith("# tests/test_source.py:")
    assert "return 2 * x" in out
    kvlab.show_diff(NoCache.attend, NaiveCache.attend)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("--- kvlab/cache.py:")
    assert out[1].startswith("+++ kvlab/naive.py:")
    removed = [line[1:] for line in out[2:] if line[0] in " -"]
    assert "\n".join(removed) == source.text(NoCache.attend)
    kvlab.show_diff(doubled, doubled)
    assert "no difference" in capsys.readouterr().out


def test_the_difference_in_colour_is_escaped():
    colored = source._coloured(["--- a", "+++ b", "-x < 1", "+x > 1", " y"])
    assert "x &lt; 1" in colored
    assert colored.count("background:") == 2


@pytest.mark.parametrize("statement", ["def made(): return 1", "class made: x = 1", "made = lambda: 1"])
def test_what_exec_defined_has_a_clear_error(statement):
    namespace = {"__name__": __name__}
    exec(statement, namespace)
    for show in (kvlab.show, lambda f: kvlab.show_diff(f, doubled)):
        with pytest.raises(
            ValueError, match=r"source not available for (made|<lambda>).*notebook, as a script or from a file"
        ):
            show(namespace["made"])


@pytest.mark.parametrize("nothing", [3, "text", None, len])
def test_what_is_no_function_is_refused(nothing):
    with pytest.raises(ValueError, match="must be a function"):
        kvlab.show(nothing)


def test_a_file_changed_after_its_import_is_noticed(tmp_path):
    file = tmp_path / "changing.py"
    file.write_text("def first():\n    return 1\n")
    code = (
        "import sys, kvlab; sys.path.insert(0, sys.argv[1]); import changing\n"
        "open(changing.__file__, 'w').write('# another text\\nx = 1\\n' * 3)\n"
        "kvlab.show(changing.first)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "source not available for first" in done.stderr


def test_functions_of_a_module_by_name(capsys):
    kvlab.show_of("kvlab.costs", "kv_bytes")
    assert "def kv_bytes" in capsys.readouterr().out
    with pytest.raises(AttributeError, match="nothing_here"):
        kvlab.show_of("kvlab.costs", "nothing_here")


def test_a_module_that_does_not_load_is_named(capsys):
    kvlab.show_of("kvlab.not_there", "first", "second")
    assert capsys.readouterr().out == "first, second: see kvlab/not_there.py\n"
