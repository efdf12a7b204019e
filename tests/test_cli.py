"""The command line in process: one clear line, the right exit code, nothing half-written."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedmjp
from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.uploads.source import FederatedRun
from fedmjp.cli import main
from fedmjp.defences import DEFENCES
from fedmjp.errors import FederationError
from fedmjp.metrics import METRICS
from fedmjp.models.build import ARCHITECTURES
from fedmjp.running import run_function
from fedmjp.threat import SERVERS
from tests.experiments import small_experiments
from tests.studies import load_study

BAD_INPUT = 2
SPAN = "span_certificates/study.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--model", "deit_smal"], "Unknown model 'deit_smal'. Did you mean deit_small"),
        (["record", "--defence", "mpj"], "Unknown defence 'mpj'. Did you mean mjp"),
        (["record", "--defence", "mjp:mask_ratio=1.5"], "mask_ratio = '1.5'"),
        (["record", "--defence", "mjp:mask-ratio=-0.1"], "mask_ratio = '-0.1'"),
        (["record", "--defence", "mjp:mask_ratio=much"], "mask_ratio = 'much'"),
        (["record", "--defence", "mjp:mask_ration=0.3"], "unknown key 'mask_ration', did you mean 'mask_ratio'?"),
        (["record", "--defence", "secure_sum:clients=2", "--defence", "clip"], "name clip first"),
        (["record", "--local-steps", "0"], "'--local-steps': 0 is not in the range"),
        (["record", "--data", "/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["record", "--clients", "9"], "9 pictures were asked for, but only 8 can be read"),
        (["record", "--image-size", "225"], "225 is not a multiple of patch size 16"),
        (["record", "--device", "gpu"], "'--device': 'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["quickstart", "--device", "gpu"], "'--device': 'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["list", "atacks"], "Did you mean attacks?"),
        (["quikstart"], "Did you mean 'quickstart'?"),
        (["list", "defenses"], "Did you mean defences?"),
        (["record", "--defense", "mjp"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_cuda_without_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for command in ("quickstart", "record"):
        assert run(monkeypatch, command, "--device", "cuda") == BAD_INPUT
        assert "torch sees no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quickstart", "record"])
def test_an_output_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").touch()
    assert run(monkeypatch, command, "--output", str(tmp_path / "file" / "results")) == BAD_INPUT
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_without_pictures_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "record", "--data", str(tmp_path)) == BAD_INPUT
    assert "holds no picture; expected FOLDER/CLASS/picture" in capsys.readouterr().err


def test_quickstart_whose_federation_fails_says_why_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FederationError("the federated run failed: client 7: RuntimeError: out of memory")

    monkeypatch.setattr(
        "fedmjp.benchmarks.campaign.quickstart.quickstart", lambda device: small_experiments(device=device)
    )
    monkeypatch.setattr("fedmjp.benchmarks.uploads.source.FederatedRun", functools.partial(FederatedRun, record=fail))
    assert run(monkeypatch, "quickstart", "--device", "cpu", "--output", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "96 trials failed: the federated run failed: client 7: RuntimeError: out of memory" in printed
    assert "96 trials failed" in (tmp_path / "leaderboard.html").read_text()
    assert (tmp_path / "leaderboard.csv").read_text().count(",0,4,") == 24, "n = 0, four failures in every cell"


@pytest.mark.parametrize("command", ["quickstart", "record"])
def test_a_folder_with_other_peoples_files_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    assert run(monkeypatch, command, "--fresh", "--output", str(tmp_path)) == BAD_INPUT
    assert "holds files that are not from fedmjp" in capsys.readouterr().err
    assert (tmp_path / "run" / "thesis.txt").exists()


def test_two_runs_never_share_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    holder = "import sys; from pathlib import Path; from fedmjp.claims import claim_folder;"
    holder += "claim_folder(Path(sys.argv[1])); print('claimed', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        assert run(monkeypatch, "quickstart", "--output", str(tmp_path)) == BAD_INPUT
        assert "another run is writing" in capsys.readouterr().err
        other.communicate()


def test_records_of_a_former_run_are_not_mixed_with_new_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / ".fedmjp").touch()
    assert run(monkeypatch, "record", "--output", str(tmp_path)) == BAD_INPUT
    assert "already holds the records of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("attacks", ATTACKS),
        ("defences", DEFENCES),
        ("servers", SERVERS),
        ("models", ARCHITECTURES),
        ("metrics", METRICS),
    ],
)
def test_list_names_everything_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, known: object
) -> None:
    assert run(monkeypatch, "list", kind, "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == list(known)  # type: ignore[call-overload]
    assert run(monkeypatch, "list", kind) == 0
    printed = capsys.readouterr().out
    assert all(entry["name"] in printed for entry in entries)


def test_doctor_reports_versions_device_and_where_weights_belong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert run(monkeypatch, "doctor") == 0
    printed = capsys.readouterr().out
    assert "flwr" in printed
    assert f"put alexnet-owt-7be5be79.pth into {tmp_path / 'hub' / 'checkpoints'}" in printed.replace("\n", "")
    assert str(Path(fedmjp.__file__).parent) in printed


def test_doctor_reports_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedmjp.provenance.PACKAGES", ("torch", "no-such-package"))
    assert run(monkeypatch, "doctor") == 0
    assert "no-such-package" in (printed := capsys.readouterr().out)
    assert "not installed" in printed


@pytest.mark.parametrize(
    ("script", "command", "arguments", "message"),
    [
        (
            "span_certificates/study.py",
            "certificates",
            ["--data", "/nowhere", "--output", "study"],
            "there is no folder /nowhere",
        ),
        (
            "span_certificates/study.py",
            "certificates",
            ["--data", "bundled", "--output", "study", "--model", "foo"],
            "'foo' is not KEY=VALUE",
        ),
        (
            "span_certificates/study.py",
            "information",
            ["--data", "bundled", "--output", "study", "--ratios", "2"],
            "'2' are no mask ratios",
        ),
        ("batches/study.py", "main", ["--pictures", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_studies_tell_bad_input_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        run_function(getattr(load_study(script), command))
    assert ended.value.code == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
