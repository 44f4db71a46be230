"""The house: versions that agree, a staircase that only goes up, a docstring for whatever is public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

packaging_requirements = pytest.importorskip("packaging.requirements")
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STEPS: list[list[str]] = PROJECT["tool"]["kvlab"]["steps"]
BESIDE: list[str] = PROJECT["tool"]["kvlab"]["beside"]
STACKS = {"cpu": {"torch": "2.13.0", "triton": "3.7.1"}, "gpu": {"torch": "2.11.0", "triton": "3.6.0"}}


def modules() -> dict[str, list[Path]]:
    """Each module of kvlab (a file, or a package with all its files) by name."""
    found = {path.stem: [path] for path in (ROOT / "kvlab").glob("*.py") if path.stem != "__init__"}
    for package in (ROOT / "kvlab").glob("*/__init__.py"):
        found[package.parent.name] = sorted(package.parent.rglob("*.py"))
    return found


# --- versions ------------------------------------------------------------------------------------------------------


def lock(stack: str) -> dict[str, str]:
    """Name to version of one lock file; every line must be an exact pin."""
    pins: dict[str, str] = {}
    for line in (ROOT / f"requirements-{stack}.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = packaging_requirements.Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{line} is not an exact pin"
        assert "*" not in specifier.version, f"{line} is not an exact pin"
        assert requirement.name not in pins, f"{requirement.name} is pinned twice"
        pins[requirement.name] = specifier.version
    return pins


def declared() -> list[str]:
    project = PROJECT["project"]
    return project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]


@pytest.mark.parametrize("stack", STACKS)
def test_lock_pins_the_stack_and_satisfies_every_range(stack):
    pins = lock(stack)
    assert {name: pins[name] for name in STACKS[stack]} == STACKS[stack]
    for line in declared():
        requirement = packaging_requirements.Requirement(line)
        assert requirement.name in pins, f"{line} of pyproject.toml is not in requirements-{stack}.txt"
        assert requirement.specifier.contains(pins[requirement.name]), f"{pins[requirement.name]} is outside {line}"


def test_locks_differ_only_where_the_stacks_do():
    cpu, gpu = lock("cpu"), lock("gpu")
    differ = {name for name in cpu.keys() | gpu.keys() if cpu.get(name) != gpu.get(name)}
    # setuptools: torch 2.11 does not allow the newest. The rest is CUDA, which only the GPU stack pins.
    allowed = {"torch", "triton", "setuptools"}
    assert {n for n in differ if n not in allowed and not n.startswith(("nvidia-", "cuda-"))} == set()


def test_conda_route_installs_the_gpu_lock():
    text = (ROOT / "environment.yml").read_text()
    items = [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("- ")]
    assert "-r requirements-gpu.txt" in items
    assert "-e ." in items
    python = next(item for item in items if item.startswith("python="))
    from packaging.specifiers import SpecifierSet

    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python.split("=")[1])
    pinned = [item for item in items if re.match(r"(torch|pytorch|triton)\b", item)]
    assert pinned == [], "conda must not bring a second torch or triton"


# --- the staircase -------------------------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    """The kvlab modules a file imports anywhere, except for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("kvlab."))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "kvlab":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("kvlab."):
                yield node.module.split(".")[1]


def test_every_module_has_a_place():
    placed = [name for step in STEPS for name in step] + BESIDE
    assert len(placed) == len(set(placed)), "a module stands on two steps"
    missing = sorted(set(modules()) - set(placed))
    assert missing == [], f"{missing}: write them into steps or beside in pyproject.toml"
    gone = sorted({name.split(".")[0] for name in placed} - set(modules()))
    assert gone == [], f"{gone}: in steps or beside in pyproject.toml, and not in kvlab/"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_from_below(name):
    level = {module: i for i, step in enumerate(STEPS) for module in step}
    for path in modules()[name]:
        if name in BESIDE or f"{name}.{path.stem}" in BESIDE:
            continue
        for other in imported(ast.parse(path.read_text())):
            if other == name or other not in modules():
                continue  # a name that kvlab itself exports, such as show
            assert other not in BESIDE, f"{path.name} imports {other}, which stands beside the staircase"
            assert level[other] <= level[name], (
                f"{path.name} (step {level[name]}) imports {other} (step {level[other]})"
            )


def test_a_command_inside_a_module_is_imported_by_none():
    for command in (name for name in BESIDE if "." in name):
        package, _, part = command.partition(".")
        for path in (p for paths in modules().values() for p in paths):
            text = path.read_text()
            assert not re.search(
                rf"^\s*(from kvlab\.{package} import .*\b{part}\b|import kvlab\.{command}\b)", text, re.M
            ), path


def test_no_step_goes_in_circles():
    graph = {
        name: {o for p in paths if f"{name}.{p.stem}" not in BESIDE for o in imported(ast.parse(p.read_text()))}
        for name, paths in modules().items()
    }
    done: set[str] = set()
    while graph.keys() - done:
        free = {n for n in graph.keys() - done if not (graph[n] & graph.keys()) - done - {n} or n in BESIDE}
        assert free, f"these modules import each other: {sorted(graph.keys() - done)}"
        done |= free


def test_importing_kvlab_loads_nothing_heavy():
    heavy = {"matplotlib", "transformers", "tokenizers", "tqdm", "IPython", "safetensors"}
    code = f"import sys, torch; had = set(sys.modules); import kvlab; print(sorted({heavy} & (set(sys.modules) - had)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# --- docstrings ----------------------------------------------------------------------------------------------------


def is_public(name: str) -> bool:
    return not name.startswith("_")


def raises(function: ast.FunctionDef) -> bool:
    """Whether the function itself, not one defined inside it, raises something new."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        todo += ast.iter_child_nodes(node)
    return False


def takes_tensors(function: ast.FunctionDef) -> bool:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    annotations = [a.annotation for a in arguments if a.annotation] + ([function.returns] if function.returns else [])
    return any(re.search(r"\bTensor\b", ast.unparse(a)) for a in annotations)


def decorators(node: ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join(ast.unparse(d) for d in node.decorator_list)


def faults(tree: ast.Module) -> Iterator[str]:
    """What the docstrings of a module lack."""
    if not ast.get_docstring(tree):
        yield "line 1: the module has no docstring"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not is_public(node.name):
            continue
        at = f"line {node.lineno}: {node.name}"
        text = ast.get_docstring(node) or ""
        if not text:
            yield f"{at} has no docstring"
            continue
        if "Source:" not in text:
            yield f"{at} does not say where it comes from (Source: chapter, paper or system)"
        if isinstance(node, ast.FunctionDef):
            yield from function_faults(node, at, "")
        else:
            inherits = bool(node.bases)
            for method in node.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                place = f"line {method.lineno}: {node.name}.{method.name}"
                if is_public(method.name):
                    if not ast.get_docstring(method) and not inherits and not documented_elsewhere(method):
                        yield f"{place} has no docstring"
                    yield from function_faults(method, place, text)
                elif raises(method) and "Raises:" not in text + (ast.get_docstring(method) or ""):
                    yield f"{at} raises in {method.name} and has no Raises:"


def documented_elsewhere(method: ast.FunctionDef) -> bool:
    """A setter shares its getter's docstring; an overload its implementation's."""
    return bool(re.search(r"\.setter|overload|override", decorators(method)))


def function_faults(node: ast.FunctionDef, at: str, of_class: str) -> Iterator[str]:
    text = (ast.get_docstring(node) or "") + of_class
    if raises(node) and "Raises:" not in text:
        yield f"{at} raises and has no Raises:"
    if takes_tensors(node) and not re.search(r"\[[^\]]*\]|scalar|Shapes", text):
        yield f"{at} takes or returns a tensor and gives no shape, such as [T, H, D]"


@pytest.mark.parametrize("name", sorted(modules()))
def test_every_public_name_says_what_it_is(name):
    found = [f"{p.relative_to(ROOT)}, {fault}" for p in modules()[name] for fault in faults(ast.parse(p.read_text()))]
    assert found == [], "\n" + "\n".join(found)


def test_the_docstring_rules_bite():
    text = '''"""A module."""
def bare(x): ...
def silent(q: Tensor) -> Tensor:
    """Attention of q [T, H, D]. Source: chapter 00."""
    raise ValueError("q")
def shapeless(q: Tensor) -> Tensor:
    """Attention. Source: chapter 00."""
def sourceless() -> None:
    """Nothing."""
def good(q: Tensor) -> Tensor:
    """Attention of q [T, H, D]. Raises: ValueError. Source: chapter 00."""
    raise ValueError("q")
'''
    found = [fault.split(":", 1)[1].split()[0] for fault in faults(ast.parse(text))]
    assert found == ["bare", "silent", "shapeless", "sourceless"]


# --- the commands --------------------------------------------------------------------------------------------------


def test_makefile_has_every_verb_the_readme_names():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"\bmake ([a-z][a-z-]*)", readme + (ROOT / "CONTRIBUTING.md").read_text()))
    verbs |= {"setup", "lab", "chapters", "book", "test", "lint", "bench", "doctor", "test-gpu", "clean"}
    have = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert verbs - have == set()
