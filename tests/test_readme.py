"""README's Python blocks run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS = "my_package"  # stands for a package of the reader's


def blocks() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", ROOT / "fedmjp" / "defences" / "README.md"]
    return [
        (f"{page.parent.name or 'README'} {number}", block)
        for page in pages
        for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
        if OTHERS not in block
    ]


@pytest.mark.parametrize("block", [block for _, block in blocks()], ids=[name for name, _ in blocks()])
def test_a_block_of_a_readme_runs(block: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    if "mjp_prior" in block:
        psnr = float(re.findall(r"\d+\.\d+", done.stdout)[0])
        assert 13 < psnr < 40, "more than the grey guess of that picture, and not exact"
    if "adopt" in block:
        error = float(re.findall(r"tensor\((.*)\)", done.stdout)[0])
        assert error < 1e-3, "exact up to rounding"
