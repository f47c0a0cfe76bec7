"""Rules of the repository that no linter knows: who may import what, sizes, forbidden words.

Each rule is a function from parsed source to complaints. It is run over the tree, and over small
samples that break it, so that a rule that no longer bites fails as well.
"""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]

LONGEST_FILE_LINES = 400
LONGEST_FUNCTION_LINES = 60

ENGINE = "resihp_ext"
PLANNING_FOLDERS = (
    "plan",
    "state",
    "cost",
    "scheduler",
    "whatif",
    "simulator",
    "predictor",
    "faults",
    "detector",
)
PLANNING_FILES = ("errors.py", "environment.py", "packing.py")

ADAPTER_ROOM = "megatron/resilience/upstream/"
"""The only place that touches Megatron's global state."""
GLOBAL_STATE = ("get_args", "parallel_state", "mpu")
GLOBAL_STATE_SCOPE = ("megatron", ENGINE, "tools", "pretrain_gpt.py")

# Spelled in halves, so that this file does not break its own rule.
FORBIDDEN_WORDS = tuple(
    first + second
    for first, second in (("/wo", "rk/"), (".lib", "rary"), ("farm-", "bench"), ("farm-", "studio"))
)

Rule = Callable[[str, ast.Module], list[str]]


def tracked_files() -> list[Path]:
    """Files that git knows or would add: what generated folders hold does not count."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def python_files() -> Iterator[tuple[str, str]]:
    for path in tracked_files():
        if path.suffix == ".py":
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, nested or through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _loads_a_module(node.func):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _loads_a_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else None
    name = function.id if isinstance(function, ast.Name) else name
    return name in {"import_module", "__import__"}


def is_planning(path: str) -> bool:
    head, _, tail = path.partition("/")
    in_folder = tail.partition("/")[0] in PLANNING_FOLDERS
    return head == ENGINE and (in_folder or tail in PLANNING_FILES)


def engine_imports_no_megatron(path: str, tree: ast.Module) -> list[str]:
    if not path.startswith(f"{ENGINE}/"):
        return []
    return [
        f"{path}:{line}: the engine imports {name}"
        for line, name in imported_names(tree)
        if name.partition(".")[0] == "megatron"
    ]


def planning_imports_no_torch(path: str, tree: ast.Module) -> list[str]:
    """Of the engine only its planning half either: anything else could bring torch with it."""
    if not is_planning(path):
        return []
    return [
        f"{path}:{line}: planning code imports {name}"
        for line, name in imported_names(tree)
        if name.partition(".")[0] in {"torch", "megatron"}
        or (name.partition(".")[0] == ENGINE and not _is_planning_module(name))
    ]


def _is_planning_module(name: str) -> bool:
    second = [*name.split("."), ""][1]
    return second in PLANNING_FOLDERS or f"{second}.py" in PLANNING_FILES


def global_state_stays_in_its_room(path: str, tree: ast.Module) -> list[str]:
    in_scope = path.partition("/")[0] in GLOBAL_STATE_SCOPE
    if not in_scope or path.startswith(ADAPTER_ROOM):
        return []
    used = [
        (line, name)
        for line, name in imported_names(tree)
        if name.startswith("megatron.") and set(name.split(".")) & set(GLOBAL_STATE)
    ]
    used += [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in GLOBAL_STATE
        and ast.unparse(node.value) != "typing"
    ]
    return [f"{path}:{line}: {name} belongs into {ADAPTER_ROOM}" for line, name in used]


def has_a_docstring(path: str, tree: ast.Module) -> list[str]:
    empty_package = path.endswith("__init__.py") and not tree.body
    if empty_package or ast.get_docstring(tree):
        return []
    return [f"{path}:1: no module docstring: why it exists, what it promises"]


def functions_are_short(path: str, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {length} lines, at most {LONGEST_FUNCTION_LINES}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    ]


RULES: tuple[Rule, ...] = (
    engine_imports_no_megatron,
    planning_imports_no_torch,
    global_state_stays_in_its_room,
    has_a_docstring,
    functions_are_short,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_obeys(rule: Rule) -> None:
    complaints = [
        complaint for path, text in python_files() for complaint in rule(path, ast.parse(text))
    ]
    assert not complaints, "\n".join(complaints)


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION_LINES


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (engine_imports_no_megatron, "resihp_ext/a.py", "import megatron.core"),
        (engine_imports_no_megatron, "resihp_ext/a.py", "def f():\n    from megatron import core"),
        (engine_imports_no_megatron, "resihp_ext/a.py", "import_module('megatron.core')"),
        (engine_imports_no_megatron, "resihp_ext/a.py", "importlib.import_module('megatron')"),
        (planning_imports_no_torch, "resihp_ext/plan/a.py", "def f():\n    import torch.nn"),
        (planning_imports_no_torch, "resihp_ext/packing.py", "from torch import nn"),
        (planning_imports_no_torch, "resihp_ext/plan/a.py", "import resihp_ext.launcher.run"),
        (planning_imports_no_torch, "resihp_ext/plan/a.py", "from resihp_ext import launcher"),
        (
            global_state_stays_in_its_room,
            "megatron/resilience/a.py",
            "from megatron.core import parallel_state",
        ),
        (
            global_state_stays_in_its_room,
            "pretrain_gpt.py",
            "from megatron.core.parallel_state import get_tensor_model_parallel_rank",
        ),
        (global_state_stays_in_its_room, "tools/a.py", "from megatron.training import get_args"),
        (global_state_stays_in_its_room, "tools/a.py", "training.get_args()"),
        (global_state_stays_in_its_room, "tools/a.py", "from megatron.core import mpu as m"),
        (has_a_docstring, "a.py", "x = 1"),
        (has_a_docstring, "a.py", ""),
        (functions_are_short, "a.py", LONG_FUNCTION),
    ],
)
def test_rule_bites(rule: Rule, path: str, source: str) -> None:
    assert rule(path, ast.parse(source))


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (engine_imports_no_megatron, "megatron/resilience/a.py", "import megatron.core"),
        (planning_imports_no_torch, "resihp_ext/runtime/a.py", "import torch"),
        (planning_imports_no_torch, "resihp_ext/plan/a.py", "from resihp_ext.errors import X"),
        (planning_imports_no_torch, "resihp_ext/plan/a.py", "from resihp_ext import packing"),
        (
            global_state_stays_in_its_room,
            "megatron/resilience/upstream/a.py",
            "from megatron.training import get_args",
        ),
        (global_state_stays_in_its_room, "tools/a.py", "from typing import get_args"),
        (global_state_stays_in_its_room, "tools/a.py", "typing.get_args(x)"),
        (has_a_docstring, "a/__init__.py", ""),
        (functions_are_short, "a.py", LONG_FUNCTION.removesuffix("    x = 1\n")),
    ],
)
def test_rule_lets_the_rest_pass(rule: Rule, path: str, source: str) -> None:
    assert not rule(path, ast.parse(source))


def test_megatron_stays_a_namespace() -> None:
    """One ``megatron/__init__.py`` hides megatron-core's wheel."""
    assert not list(ROOT.glob("megatron/__init__.py*"))


def test_files_are_short() -> None:
    long = {path: text.count("\n") for path, text in python_files()}
    assert not {path: lines for path, lines in long.items() if lines > LONGEST_FILE_LINES}


def test_no_forbidden_words() -> None:
    complaints = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        complaints += [f"{path.relative_to(ROOT)}: {w}" for w in FORBIDDEN_WORDS if w in text]
    assert not complaints, "\n".join(complaints)


def test_every_test_file_is_collected(pytestconfig: pytest.Config) -> None:
    """A folder that pytest passes over (its defaults name "dist") would never be missed."""
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"unit", "dist", "gpu"} <= {folder.name for folder in folders}
    for folder in folders:
        for part in folder.parts:
            assert not any(fnmatch.fnmatch(part, pattern) for pattern in passed_over), folder


def test_planning_half_runs_without_torch() -> None:
    """What the sources promise, checked on the modules themselves."""
    paths = [path for path, _ in python_files() if is_planning(path)]
    modules = [path.removesuffix(".py").removesuffix("/__init__") for path in paths]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, *[module.replace("/", ".") for module in modules]],
        cwd=ROOT,
        timeout=30,
        check=True,
    )
    assert len(modules) >= 2
