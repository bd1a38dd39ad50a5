"""Installing the package beside an engine changes nothing that is installed there.

The environments hold the metadata of one 0.1.x and one 0.2.x set of pins, FreeToken's own from its real wheel; pip's
resolver is asked, in a dry run, what it would do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PINS = {
    "0.1.3": {
        "torch": "2.11.0",
        "triton": "3.6.0",
        "transformers": "5.16.0",
        "torchvision": "0.26.0",
        "numpy": "2.4.0",
    },
    "0.2.1": {
        "torch": "2.14.0",
        "triton": "3.7.0",
        "transformers": "5.18.0",
        "torchvision": "0.29.0",
        "numpy": "2.4.0",
    },
}
# What these need in turn, at versions that satisfy all of them.
COMMON = {"einops": "0.8.1", "huggingface_hub": "1.31.0", "safetensors": "0.8.0", "tokenizers": "0.23.1"}
COMMON |= {"packaging": "26.0", "click": "8.2.0", "structlog": "25.5.0", "filelock": "3.20.0", "sympy": "1.14.0"}
COMMON |= {"numpy": "2.4.0", "networkx": "3.5", "jinja2": "3.1.6", "fsspec": "2025.10.0", "typing_extensions": "4.15.0"}


def stub(site: Path, name: str, version: str, metadata: str = "") -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


@pytest.mark.parametrize("version", sorted(PINS))
def test_the_resolver_would_change_nothing_that_is_installed(version: str, tmp_path: Path) -> None:
    wheels = sorted((REPOSITORY / ".wheels").glob(f"freetoken-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"the wheel of FreeToken {version} is not here (the index could not be reached)")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    archive = zipfile.ZipFile(wheels[0])
    metadata = archive.read(f"freetoken-{version}.dist-info/METADATA").decode()
    installed = PINS[version] | COMMON
    stub(site, "freetoken", version, metadata)
    for name in re.findall(r"^Requires-Dist: ([A-Za-z0-9_.-]+)(?![^\n]*extra)", metadata, re.MULTILINE):
        pinned = re.search(rf"^Requires-Dist: {re.escape(name)}(?:==|<\d+,>=)([\d.]+\w*)", metadata, re.MULTILINE)
        if name not in installed and pinned:
            installed[name.replace("-", "_")] = pinned[1]
    for name, each in installed.items():
        stub(site, name, each)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", str(_wheel(tmp_path))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode and re.search(r"No matching distribution|Could not find a version|ConnectionError", done.stderr):
        pytest.skip(f"the index could not be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    would = {item["metadata"]["name"].lower().replace("-", "_") for item in json.loads(done.stdout)["install"]}
    assert "prefill_probe" in would
    assert would & {name.lower() for name in installed} == set()


def _wheel(directory: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(directory), str(REPOSITORY)], check=True, capture_output=True)
    return next(directory.glob("prefill_probe-*.whl"))


def test_the_wheel_holds_the_core_the_hook_the_start_up_file_and_nothing_else(tmp_path: Path) -> None:
    names = zipfile.ZipFile(_wheel(tmp_path)).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"prefill_probe", "engine_hooks", "prefill_probe_hook.pth"}
    for expected in (
        "prefill_probe/py.typed",
        "prefill_probe/record.schema.json",
        "prefill_probe/geometry/flash-next-nvfp4.json",
        "engine_hooks/freetoken/attach.py",
    ):
        assert expected in names


def test_the_built_wheel_attaches_as_the_editable_install_does(tmp_path: Path) -> None:
    """A fresh environment with the wheel alone: its interpreters wait for an engine, and import nothing else."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(_wheel(tmp_path))], check=True
    )
    code = (
        "import sys; print([m for m in sys.modules if m.startswith(('engine_hooks', 'prefill_probe'))], sys.meta_path)"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("['engine_hooks']")
    assert "_WaitForEngine" in done.stdout
