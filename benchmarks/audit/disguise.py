"""The probe's modules under names that are drawn for each run: no app can look for them by name.

Docstrings and comments are left out too. An app that looks further can still tell that it is watched: by the hooks on
torch and Flower, by the time that they take, by the processes and files of the audit.
"""

import ast
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from fedmjp.benchmarks.audit.probe import settings

PROBE = "fedmjp.benchmarks.audit.probe"
INIT = "__init__"


def draw_name() -> str:
    """Draw a name that any module, file or app may have."""
    return f"m{secrets.token_hex(6)}"


@dataclass(frozen=True)
class DrawnNames:
    """The names of one run: of the probe's package, of its modules and files of settings, by the ones in the source."""

    package: str = field(default_factory=draw_name)
    entries: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        """Return the drawn name of a module or file."""
        suffix = Path(name).suffix
        return self.entries.setdefault(name, f"{draw_name()}{suffix}")

    def component(self, module: str, attribute: str) -> str:
        """Name an object of the probe as Flower does.

        Args:
            module: Of the probe, as its source names it.
            attribute: Of the module.
        """
        return f"{self.package}.{self[module]}:{attribute}"


def copy_probe(target: Path, names: DrawnNames) -> None:
    """Write the probe's modules into a folder under drawn names.

    Args:
        target: Folder of the package, which is made here.
        names: Of this run.
    """
    target.mkdir(parents=True)
    with resources.as_file(resources.files(PROBE)) as source:
        for path in sorted(source.glob("*.py")):
            tree = ast.fix_missing_locations(_Renamed(names).visit(ast.parse(path.read_text(encoding="utf-8"))))
            stem = INIT if path.stem == INIT else names[path.stem]
            (target / f"{stem}.py").write_text(ast.unparse(tree) + "\n", encoding="utf-8")


class _Renamed(ast.NodeTransformer):
    """A pass over a module that leaves out docstrings and renames what the probe imports of itself.

    Args:
        names: Of this run.
    """

    def __init__(self, names: Mapping[str, str] | DrawnNames) -> None:
        self._names = names

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._without_docstring(node)

    def _without_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level and node.module:
            node.module = self._names[node.module]
        elif node.level:
            node.names = [ast.alias(self._names[alias.name], alias.asname or alias.name) for alias in node.names]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value in (settings.SERVER, settings.CLIENT):
            return ast.Constant(self._names[str(node.value)])
        return node
