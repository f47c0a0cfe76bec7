"""The documentation names only what exists, and leaves out nothing that a user can type or read.

Checks are functions that return complaints: they run over the real documents, and over samples that
are wrong, so that a check that no longer bites fails as well.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from megatron.resilience.cli.main import resihp
from megatron.resilience.preset import preset_names
from megatron.resilience.settings import GROUPS
from resihp_ext.events import Event
from resihp_ext.flags import flag_name

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = ROOT / "docs" / "command-line.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
SOURCE_SUFFIXES = (".py", ".sh", ".md", ".toml", ".lock", ".args")
FOLDERS = ("megatron", "resihp_ext", "tests", "tools", "scripts", "docs", ".ci")
MAKE = re.compile(r"^(?:# )?make ([a-z.][a-z.-]*)", re.MULTILINE)
TARGET = re.compile(r"^([a-z.][a-z.-]*):.*## ", re.MULTILINE)


def documents() -> list[Path]:
    return [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "tests/README.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]


def anchors(markdown: str) -> set[str]:
    """Names that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", markdown), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in kept}


def dead_links(place: Path, markdown: str) -> list[str]:
    complaints = []
    for link in LINK.findall(FENCE.sub("", markdown)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (place.parent / name) if name else place
        if not target.exists():
            complaints.append(f"{place.name}: {link} leads nowhere")
        elif anchor and target.suffix == ".md":
            text = target.read_text(encoding="utf-8") if name else markdown
            if anchor not in anchors(text):
                complaints.append(f"{place.name}: {link}: no such heading")
    return complaints


def missing_paths(place: Path, markdown: str) -> list[str]:
    """Paths in backticks (first word of a command, too) that are not in the repository."""
    words = [word for span in CODE.findall(FENCE.sub("", markdown)) for word in span.split()]
    return [
        f"{place.name}: `{word}` is not in the repository"
        for word in words
        if PATH.fullmatch(word) and _is_ours(word) and not (ROOT / word).exists()
    ]


def _is_ours(word: str) -> bool:
    head = word.partition("/")[0]
    return (head in FOLDERS and "/" in word) or ("/" not in word and word.endswith(SOURCE_SUFFIXES))


def unknown_make_targets(place: Path, markdown: str) -> list[str]:
    fenced = "\n".join(FENCE.findall(markdown))
    spans = "\n".join(CODE.findall(FENCE.sub("", markdown)))
    named = {*MAKE.findall(fenced), *MAKE.findall(spans)}
    return [f"{place.name}: make {target}: no such target" for target in named - make_targets()]


def unknown_resilience_flags(place: Path, markdown: str) -> list[str]:
    named = {flag for flag in FLAG.findall(markdown) if flag.startswith("--resilience")}
    return [f"{place.name}: {flag}: no such flag" for flag in sorted(named - set(setting_flags()))]


CHECKS: tuple[Callable[[Path, str], list[str]], ...] = (
    dead_links,
    missing_paths,
    unknown_make_targets,
    unknown_resilience_flags,
)


@cache
def make_targets() -> frozenset[str]:
    return frozenset(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


@cache
def setting_flags() -> dict[str, str]:
    """Our flags of ``pretrain_gpt.py`` and their defaults as a table shows them."""
    flags = {}
    for config, prefix in GROUPS.values():
        for field in dataclasses.fields(config):
            shown = {"False": "off", "None": ""}.get(str(field.default), f"`{field.default}`")
            flags[flag_name(field.name, prefix)] = shown
    return flags


def script_flags() -> set[str]:
    """Flags of the programs under tools/ and of ``resihp``."""
    found = set(_click_flags(resihp))
    found |= set(_click_flags(runpy.run_path(str(ROOT / "tools" / "preprocess_data.py"))["cli"]))
    for path in (ROOT / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                found |= {word for word in map(_text, node.args) if word.startswith("--")}
    return found


def _click_flags(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (o for o in (*parameter.opts, *parameter.secondary_opts) if o[:2] == "--")
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _click_flags(each)


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def table(heading: str) -> list[list[str]]:
    """Cells of the tables below one heading of docs/command-line.md, without their headers."""
    text = COMMAND_LINE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (body,) = (part for part in section if part.partition("\n")[0] == heading)
    rows = [line for line in body.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    headers = {index - 1 for index, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [
        row for index, row in enumerate(cells) if index not in headers and index - 1 not in headers
    ]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_documents_name_what_exists(check: Callable[[Path, str], list[str]]) -> None:
    complaints = [c for path in documents() for c in check(path, path.read_text(encoding="utf-8"))]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("check", "markdown"),
    [
        (dead_links, "[a](nowhere.md)"),
        (dead_links, "# One\n[a](#two)"),
        (dead_links, "[a](docs/command-line.md#no-such-heading)"),
        (missing_paths, "`tools/nothing.py`"),
        (missing_paths, "`python tools/nothing.py --json`"),
        (missing_paths, "`nothing.py`"),
        (missing_paths, "`megatron/resilience/nothing`"),
        (unknown_make_targets, "`make nothing`"),
        (unknown_make_targets, "```bash\nmake nothing\n```"),
        (unknown_resilience_flags, "--resilience-nothing"),
    ],
)
def test_check_bites(check: Callable[[Path, str], list[str]], markdown: str) -> None:
    assert check(ROOT / "README.md", markdown)


def test_our_flags_are_documented_and_exist() -> None:
    rows = table("Flags of `pretrain_gpt.py`")
    documented = {row[0].strip("`") for row in rows if row[0].startswith("`--") and len(row) == 4}
    assert documented == {"--preset", *setting_flags()}


def test_documented_defaults_are_the_real_ones() -> None:
    rows = {row[0].strip("`"): row for row in table("Flags of `pretrain_gpt.py`")}
    wrong = {
        flag: (rows[flag][2], default)
        for flag, default in setting_flags().items()
        if default and rows[flag][2] != default
    }
    assert not wrong


def test_flags_of_tools_are_documented_and_exist() -> None:
    headings = ("`resihp`", "`tools/preprocess_data.py`", "Other tools")
    cells = [cell for heading in headings for row in table(heading) for cell in row[:2]]
    assert {flag for cell in cells for flag in FLAG.findall(cell)} == script_flags()


def test_events_are_documented_and_exist() -> None:
    rows = [row for row in table("`events.jsonl`") if len(row) == 3]
    named = {row[0].strip("`") for row in rows}
    fields = {"time_s", "rank", "step", "event"}
    assert named - fields == {event.value for event in Event}
    assert fields <= named


def test_presets_are_documented_and_exist() -> None:
    assert {row[0].strip("`") for row in table("Presets")} == set(preset_names())


def test_make_targets_are_documented() -> None:
    documented = {target for row in table("make") for target in MAKE.findall(row[0].strip("`"))}
    assert documented == make_targets()


def test_every_patch_has_its_row() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    for folder in ("patches", "device/patches"):
        for path in (ROOT / "megatron" / "resilience" / folder).glob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and "Patch" in map(ast.unparse, node.bases):
                    assert f"`{node.name}`" in text, f"{path}: {node.name} is not documented"
