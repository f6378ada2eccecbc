"""Checks a release: its files, its description, and the README's example with the wheel in a clean environment.

    python .ci/check_dist.py dist

``make dist`` builds both archives and runs this. The environment is made in a temporary folder and installs the
dependencies that the wheel declares, in the tested versions.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRA = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}  # of the sdist


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return what it prints; stop if it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_files(wheel: Path, sdist: Path) -> None:
    """Check that both archives contain exactly the expected files."""
    files = (path for path in (ROOT / "torchrl_her").rglob("*") if path.is_file() and path.suffix != ".pyc")
    modules = {path.relative_to(ROOT).as_posix() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if names != modules:
        raise SystemExit(f"{wheel.name}: these files are missing or should not be there: {sorted(names ^ modules)}")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()} - {"PKG-INFO", ".gitignore"}
    if names != modules | EXTRA:
        raise SystemExit(f"{sdist.name}: missing or should not be there: {sorted(names ^ (modules | EXTRA))}")


def check_description(wheel: Path) -> None:
    """Check that the description has no link that works only in the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    if relative := re.findall(r"\]\((?!https?:|#)[^)]*\)", text):
        raise SystemExit(f"The description has relative links: {relative}")


def check_example(wheel: Path) -> None:
    """Run the README's example with the wheel in a clean environment outside the clone, and type-check it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=True)
        quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        packages = (wheel.resolve(), "tqdm")  # as the README says
        run(python, "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt", *packages, cwd=folder)
        example = folder / "example.py"
        blocks = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
        example.write_text(blocks[1])  # the complete example
        print(run(python, example, cwd=folder).strip())
        mypy = [sys.executable, "-m", "mypy", "--strict", "--disable-error-code=import-untyped"]  # of TorchRL
        print(run(*mypy, "--python-executable", python, example, cwd=folder).strip())


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the wheel and the sdist")
    folder = parser.parse_args().folder
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_files(wheel, sdist)
    check_description(wheel)
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
    check_example(wheel)
    print(f"{wheel.name} and {sdist.name} are ready.")


if __name__ == "__main__":
    main()
