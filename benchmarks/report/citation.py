"""Who made a board, when and with what, and how it is cited."""

from dataclasses import dataclass
from importlib.metadata import metadata

from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.benchmarks.report.details import list_environments

AUTHORS = "The fedmjp maintainers"
NAME = "fedmjp: a federated-learning privacy benchmark"

SHORT = 10  # digits of a commit


@dataclass(frozen=True)
class Citation:
    """What a reader needs to cite a board; ``version`` and ``commit`` are those that trials were run with."""

    title: str
    version: str
    commit: str
    date: str
    licence: str

    @property
    def sentence(self) -> str:
        """Write the entry of a list of references."""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{AUTHORS} ({self.date[:4]}). {self.title}. fedmjp {self.version}{commit}, measured {self.date}."

    @property
    def bibtex(self) -> str:
        """Write the project's entry for BibTeX."""
        fields = {"title": NAME, "author": f"{{{AUTHORS}}}", "year": self.date[:4], "version": self.version}
        lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value)
        return f"@software{{fedmjp,\n{lines}\n}}"


def read_citation(board: Board) -> Citation:
    """Read who made a board, when and with what, from what was recorded with the trials.

    Args:
        board: The board.

    Returns:
        The installed version where none is recorded.
    """
    environments = list_environments(board)
    versions = (environment.get("versions") for environment in environments)
    revisions = (environment.get("revision") for environment in environments)
    releases = [packages.get("fedmjp") for packages in versions if isinstance(packages, dict)]
    commits = [revision.get("commit") for revision in revisions if isinstance(revision, dict)]
    ended = [entry.provenance.last for entry in board.entries if entry.provenance.last]
    installed = metadata("fedmjp")
    return Citation(
        title=board.title,
        version=", ".join(sorted({str(release) for release in releases if release})) or installed["Version"],
        commit=", ".join(sorted({str(commit)[:SHORT] for commit in commits if commit})),
        date=max(ended, default=str(board.about.get("rendered_at", "")))[:10],
        licence=installed["License-Expression"],
    )
