"""All pages of a site, written beside the place where they will stand, and put there when all of them are."""

import re
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedmjp.benchmarks.folder.study import TRIALS
from fedmjp.benchmarks.leaderboard.headline import pictures
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.advice import USUAL_RATIO
from fedmjp.benchmarks.report.page import anchor
from fedmjp.benchmarks.report.site import results
from fedmjp.benchmarks.report.site.catalogue import Method, list_methods
from fedmjp.benchmarks.report.site.files import copy_picture, copy_text
from fedmjp.benchmarks.report.site.folders import MARK, find_studies, resolve_address
from fedmjp.benchmarks.report.site.place import list_files, remove_site, require_replaceable
from fedmjp.benchmarks.report.site.readme import README
from fedmjp.benchmarks.report.site.studies import StudyPage, read_and_publish
from fedmjp.errors import FedmjpError, OutputError
from fedmjp.metrics import EXACT

# What a damaged or foreign folder makes of the functions that read it.
UNREADABLE = (FedmjpError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException)


def write_site(
    roots: Sequence[Path], site: Path, *, pictures: bool, database: str, tell: Callable[[str], object]
) -> int:
    """Write the site of every study in these folders; a former one is replaced when the new one is whole.

    Args:
        roots: Studies, and folders of studies.
        site: Where it goes: a new or empty folder, or one that this function wrote.
        pictures: Whether pages show the pictures that runs kept.
        database: URL of the database with the trials of folders that hold none themselves.
        tell: Gets a line for every study.

    Returns:
        How many studies could not be read, and are not on it.

    Raises:
        OutputError: If there is no study, none can be read, or the place is not ours to write.
    """
    site = site.resolve()
    require_replaceable(site)
    folders = find_studies(roots, database)
    partial = site.with_name(f".{site.name}.partial")
    remove_site(partial)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        (partial / MARK).touch()
        studies = _read(folders, partial / "studies", pictures=pictures, database=database, tell=tell)
        if not studies:
            raise OutputError(f"none of {len(folders)} studies can be read; {site} is as it was")
        _write_pages(sorted(studies, key=lambda study: -study.pictures), partial)
        list_files(partial)
        _replace(site, partial)
    finally:
        remove_site(partial)
    return len(folders) - len(studies)


def _read(
    folders: Mapping[str, Path], target: Path, *, pictures: bool, database: str, tell: Callable[[str], object]
) -> list[StudyPage]:
    studies = []
    for place, (slug, folder) in enumerate(folders.items(), start=1):
        begun = time.monotonic()
        (target / slug).mkdir(parents=True)
        try:
            study = read_and_publish(slug, folder, target / slug, pictures=pictures, database=database)
        except UNREADABLE as error:
            shutil.rmtree(target / slug)  # made above
            reason = str(error) if isinstance(error, FedmjpError) else f"damaged ({type(error).__name__}: {error})"
            tell(f"[{place}/{len(folders)}] {folder} is left out: {' '.join(reason.split())}")
            continue
        studies.append(study)
        size = f"{len(study.board.entries)} cells" if study.board else f"{study.rows} rows"
        tell(f"[{place}/{len(folders)}] {slug}: {size}, {time.monotonic() - begun:.0f} s")
    return studies


def _write_pages(studies: Sequence[StudyPage], partial: Path) -> None:
    catalogue = list_methods(studies)
    pages = _Pages(studies, catalogue)
    pages.write(partial / "index.html", "landing.html.jinja", methods=catalogue)
    for study in studies:
        folder = partial / "studies" / study.slug
        values = {"report": _render_report(study, folder, pages), "raw": (folder / TRIALS).exists()}
        pages.write(folder / "index.html", "study.html.jinja", study=study, **values)
    for method in catalogue:
        path = partial / method.address
        path.parent.mkdir(exist_ok=True)
        pages.write(path, "method.html.jinja", method=method)


class _Pages:
    """The templates of a site, with the values that every page reads."""

    def __init__(self, studies: Sequence[StudyPage], catalogue: Sequence[Method]) -> None:
        self.by_folder = {study.folder: f"../{study.slug}/index.html" for study in studies}
        self.addresses = {method.name: f"../../{method.address}" for method in catalogue}
        style, script = (
            files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("site.css", "search.js")
        )
        environment = Environment(
            loader=PackageLoader(str(__package__), "."),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.globals.update(
            studies=studies,
            results=results,
            anchor=anchor,
            numbers=numbers,
            pictures=pictures,
            style=Markup(style),  # noqa: S704 (ours)
            script=Markup(script),  # noqa: S704
            policy=_write_policy(style, script),
            index=_list_search_entries(studies, catalogue),
            addresses={(method.kind, method.name): method.address for method in catalogue},
            exact=EXACT,
            usual=USUAL_RATIO,
            version=version("fedmjp"),
            today=datetime.now(UTC).date().isoformat(),
        )
        self._environment = environment

    def write(self, path: Path, template: str, **values: Any) -> None:
        """Render a page into a file.

        Args:
            path: The file.
            template: File name of the template.
            values: Variables of the template beside those of every page.
        """
        depth = {"landing.html.jinja": 0, "method.html.jinja": 1, "study.html.jinja": 2}[template]
        content = self._environment.get_template(template).render(root="../" * depth, **values)
        path.write_text(content, encoding="utf-8")


def _write_policy(style: str, script: str) -> str:
    """Write the content security policy: pages load only their own style, script and pictures, from files too."""
    allowed = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (style, script)]
    return (
        f"default-src 'none'; style-src {allowed[0]}; script-src {allowed[1]}; img-src 'self' file: data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _list_search_entries(studies: Sequence[StudyPage], catalogue: Sequence[Method]) -> list[dict[str, str]]:
    """List the entries of the search: kind, name, address, line below the name, and further words."""
    of_studies = [
        {
            "kind": "study",
            "name": study.title,
            "address": f"studies/{study.slug}/index.html",
            "line": study.question,
            "words": " ".join([study.slug, *_list_words(study)]),
        }
        for study in studies
    ]
    return of_studies + [
        {
            "kind": method.kind,
            "name": method.name,
            "address": method.address,
            "line": method.summary,
            "words": " ".join([method.facts["Source"], *(option.name for option in method.options)]),
        }
        for method in catalogue
    ]


def _list_words(study: StudyPage) -> list[str]:
    """List the models, defences and attacks of a study, each once."""
    entries = study.board.entries if study.board else ()
    return list(dict.fromkeys(word for entry in entries for word in (entry.model, entry.defence, entry.attack)))


def _render_report(study: StudyPage, folder: Path, pages: _Pages) -> Markup:
    """Render a study's README: copy its pictures and texts beside the page, and link other studies."""
    source = study.folder.resolve()

    def link(address: str) -> str | None:
        if re.match(r"https?://", address):
            return address
        path = resolve_address(source, address)
        if path is None:
            return None
        subject = path.parent if path.name == README else path
        return pages.by_folder.get(subject) or copy_text(path, source, folder)

    def image(address: str) -> str | None:
        path = resolve_address(source, address)
        return copy_picture(path, source, folder) if path else None

    return study.readme.render_html(link, image, pages.addresses)


def _replace(site: Path, partial: Path) -> None:
    """Put a whole site where the former one is, which stands until then."""
    former = site.with_name(f".{site.name}.former")
    remove_site(former)
    require_replaceable(site)  # once more: to read the studies took long
    if site.exists():
        site.rename(former)
    partial.rename(site)
    remove_site(former)
