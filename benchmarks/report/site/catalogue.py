"""Attacks and defences in the words of their registries, with the studies that tried them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.listing import listed
from fedmjp.benchmarks.report.legend import VERDICTS
from fedmjp.benchmarks.report.site.folders import unique
from fedmjp.benchmarks.report.site.results import Answer, by_defence
from fedmjp.benchmarks.report.site.studies import Study
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
    """One option: its name, its default as text, and what it means."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Run:
    """What one study has of an attack or a defence."""

    study: Study
    entries: Sequence[BoardEntry]

    @property
    def measured(self) -> list[BoardEntry]:
        """Cells with a score, in the order of the board."""
        return [entry for entry in self.entries if entry.exact]

    @property
    def refused(self) -> int:
        """How many cells were refused."""
        return sum(entry.verdict == "refused" for entry in self.entries)

    @property
    def answer(self) -> Answer:
        """The strongest results."""
        return Answer.of(self.entries)

    @property
    def strongest(self) -> list[BoardEntry]:
        """The strongest attack on each pipeline."""
        return by_defence(self.entries)


@dataclass(frozen=True)
class Method:
    """An attack or a defence: what it is, and where it was tried. ``address`` is that of its page."""

    kind: Kind
    name: str
    address: str
    summary: str
    facts: Mapping[str, str]
    options: Sequence[Option]
    command: str
    runs: Sequence[Run]

    @property
    def cells(self) -> int:
        """How many cells were measured with it."""
        return sum(len(run.measured) for run in self.runs)


def methods(studies: Sequence[Study]) -> list[Method]:
    """Every attack and every defence that is installed, attacks first."""
    return [
        *(_attack(name, file, studies) for name, file in _files(ATTACKS).items()),
        *(_defence(name, file, studies) for name, file in _files(DEFENCES).items()),
    ]


def _files(names: Iterable[str]) -> dict[str, str]:
    """What their pages are called."""
    files: dict[str, str] = {}
    for name in names:
        files[name] = f"{unique(name, (file.removesuffix('.html') for file in files.values()))}.html"
    return files


def _attack(name: str, file: str, studies: Sequence[Study]) -> Method:
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
        options=_options(attack.options_type),
        command=f"fedmjp attack --attack {name}",
        runs=_runs(studies, lambda entry: entry.attack.split(" ")[0] == name),
    )


def _defence(name: str, file: str, studies: Sequence[Study]) -> Method:
    defence: type[Defence] = DEFENCES.get(name)
    made = defence()
    bits = made.bits(FULL_BITS)
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
            "Accounting": _accounting(made),
            "Size of an upload": f"{bits:.3g} bits per value, of {FULL_BITS:g}" if bits < FULL_BITS else "as before",
        },
        options=_options(defence.options_type),
        command=f"fedmjp attack --attack ATTACK --defence {name}",
        runs=_runs(studies, lambda entry: any(config.name == name for config in entry.defences)),
    )


def _accounting(defence: Defence) -> str:
    """What its guarantee costs with the default options."""
    one, several = defence.spent(1), defence.spent(SEVERAL)
    if not one or not several:
        return "no guarantee of differential privacy"
    return (
        f"differential privacy of a {one.unit} ({one.relation}): with the default options one upload costs "
        f"epsilon {one.epsilon:.3g}, {SEVERAL} uploads cost {several.epsilon:.3g}, at delta {one.delta:g}"
    )


def _options(options_type: type[Config]) -> list[Option]:
    options = [
        Option(name, "must be given" if field.is_required() else _shown(field.default), field.description or "")
        for name, field in options_type.model_fields.items()
    ]
    if options_type.model_config.get("extra") == "allow":
        options.append(Option("any other", "", "overrides the configuration that the attack wraps"))
    return options


def _shown(default: object) -> str:
    """As the command line takes it."""
    if isinstance(default, list | tuple | frozenset):
        return "+".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


def _runs(studies: Sequence[Study], concerns: Callable[[BoardEntry], bool]) -> list[Run]:
    """Studies with a cell that is concerned."""
    runs = [Run(study, [entry for entry in study.board.entries if concerns(entry)]) for study in studies if study.board]
    return [run for run in runs if run.entries]
