"""What is installed: one import package, nothing called sharding or runtime beside it, and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_one_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "distir_relax", source / "distir_relax", ignore=shutil.ignore_patterns("__pycache__"))
    for link in ("sharding", "lowering", "runtime"):
        (source / link).symlink_to(f"distir_relax/{link}")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"distir_relax"}
    assert "distir_relax/py.typed" in names
    assert "distir_relax/report/templates/page.html" in names
    assert "distir = distir_relax.cli:main" in entry


def test_the_root_links_lead_into_the_package() -> None:
    for link in ("sharding", "lowering", "runtime"):
        assert (ROOT / link).is_symlink()
        assert (ROOT / link).resolve() == (ROOT / "distir_relax" / link).resolve()
