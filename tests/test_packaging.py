"""What users install and what Flower ships."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from fedmjp import __version__, provenance
from fedmjp.benchmarks.federation.bundle import write_app
from fedmjp.config import RunConfig

ROOT = Path(__file__).parents[1]
# Flower loads the two apps of a simulation at once; the second comes while the first still imports the package.
TWO_THREADS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from flwr.supercore.object_ref import load_app, validate

def load(name):
    assert validate(f"fedmjp.{name}_app:app", project_dir=sys.argv[1]) == (True, None)
    return load_app(f"fedmjp.{name}_app:app", RuntimeError, sys.argv[1])

with ThreadPoolExecutor(2) as pool:
    server = pool.submit(load, "server")
    time.sleep(0.5)
    client = pool.submit(load, "client")
    print(type(server.result()).__name__, type(client.result()).__name__)
"""
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def test_flower_defaults_are_those_of_the_configuration() -> None:
    assert PYPROJECT["tool"]["flwr"]["app"]["config"] == RunConfig().flat()


def test_versions_agree() -> None:
    assert PYPROJECT["project"]["version"] == __version__


def test_the_packages_that_users_name_are_direct_dependencies() -> None:
    names = {re.split(r"[\[<>=]", dependency)[0] for dependency in PYPROJECT["project"]["dependencies"]}
    assert {"torch", "flwr", "timm", "breaching", "lpips", "scikit-image", "pandas", "matplotlib"} <= names


def test_readme_has_the_two_commands() -> None:
    assert "pip install -e . && fedmjp quickstart" in README
    assert "pip install -e '.[test]' && pytest" in README


def test_the_app_made_of_installed_packages_is_whole(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    parts = ("attacks", "clients", "server")
    theirs = {path.relative_to(app / "fedmjp") for path in (app / "fedmjp").rglob("*.py")}
    for part in parts:
        ours = {path.relative_to(ROOT) for path in (ROOT / part).rglob("*.py")}
        assert {path for path in theirs if path.parts[0] == part} == ours, part
    shared = {path.relative_to(ROOT / "fedmjp") for path in (ROOT / "fedmjp").rglob("*.py")}
    omitted = ("benchmarks", "cli", "__main__.py")
    assert {p for p in theirs if p.parts[0] not in parts} == {p for p in shared if p.parts[0] not in (*parts, *omitted)}
    assert {path.name for path in (app / "fedmjp" / "defences").iterdir()} >= {"mjp.py", "local_dp.py", "pipeline.py"}
    assert not list(app.rglob("*.md")), "a changed README would make another bundle, which sites refuse"
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config == RunConfig().flat()


def test_the_app_runs_without_the_command_line(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    named = [path for path in app.rglob("*.py") if re.search(r"fedmjp\.cli\b", path.read_text())]
    assert not named, "none of it names the command line"
    code = "import fedmjp, fedmjp.clients.app, fedmjp.server.app; print(fedmjp.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(app)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(app))


@pytest.mark.slow
def test_flowers_bundle_of_the_clone_holds_what_a_federation_needs_and_no_more(tmp_path: Path) -> None:
    flwr = Path(sys.executable).parent / "flwr"
    clone = tmp_path / "fedmjp"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone], check=True)
    subprocess.run([flwr, "build", "--app", clone], check=True, cwd=tmp_path, capture_output=True)
    (bundle,) = tmp_path.glob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == {"attacks", "clients", "fedmjp", "server"}
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(bundle).extractall(unpacked)
    code = "import fedmjp, fedmjp.clients.app, fedmjp.server.app; print(fedmjp.server.app.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(unpacked)}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(unpacked / "server" / "app.py")
    init = unpacked / "fedmjp" / "__init__.py"
    init.write_text(init.read_text().replace("import importlib\n", "import importlib\nimport time\ntime.sleep(2)\n", 1))
    subprocess.run([sys.executable, "-c", TWO_THREADS, str(unpacked)], check=True, cwd=tmp_path)
    assert "fedmjp/defences/pipeline.py" in names
    assert not any(name.startswith("fedmjp/cli/") for name in names)
    assert bundle.stat().st_size < 1_750_000, "Flower stores it without compression, and takes ten megabytes"


@pytest.mark.slow
def test_the_wheel_holds_all_packages_the_page_template_and_the_prior(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fedmjp"}, "one import root"
    benchmarks = "fedmjp/benchmarks"
    assert {f"{benchmarks}/report/page.{suffix}" for suffix in ("html.jinja", "css", "js")} <= set(names)
    assert {f"{benchmarks}/report/site/{name}" for name in ("base.html.jinja", "site.css", "search.js")} <= set(names)
    assert "fedmjp/py.typed" in names
    assert {f"{benchmarks}/leaderboard/reported/mjp_table5.json", f"{benchmarks}/campaigns/smoke.yaml"} <= set(names)
    defences = {f"fedmjp/defences/{path.name}" for path in (ROOT / "fedmjp" / "defences").glob("*.py")}
    assert len(defences) > 15
    assert defences <= set(names)
    assert {f"fedmjp/attacks/natural_patches.{suffix}" for suffix in ("safetensors", "json")} <= set(names)
    assert len(names) == len(set(names)), "a folder that is linked is packed once"
    measured = [name for name in names if "/performance/" in name or "/results/" in name]
    assert measured == [], "from a clone alone"


@pytest.mark.slow
def test_the_wheel_makes_the_trials_of_its_clone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from fedmjp import provenance; print(provenance.__file__, provenance.code_digest())"
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    printed = subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    place, digest = printed.split()
    assert Path(place) == tmp_path / "fedmjp" / "provenance.py"
    assert digest == provenance.code_digest()


def test_the_source_distribution_says_its_licence_and_how_to_cite_it(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CITATION.cff", "README.md", "CHANGELOG.md", "fedmjp/py.typed", "fedmjp/server/app.py"} <= names
