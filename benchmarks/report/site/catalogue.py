"""Attacks and defences in the words of their registries, with the studies that tried them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.listing import listed
from fedmjp.benchmarks.report.legend import VERDICTS
from fedmjp.benchmarks.report.site.folders import unique_name
from fedmjp.benchmarks.report.site.results import StrongestAttacks, find_strongest_by_defence
from fedmjp.benchmarks.report.site.studies import StudyPage
from fedmjp.config import Config
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import FULL_BITS, Defence, Scope, Stage

Kind = Literal["attack", "defence"]
STAGES: dict[Stage, str] = {
    "pictures": "the pictures, before the network sees them",
    "model": "the network that the client trains",
    "examples": "the gradient of each picture",
    "update": "the update, before it leaves the client",
    "aggregate": "the sum over clients, before the server sees it",
}
SCOPES: dict[Scope, str] = {
    "tensor": "one tensor at a time",
    "update": "the whole update",
    "example": "the gradient of each picture",
}
SEVERAL = 10  # uploads, to show how a privacy budget adds up


@dataclass(frozen=True)
class Option:
    """An option of an attack or a defence: its name, its default as text, and its meaning."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class MethodResults:
    """The cells of one study that concern an attack or a defence."""

    study: StudyPage
    entries: Sequence[BoardEntry]

    @property
    def measured(self) -> list[BoardEntry]:
        """List the cells with a score, in the order of the board."""
        return [entry for entry in self.entries if entry.exact]

    @property
    def refused(self) -> int:
        """Count the cells that were refused."""
        return sum(entry.verdict == "refused" for entry in self.entries)

    @property
    def answer(self) -> StrongestAttacks:
        """Find the strongest attacks among the cells, with and without a defence."""
        return StrongestAttacks.select(self.entries)

    @property
    def strongest(self) -> list[BoardEntry]:
        """Find the strongest attack on each model and defence."""
        return find_strongest_by_defence(self.entries)


@dataclass(frozen=True)
class Method:
    """An attack or a defence with the studies that ran it. ``address`` leads to its page."""

    kind: Kind
    name: str
    address: str
    summary: str
    facts: Mapping[str, str]
    options: Sequence[Option]
    command: str
    runs: Sequence[MethodResults]

    @property
    def cells(self) -> int:
        """Count the cells that were measured with it."""
        return sum(len(run.measured) for run in self.runs)


def list_methods(studies: Sequence[StudyPage]) -> list[Method]:
    """Describe every installed attack and defence, attacks first.

    Args:
        studies: The studies of the site, whose cells are listed with each method.
    """
    return [
        *(_describe_attack(name, file, studies) for name, file in _name_files(ATTACKS).items()),
        *(_describe_defence(name, file, studies) for name, file in _name_files(DEFENCES).items()),
    ]


def _name_files(names: Iterable[str]) -> dict[str, str]:
    """Name a page for each method, every name once."""
    files: dict[str, str] = {}
    for name in names:
        files[name] = f"{unique_name(name, (file.removesuffix('.html') for file in files.values()))}.html"
    return files


def _describe_attack(name: str, file: str, studies: Sequence[StudyPage]) -> Method:
    attack = ATTACKS.get(name)
    return Method(
        kind="attack",
        name=name,
        address=f"attacks/{file}",
        summary=attack.summary,
        facts={
            "Source": attack.paper,
            "Needs": attack.requires,
            "Uses": attack.exploits,
            "Way": "iterates" if attack.optimises else "solves equations",
            "Role": "an attack, ranked by what it recovers" if attack.role == "attack" else VERDICTS[attack.role],
            "Models": "those of this benchmark" if attack.needs_network else "those of this benchmark, and your own",
        },
        options=_list_options(attack.options_type),
        command=f"fedmjp attack --attack {name}",
        runs=_select_results(studies, lambda entry: entry.attack.split(" ")[0] == name),
    )


def _describe_defence(name: str, file: str, studies: Sequence[StudyPage]) -> Method:
    defence: type[Defence] = DEFENCES.get(name)
    default = defence()
    bits = default.bits(FULL_BITS)
    return Method(
        kind="defence",
        name=name,
        address=f"defences/{file}",
        summary=defence.summary,
        facts={
            "Source": defence.paper,
            "Stage": f"changes {listed([STAGES[stage] for stage in defence.stages])}",
            "Scope": f"works on {SCOPES[defence.scope]}",
            "The server is told": defence.told,
            "Uploads are then": listed(sorted(defence.marks)) or "as before",
            "Accounting": _describe_accounting(default),
            "Size of an upload": f"{bits:.3g} bits per value, of {FULL_BITS:g}" if bits < FULL_BITS else "as before",
        },
        options=_list_options(defence.options_type),
        command=f"fedmjp attack --attack ATTACK --defence {name}",
        runs=_select_results(studies, lambda entry: any(config.name == name for config in entry.defences)),
    )


def _describe_accounting(defence: Defence) -> str:
    """Describe the privacy budget that a defence spends with its default options."""
    single, several = defence.spent(1), defence.spent(SEVERAL)
    if not single or not several:
        return "no guarantee of differential privacy"
    return (
        f"differential privacy of a {single.unit} ({single.relation}): with the default options one upload costs "
        f"epsilon {single.epsilon:.3g}, {SEVERAL} uploads cost {several.epsilon:.3g}, at delta {single.delta:g}"
    )


def _list_options(options_type: type[Config]) -> list[Option]:
    options = [
        Option(
            name, "must be given" if field.is_required() else _format_default(field.default), field.description or ""
        )
        for name, field in options_type.model_fields.items()
    ]
    if options_type.model_config.get("extra") == "allow":
        options.append(Option("any other", "", "overrides the configuration that the attack wraps"))
    return options


def _format_default(default: object) -> str:
    """Write a default as the command line takes it."""
    if isinstance(default, list | tuple | frozenset):
        return "+".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


def _select_results(studies: Sequence[StudyPage], concerns: Callable[[BoardEntry], bool]) -> list[MethodResults]:
    """Select the studies that hold a cell of the method, with these cells."""
    runs = [
        MethodResults(study, [entry for entry in study.board.entries if concerns(entry)])
        for study in studies
        if study.board
    ]
    return [run for run in runs if run.entries]
