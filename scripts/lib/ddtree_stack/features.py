"""README's table of what works with trees, what falls back and what is refused.

What works is what tests say they show: `pytest.mark.feature("NAME", ...)` on a test of tests/tree,
or on one of its parameters; with `falls_back="WHY"` the request keeps to the spine of its tree.
`keys="TABLE"` adds the keys of a dictionary of the file, which the test runs through.
What is refused is what vllm/config/ddtree.py refuses, and a test of the patches must say so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .errors import CHECK_FAILED, StackError
from .gpu import added_files
from .paths import Stack

_CONFIG = "vllm/config/ddtree.py"
_CONFIG_TESTS = "tests/v1/spec_decode/ddtree/test_config.py"
_BEGIN = "<!-- written by scripts/refresh.sh from the tests -->\n"
_END = "<!-- end -->\n"
_SHORTEST = 6  # letters of a test's string that names a refusal


def in_readme(stack: Stack) -> str | None:
    """README with a fresh table; None where README has no place for one."""
    text = stack.readme.read_text() if stack.readme.is_file() else ""
    if _BEGIN not in text:
        return None
    head, rest = text.split(_BEGIN)
    return head + _BEGIN + table(stack) + _END + rest.split(_END)[1]


def table(stack: Stack) -> str:
    """The table in Markdown.

    Raises:
        StackError: if something is refused and no test of the patches names it.

    """
    works, falls_back = [], []
    for file in sorted((stack.root / "tests" / "tree").glob("test_*.py")):
        for names, why in marks(file.read_text()):
            if why is None:
                works += names
            else:
                falls_back += [(name, why) for name in names]
    files = added_files(stack, (_CONFIG, _CONFIG_TESTS))
    refused = list(refusals(files[_CONFIG]))
    named = {
        node.value
        for node in ast.walk(ast.parse(files[_CONFIG_TESTS]))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {name for name in named if len(name) >= _SHORTEST}
    untested = [what for what, _, _ in refused if not any(n in what or what in n for n in named)]
    if untested:
        raise StackError(
            CHECK_FAILED, "refusals that no test of the patches names", untested, _CONFIG_TESTS
        )
    lines = ["| | with trees |", "| --- | --- |"]
    lines.append(f"| {'; '.join(sorted(set(works), key=str.lower))} | work |")
    lines += [f"| {name} | the spine of its tree: {why} |" for name, why in falls_back]
    lines += [f"| {what} | refused: {why}; use {use} |" for what, why, use in refused]
    return "\n".join(lines) + "\n"


def marks(source: str) -> Iterator[tuple[list[str], str | None]]:
    """Names of each `pytest.mark.feature(...)`, and why the request falls back if it does."""
    tree = ast.parse(source)
    tables = {
        ast.unparse(node.targets[0]): [ast.literal_eval(key) for key in node.value.keys if key]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.feature":
            options = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
            names = [ast.literal_eval(name) for name in node.args]
            names += tables[options["keys"]] if "keys" in options else []
            yield names, options.get("falls_back")


def refusals(source: str) -> Iterator[tuple[str, str, str]]:
    """Option, reason and what to use instead, of every refusal in the order of the source.

    They are the arguments of `_refused(...)`, and the last three of each tuple in `refusals`.
    """
    tree = ast.parse(source)
    known = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        if isinstance(node, ast.BinOp):
            return text(node.left) + text(node.right)
        if isinstance(node, ast.Name) and isinstance(known.get(node.id), ast.Constant):
            return text(known[node.id])
        return str(node.value) if isinstance(node, ast.Constant) else "..."

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_refused":
            told = [text(arg) for arg in node.args]
            if told[0] != "...":
                yield told[0], told[1], told[2]
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "refusals":
            assert isinstance(node.value, ast.List)
            for row in node.value.elts:
                assert isinstance(row, ast.Tuple)
                yield text(row.elts[1]), text(row.elts[2]), text(row.elts[3])
