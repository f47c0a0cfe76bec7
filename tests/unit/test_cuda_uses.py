"""Where the installed Megatron names CUDA, frozen: an upgrade shows what is new in one diff.

``tests/golden/cuda_uses.txt`` has a line for every source file of ``megatron.core`` and
``megatron.training`` that uses ``torch.cuda``. In the files whose name ``torch`` is bound to the
stand-in on a CPU, a name in brackets is one that the stand-in leaves to torch.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from megatron.resilience.device.patches.torch_name import TorchName
from megatron.resilience.device.stand_in import _FACTORIES, CpuTorch
from megatron.resilience.upstream.origin import wheel_folder

pytestmark = pytest.mark.unit

HEADER = """\
# torch.cuda in the installed megatron-core: module, how often its text spells the device "cuda"
# itself, and the names of torch.cuda that it uses. "+": torch is the stand-in there on a CPU;
# [name]: and leaves this one to torch. Rewritten by: pytest tests/unit/test_cuda_uses.py
# --rewrite-golden
"""


def patched() -> frozenset[str]:
    module = importlib.import_module(TorchName.__module__)
    return frozenset((*module.MODULES, module.REFUSES_WITHOUT_CUDA))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of plain names, else what of it comes after the last call."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    words.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(words))


def chains(tree: ast.Module) -> Iterator[str]:
    """Every longest dotted name below ``torch.cuda``."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            words = dotted(node)
            if words.startswith("torch.cuda."):
                yield words.removeprefix("torch.cuda.")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            prefix = (node.module or "").removeprefix("torch.cuda").lstrip(".")
            yield from (".".join(filter(None, (prefix, alias.name))) for alias in node.names)


def device_literals(tree: ast.Module) -> int:
    return sum(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == "cuda" or node.value.startswith("cuda:"))
        for node in ast.walk(tree)
    )


IDLE = frozenset(
    f"megatron.core.models.common.{name}"
    for name in ("embeddings.rope_utils", "language_module.language_module")
)
"""Modules that have the stand-in and name CUDA nowhere (rope_utils pins memory, for CUDA alone)."""


@cache
def stand_in() -> CpuTorch:
    return CpuTorch()


def answered(name: str) -> bool:
    """Whether the stand-in has an answer of its own to ``torch.cuda.NAME``."""
    return name.split(".")[0] in vars(stand_in().cuda)


@cache
def trees() -> dict[str, ast.Module]:
    """Every source that names CUDA or has the stand-in, by module."""
    root = wheel_folder()
    found = {}
    for half in ("core", "training"):
        for path in sorted((root / "megatron" / half).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            module = module.removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            if module in patched() or re.search(r"torch\.cuda|[\"']cuda", text):
                found[module] = ast.parse(text)
    return found


@cache
def uses() -> dict[str, tuple[int, frozenset[str]]]:
    """Literals and names of every module that has any."""
    found = {
        module: (device_literals(tree), frozenset(chains(tree))) for module, tree in trees().items()
    }
    return {module: each for module, each in found.items() if any(each)}


def line(module: str, literals: int, names: frozenset[str]) -> str:
    inside = module in patched()
    shown = [f"[{name}]" if inside and not answered(name) else name for name in sorted(names)]
    words = ["+" if inside else "-", module, str(literals), *shown]
    return " ".join(words)


def test_uses_of_cuda_are_the_known_ones(golden: Callable[[str, str], None]) -> None:
    lines = [line(module, *found) for module, found in sorted(uses().items())]
    golden("cuda_uses.txt", HEADER + "\n".join(lines) + "\n")


def test_scan_finds_the_names_it_should() -> None:
    tree = ast.parse(
        "from torch.cuda import _lazy_init\nfrom torch.cuda.nvtx import range_pop\n"
        "torch.cuda.nvtx.range_push('x')\nx = torch.cuda.Event(); torch.cudax.no; a.cuda()\n"
        "d = torch.zeros(1, device='cuda'); e = 'cuda:0'; 'cudagraph'\n"
    )
    assert sorted(chains(tree)) == ["Event", "_lazy_init", "nvtx.range_pop", "nvtx.range_push"]
    assert device_literals(tree) == 2


def test_every_module_with_the_stand_in_has_something_for_it() -> None:
    """A module that no longer names CUDA can leave the list of the patch."""
    assert patched() - uses().keys() == IDLE


def test_every_factory_with_a_device_is_redirected() -> None:
    """``torch.X(..., device=...)`` in a module with the stand-in, X not redirected: CUDA."""
    missed = set()
    for module in patched():
        for call in ast.walk(trees()[module]):
            if isinstance(call, ast.Call) and any(each.arg == "device" for each in call.keywords):
                head, _, name = dotted(call.func).partition(".")
                if head == "torch" and not name.startswith("cuda."):
                    missed.add(name)
    # as_tensor: its one call takes the device of a tensor that exists.
    assert missed - set(_FACTORIES) == {"as_tensor"}
