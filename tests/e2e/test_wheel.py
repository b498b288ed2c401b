"""The wheel, installed by itself in a new environment, serves a plan: no compiler packages, no repository."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]


def run(*command, cwd):
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment that holds the wheel and what `optimc[ort]` brings."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, REPOSITORY, cwd=folder)
    wheel = next(folder.glob("optimc-*.whl"))
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[ort]", cwd=folder)
    return python


def test_it_brings_no_compiler_packages(installed, tmp_path):
    packages = run(installed, "-m", "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    for name in ("torch", "transformers", "onnx==", "onnx-ir", "onnxscript"):
        assert f"\n{name}" not in packages


def test_it_serves_from_anywhere(installed, fp32_plan, tmp_path):
    answer = run(installed, "-m", "optimc", "chat", fp32_plan, "-p", "what is it", "--max-tokens", 4, cwd=tmp_path)
    assert answer.strip()
    listing = run(installed, "-m", "optimc", "inspect", fp32_plan, "--verify", cwd=tmp_path)
    assert "fp32" in listing


def test_building_says_which_extra_is_missing(installed, make_recipe, tmp_path):
    recipe = make_recipe(tmp_path / "r.yaml")
    result = subprocess.run(
        [str(installed), "-m", "optimc", "build", str(recipe)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "pip install 'optimc[build]'" in result.stderr
