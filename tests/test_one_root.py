"""Everything is imported as a part of ``fedmjp``: a user's own packages may have the names of our folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedmjp.models.factories import load_module
from tests.apps import vit_app

NAMES = ("attacks", "benchmarks", "clients", "server", "results", "tests")
FEDMJP = [sys.executable, "-m", "fedmjp"]
CONSOLE = [str(Path(sys.executable).with_name("fedmjp"))]
SMALL = ("--model", "deit_micro", "--image-size", "32", "--patch-size", "8", "--limit", "1")
NETWORK = """
from timm.models.vision_transformer import VisionTransformer


def build():
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=192, depth=1, num_heads=3, num_classes=5)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository with packages of its own that have the names of our folders."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'the user, {name}'\n")
    (tmp_path / "server" / "net.py").write_text(NETWORK)
    (tmp_path / "my_model.py").write_text("from server.net import build\n")
    return tmp_path


def run(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_nothing_of_ours_but_fedmjp_can_be_imported(tmp_path: Path) -> None:
    for name in ("attacks", "benchmarks", "clients", "server"):
        code = f"import importlib.util, fedmjp; assert importlib.util.find_spec({name!r}) is None"
        assert run(sys.executable, "-c", code, cwd=tmp_path).returncode == 0, name


def test_an_app_with_clients_of_its_own_imports_our_mods(project: Path) -> None:
    code = (
        "from fedmjp.clients.mods import defence_mod; import clients; from flwr.clientapp import ClientApp\n"
        "app = ClientApp(mods=[defence_mod('clip', norm=1.0)]); print(clients.OWNER)"
    )
    done = run(sys.executable, "-c", code, cwd=project)
    assert done.stdout == "the user, clients\n", done.stderr


def test_a_script_attacks_beside_packages_of_its_own(project: Path) -> None:
    (project / "script.py").write_text(
        "import attacks, benchmarks, clients, server\n"
        "import fedmjp\n"
        "scenario = fedmjp.Scenario(model={'name': 'deit_micro', 'image_size': 32, 'patch_size': 8})\n"
        "exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=32))\n"
        "result = fedmjp.attack('patch_embedding', exchange.upload, scenario)\n"
        "assert fedmjp.score(result, exchange.private)['psnr'] > 60\n"
        "print(attacks.OWNER, benchmarks.OWNER, clients.OWNER, server.OWNER, sep=';')\n"
    )
    done = run(sys.executable, "script.py", cwd=project)
    assert done.stdout.count("the user") == 4, done.stderr


def test_a_model_file_imports_the_server_package_beside_it(project: Path, tmp_path: Path) -> None:
    build = "import my_model, torch, sys; torch.save(my_model.build().state_dict(), 'weights.pt')"
    assert run(sys.executable, "-c", build, cwd=project).returncode == 0
    weights = torch.load(project / "weights.pt", weights_only=True)
    save_file({name: torch.ones_like(tensor) for name, tensor in weights.items()}, project / "gradient.safetensors")
    attack = ("attack", "--attack", "patch_embedding", "--module", "my_model.py:build")
    done = run(*FEDMJP, *attack, "--gradient", "gradient.safetensors", cwd=project)
    assert done.stderr.startswith("Error: my_model.py:build (VisionTransformer): a VisionTransformer does not say how")
    normalised = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    done = run(*FEDMJP, *attack, "--gradient", "gradient.safetensors", *normalised, cwd=project)
    assert "a mixture comes back" in done.stderr, "a gradient of ones is of no picture: the module was loaded and asked"


@pytest.mark.parametrize("program", [FEDMJP, CONSOLE], ids=["module", "script"])
@pytest.mark.parametrize("path", [None, "."], ids=["plain", "PYTHONPATH=."])
def test_commands_run_from_such_a_folder(program: list[str], path: str | None, project: Path) -> None:
    variables = {} if path is None else {"PYTHONPATH": path}
    done = run(*program, "attack", "--attack", "patch_embedding", *SMALL, "--output", "out", cwd=project, **variables)
    assert done.returncode == 0, done.stderr
    assert (project / "out" / "manifest.json").exists()


def test_doctor_says_where_the_package_is(project: Path) -> None:
    done = run(*FEDMJP, "doctor", cwd=project, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    package = done.stdout.split("package ")[-1].strip()
    assert (Path(package) / "attacks" / "april.py").exists()


@pytest.mark.slow
def test_an_app_is_audited_whose_network_is_in_its_clients(tmp_path: Path) -> None:
    app = vit_app(tmp_path / "app", batch=1)
    parts = app / "small" / "parts.py"
    (app / "clients").mkdir()
    (app / "clients" / "__init__.py").touch()
    code = parts.read_text()
    start, end = code.index("def network():"), code.index("def pictures(")
    function = code[start:end].replace("    return VisionTransformer(", "    return Network(")
    (app / "clients" / "model.py").write_text(
        "import torch\nfrom timm.models.vision_transformer import VisionTransformer\n\n\n"
        f"class Network(VisionTransformer):\n    pass\n\n\n{function}"
    )
    parts.write_text(f"from clients.model import network\n{code[:start]}{code[end:]}")
    output = tmp_path / "out"
    done = run(*FEDMJP, "audit", str(app), "--output", str(output), "--rounds", "1", cwd=tmp_path)
    assert "cannot be loaded" not in done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr  # one picture behind an upload: it leaks
    assert "patch_embedding" in (output / "report.json").read_text()


@pytest.mark.slow
def test_a_wheel_of_somebody_else_with_a_server_and_ours_do_not_meet(wheel: Path, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "server").mkdir(parents=True)
    (source / "server" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "somebody-else"\nversion = "1"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["server"]\n'
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, wheel], check=True)
    ours = {path.relative_to(site) for path in site.rglob("*.py")}
    subprocess.run([*pip, source], check=True, stderr=subprocess.PIPE)
    theirs = {path.relative_to(site) for path in site.rglob("*.py")} - ours
    assert theirs == {Path("server/__init__.py")}
    shutil.rmtree(site / "server")  # as pip uninstalls it
    code = "import fedmjp.server.app; print(fedmjp.server.app.__file__)"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.strip() == str(site / "fedmjp" / "server" / "app.py"), done.stderr


def test_a_module_of_a_project_is_found_although_we_have_one_of_its_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "server").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "server"]:
        monkeypatch.delitem(sys.modules, name)
    assert type(load_module("server.net:build")).__name__ == "VisionTransformer"
