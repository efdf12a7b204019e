"""Tables in place of data sets, CSV files and frames that are not on this machine.

Their columns are those of a well-known table, or those that the app's own code names: in lists and constants whose
names speak of columns, in subscripts of frames, and where it drops one of them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Of tables by a part of their name: columns of numbers, of words, and the label.
KNOWN = {
    "adult": (
        ("age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week"),
        ("workclass", "education", "marital.status", "occupation", "relationship", "race", "sex", "native.country"),
        "income",
    ),
    "titanic-survival": (
        ("Pclass", "Age", "Siblings/Spouses Aboard", "Parents/Children Aboard", "Fare"), ("Name", "Sex"), "Survived",
    ),
    "titanic": (
        ("PassengerId", "Pclass", "Age", "SibSp", "Parch", "Fare"), ("Name", "Sex", "Ticket", "Cabin", "Embarked"),
        "Survived",
    ),
    "diabetes": (
        (
            "Pregnancies", "Glucose", "BloodPressure", "SkinThickness", "Insulin", "BMI", "DiabetesPedigreeFunction",
            "Age",
        ),
        (), "Outcome",
    ),
    "iris": (("SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm"), (), "Species"),
}  # fmt: skip
CLASSES = {"iris": 3}  # of well-known tables with more than two
WORDS = ("Alder", "Birch", "Cedar", "Elm")
LISTS = re.compile(r"col|feature|attr|field|numer|categor|continu|header|(^|_)names$", re.IGNORECASE)
CONSTANTS = re.compile(r"col|label|target|partition_by", re.IGNORECASE)
NUMBERS_OF_CLASSES = re.compile(r"^(num|n|number_of)_?(classes|labels)$", re.IGNORECASE)
LISTS_OF_CLASSES = re.compile(r"(^|_)(labels|classes|class_names)$", re.IGNORECASE)
VALUES = re.compile(r"value|classes", re.IGNORECASE)
OF_WORDS = re.compile(r"categor|nominal|object|string", re.IGNORECASE)
OF_LABELS = re.compile(
    r"^(y|class|label|target|outcome|income|species|survived|diagnosis)s?$|fraud|churn", re.IGNORECASE
)
OF_SITES = re.compile(r"partition|client|bank|site|hospital", re.IGNORECASE)
FRAMES = re.compile(
    r"(^|[._])(df|data|dataset|ds|frame|x|y|row|sample|train|test|batch|examples?)[\w.]*$", re.IGNORECASE
)


@dataclass
class Columns:
    """Columns of a table by what they hold."""

    numbers: list[str] = field(default_factory=list)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by column, the words that occur
    labels: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)  # that say whose a row is
    classes: int = 2  # of each label

    def draw(self, count: int, clients: int, seed: int) -> dict[str, list[Any]]:
        """Draw rows.

        Args:
            count: Number of rows.
            clients: Number of clients, whose numbers columns of sites hold.
            seed: Of the draw.

        Returns:
            A list of values by column.
        """
        generator = np.random.default_rng(seed)
        rows: dict[str, list[Any]] = {name: generator.integers(0, 100, count).tolist() for name in self.numbers}
        rows |= {name: generator.choice(words, count).tolist() for name, words in self.words.items()}
        rows |= {name: (np.arange(count) % clients).tolist() for name in self.sites}
        shares = np.array([0.65, 0.35]) if self.classes == 2 else 1 / (1 + np.arange(self.classes))
        bounds = shares[:0:-1].cumsum() / shares.sum()  # the first class is the most frequent
        return rows | {name: (generator.random(count)[:, None] < bounds).sum(1).tolist() for name in self.labels}


def find_known(name: str) -> Columns | None:
    """Find a well-known table.

    Args:
        name: Of the data set, or of a file.
    """
    for part, (numbers, words, label) in KNOWN.items():
        if part in name.lower():
            return Columns(list(numbers), dict.fromkeys(words, WORDS), [label], classes=CLASSES.get(part, 2))
    return None


def read_columns(code: Path) -> Columns:
    """Read the columns that an app's code names; empty if it names none.

    Args:
        code: Folder of the app's code.
    """
    numbers: dict[str, None] = {}
    words: dict[str, tuple[str, ...]] = {}
    lists: dict[str, tuple[str, ...]] = {}
    dropped: set[str] = set()
    for path in sorted(code.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for name, texts in _named_texts(tree):
            if VALUES.search(name):
                lists[name.lower()] = texts
            elif len(texts) == 1 and not LISTS.search(name):
                numbers |= dict.fromkeys(texts if CONSTANTS.search(name) else ())
            elif LISTS.search(name):
                numbers |= dict.fromkeys(texts)
                words |= dict.fromkeys(texts, WORDS) if OF_WORDS.search(name) else {}
        for node in ast.walk(tree):
            names, drops = _columns_of(node)
            numbers |= dict.fromkeys(names)
            dropped |= set(names) if drops else set()
    labels = [name for name in numbers if OF_LABELS.search(name)] or [name for name in numbers if name in dropped]
    sites = [name for name in numbers if OF_SITES.search(name) and re.search(r"id$", name, re.IGNORECASE)]
    words |= {name: texts for name in numbers for key, texts in lists.items() if name.lower() in key.split("_")}
    special = {*labels, *sites}
    return Columns(
        [name for name in numbers if name not in special and name not in words],
        {name: texts for name, texts in words.items() if name not in special},
        labels,
        sites,
        read_classes(code) or 2,
    )


def read_classes(code: Path) -> int | None:
    """Read how many classes an app's code names, by a number or a list; None if it names neither, or several.

    Args:
        code: Folder of the app's code.
    """
    counts: set[int] = set()
    for path in sorted(code.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for name, value in _named_values(tree):
            if isinstance(value, ast.Constant) and isinstance(value.value, int) and NUMBERS_OF_CLASSES.search(name):
                counts.add(value.value)
            elif isinstance(value, ast.List | ast.Tuple) and LISTS_OF_CLASSES.search(name):
                counts.add(len(value.elts) if all(isinstance(entry, ast.Constant) for entry in value.elts) else 0)
    counts -= {0, 1}
    return counts.pop() if len(counts) == 1 else None


def _named_texts(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield texts, or lists of texts, that are assigned to a name or given by a keyword."""
    yield from ((name, texts) for name, value in _named_values(tree) if (texts := _texts(value)))


def _named_values(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what is assigned to a name or given by a keyword."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _columns_of(node: ast.AST) -> tuple[tuple[str, ...], bool]:
    """Return the columns of a frame that a node takes out, and whether it drops them."""
    if isinstance(node, ast.Subscript) and FRAMES.search(ast.unparse(node.value)):
        return _texts(node.slice), False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("drop", "pop"):
        columns = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "columns")]
        if FRAMES.search(ast.unparse(node.func.value)):
            return tuple(text for value in columns for text in _texts(value)), True
    return (), False


def _texts(node: ast.expr) -> tuple[str, ...]:
    """Return the texts of a constant, or of a list of constants; empty if it holds anything else."""
    values = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]
    texts = [value.value for value in values if isinstance(value, ast.Constant)]
    plain = [text for text in texts if isinstance(text, str)]
    return tuple(plain) if len(plain) == len(values) else ()


def frame_columns(path: str, keywords: Mapping[str, Any], code: Path) -> Columns:
    """Choose the columns of a file of a table: those that the call names, a known table's, or the code's.

    Args:
        path: Of the file.
        keywords: Of the call that reads it.
        code: Folder of the app's code.
    """
    read = find_known(path) or read_columns(code)
    stated = [name for key in ("names", "usecols") for name in keywords.get(key) or () if isinstance(name, str)]
    if not stated:
        return read
    columns = {*read.words, *read.labels, *read.sites}
    labels = [name for name in stated if OF_LABELS.search(name) or name in read.labels] or stated[-1:]
    return Columns(
        [name for name in stated if name not in {*columns, *labels}],
        {name: words for name, words in read.words.items() if name in stated},
        labels,
        [name for name in read.sites if name in stated],
        read.classes,
    )
