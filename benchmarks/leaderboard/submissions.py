"""Files of entries by third parties: cells with their figures, and what it takes to run their trials again."""

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, Literal

from pydantic import Field

from fedmjp.benchmarks.leaderboard.entries import BoardEntry, Submitter
from fedmjp.benchmarks.leaderboard.record import SCHEMA_VERSION, Record
from fedmjp.registry import Registry

LONGEST_NAME = 80  # characters
UNFIT = re.compile(r"[^\w \-.:+=,()]")  # letters and digits of any script are fit


class PlugIn(Record):
    """Another package's attack or defence at the version that an entry was computed with.

    ``sha256`` digests the sources of the package.
    """

    kind: Literal["attack", "defence"]
    name: str
    package: str
    version: str
    sha256: str

    @classmethod
    def of(cls, kind: Literal["attack", "defence"], name: str, registry: Registry[Any]) -> "PlugIn | None":
        """Describe the installed package of an attack or a defence, whose code is imported.

        Args:
            kind: Which of both.
            name: Its name.
            registry: Of that kind.

        Returns:
            None for ours, which the version of fedmjp says.

        Raises:
            UnknownNameError: If it is not installed.
            PluginError: If it cannot be loaded.
        """
        from fedmjp import provenance  # noqa: PLC0415 (it brings torch, which a board is shown without)

        module = registry.get(name).__module__
        top = module.partition(".")[0]
        if top == "fedmjp":
            return None
        package = next(iter(metadata.packages_distributions().get(top, [])), top)
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "unknown"
        sha256 = provenance.package_digest(module)
        return cls(kind=kind, name=name, package=package, version=version, sha256=sha256)


class EntryRecipe(Record):
    """What it takes to run an entry's trials again.

    ``config`` is the campaign as its plan states it, with names in place of paths; it holds seeds, sizes and threat
    models. ``pictures`` maps each picture to its digest. ``plug_ins`` are those of the cells.
    """

    config: dict[str, Any]
    pictures: dict[str, str]
    plug_ins: tuple[PlugIn, ...] = ()


class Submission(Record):
    """A file of entries by a third party: cells, and the floors and twins that they are held against.

    Without a ``recipe`` nobody can run them again.
    """

    schema_version: Literal[4] = SCHEMA_VERSION
    submitter: Submitter
    recipe: EntryRecipe | None = None
    entries: tuple[BoardEntry, ...] = Field(min_length=1)


def unfit_names(content: Any) -> Iterator[str]:
    """Yield the names in a submission that are too long, or hold characters that no name needs.

    Args:
        content: The submission, as parsed JSON of any form.
    """
    if not isinstance(content, Mapping):
        return
    submitter, entries = content.get("submitter"), content.get("entries")
    if isinstance(submitter, Mapping):
        yield from _unfit("submitter", submitter.get("name"))
    for number, entry in enumerate(entries if isinstance(entries, list) else [], start=1):
        if not isinstance(entry, Mapping):
            continue
        origin = entry.get("provenance")
        campaign = origin.get("campaign") if isinstance(origin, Mapping) else None
        for field, name in (("model", entry.get("model")), ("campaign", campaign)):
            yield from _unfit(f"entry {number}, {field}", name)
        for field in ("attack", "defence"):  # names with their options
            for part in re.split("[ ,]", entry[field]) if isinstance(entry.get(field), str) else ():
                yield from _unfit(f"entry {number}, {field}", part)


def _unfit(field: str, name: object) -> Iterator[str]:
    if not isinstance(name, str):
        return
    character = UNFIT.search(name)
    if character:
        allowed = "letters, digits, spaces and -_.:+=,()"
        yield f"{field}: the name {_excerpt(name)} holds {character[0]!a}; names are of {allowed}"
    if len(name) > LONGEST_NAME:
        yield f"{field}: the name {_excerpt(name)} has {len(name)} characters; {LONGEST_NAME} at most"


def _excerpt(name: str) -> str:
    return ascii(name[:LONGEST_NAME])
