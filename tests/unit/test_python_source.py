"""Python files as documents: nothing is lost, and each definition stands alone."""

import ast
import sysconfig
from pathlib import Path

import pytest

from megatron.resilience.data.preprocess.python_source import split_source

pytestmark = pytest.mark.unit

MODULE = '''"""Doc."""
import os

# About f,
# in two lines.
@decorate(
    1)
def f():
    text = """
def not_one():
"""

class A:
    def method(self): ...
x = 1; y = 2
# no definition below

async def g(): ...
'''


def documents(text):
    return [document for _, document in split_source(text)]


def test_definitions_and_the_code_between_are_documents():
    assert documents(MODULE) == [
        '"""Doc."""\nimport os\n\n',
        '# About f,\n# in two lines.\n@decorate(\n    1)\ndef f():\n    text = """\n'
        'def not_one():\n"""\n\n',
        "class A:\n    def method(self): ...\n",
        "x = 1; y = 2\n# no definition below\n\n",
        "async def g(): ...\n",
    ]
    assert [line for line, _ in split_source(MODULE)] == [1, 4, 13, 15, 18]


@pytest.mark.parametrize(
    "text",
    ["def f(:\n", "x = (\n", "\x00", "(" * 5000, "int x;\n#define y\n"],
)
def test_what_python_cannot_parse_is_one_document(text):
    assert split_source(text) == [(1, text)]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_without_statements_it_is_one_document(text):
    assert split_source(text) == [(1, text)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_ending_and_a_form_feed_inside_a_line(end):
    text = end.join(["a = '\x0c\u2028'", "def f():", "    pass", "", "class B: pass"])
    assert documents(text) == [
        f"a = '\x0c\u2028'{end}",
        f"def f():{end}    pass{end}{end}",
        "class B: pass",
    ]


def test_a_comment_behind_a_statement_is_not_taken_from_it():
    assert documents('s = """\n# text\n"""\ndef f(): ...\n') == [
        's = """\n# text\n"""\n',
        "def f(): ...\n",
    ]


def test_modules_of_the_standard_library():
    split = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        text = path.read_text("utf-8")
        found = documents(text)
        assert "".join(found) == text, path
        assert all(document.strip() for document in found), path
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        wanted = sum(isinstance(node, definitions) for node in ast.parse(text).body)
        have = [
            [type(node) for node in ast.parse(document).body if isinstance(node, definitions)]
            for document in found
        ]
        assert sum(map(len, have)) == wanted, path
        assert max(map(len, have), default=0) <= 1, path
        split += len(found)
    assert split > 300
