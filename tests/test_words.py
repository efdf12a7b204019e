"""How the product is written: docstrings that say what to do, names that hold something, one class of a name."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.conftest import ROOT

EMPTY = re.compile(
    "found|each|own|told|given|what|left|made|said|known|seen|shown|held|kept|asked|others?|ones?|wanted|taken|there|here|"
    "done|before|after|again|how|ours|theirs|rest|tried|chosen|named|alike|together|apart"
)
FUNCTION_WORDS = re.compile(
    "the|an?|what|whether|where|which|who|whose|how|why|when|of|by|for|from|with|without|in|on|at|to|as|if|its?|that|this|"
    "these|those|so|such|both|all|any|each|every|no|none|one"
)
ARGS = re.compile(r"^\s*Args:\s*$", re.MULTILINE)
FOLDERS = ("fedmjp", "attacks", "clients", "server", "benchmarks")
OUTSIDE = ("performance",)  # folders that no wheel holds
Function = ast.FunctionDef | ast.AsyncFunctionDef
MOST_EMPTY, MOST_FUNCTION_WORDS, LEAST_WITH_ARGS = 0.02, 0.05, 0.6


@cache
def trees() -> dict[Path, ast.Module]:
    """The product's modules by file; folders that are linked into the package are read where they lie."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    inside = {path: path.relative_to(ROOT).parts for path in files}
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path, parts in inside.items()
        if set(OUTSIDE).isdisjoint(parts) and parts[:2] not in [("fedmjp", folder) for folder in FOLDERS]
    }


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> list[str]:
    groups = (function.args.posonlyargs, function.args.args, function.args.kwonlyargs)
    return [argument.arg for group in groups for argument in group if argument.arg not in ("self", "cls")]


def local_names(function: Function) -> set[str]:
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | set(parameters(function))


def places(hits: list[tuple[Path, Function]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}" for path, function in hits)


def share_at_most(hits: list[tuple[Path, Function]], count: int, limit: float) -> bool:
    return len(hits) <= limit * count


def test_names_hold_something() -> None:
    everything = [(path, function) for path, tree in trees().items() for function in functions(tree)]
    hits = [(path, function) for path, function in everything if any(map(EMPTY.fullmatch, local_names(function)))]
    assert share_at_most(hits, len(everything), MOST_EMPTY), places(hits)


def test_docstrings_say_what_to_do() -> None:
    documented = [
        (path, function, ast.get_docstring(function) or "")
        for path, tree in trees().items()
        for function in functions(tree)
        if ast.get_docstring(function)
    ]
    hits = [
        (path, function)
        for path, function, text in documented
        if FUNCTION_WORDS.fullmatch(re.sub(r"[^a-z]", "", text.split(maxsplit=1)[0].lower()))
    ]
    assert share_at_most(hits, len(documented), MOST_FUNCTION_WORDS), places(hits)


def test_public_functions_say_what_they_take() -> None:
    public, documented = [], 0
    for path, tree in trees().items():
        inner = {below for outer in functions(tree) for below in ast.walk(outer) if below is not outer}
        for function in functions(tree):
            if not function.name.startswith("_") and function not in inner and parameters(function):
                public.append((path, function))
                documented += bool(ARGS.search(ast.get_docstring(function) or ""))
    assert documented >= LEAST_WITH_ARGS * len(public), f"{documented} of {len(public)}"


def test_a_class_name_is_borne_once() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1 and not name.startswith("_")}


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph("fedmjp")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 400
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
