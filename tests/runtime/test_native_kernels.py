"""The kernels in C++ pass their own tests on every instruction set of this machine, and with sanitizers."""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "runtime" / "native"
LISTED_FLAGS = Path("/proc/cpuinfo")

# Compiling takes half a minute on two idle cores, with sanitizers several; a busy machine takes longer.
pytestmark = pytest.mark.timeout(1800)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def build(folder: Path, sanitizers: str = "") -> Path:
    """The test program, compiled in `folder`."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the kernel tests need a C++ compiler, and none of c++, g++ and clang++ is on the path")
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cmake = shutil.which("cmake", path=search)
    assert cmake is not None, "the kernel tests need cmake: pip install cmake"
    ninja = shutil.which("ninja", path=search)
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DOPTIMC_MODULE=OFF", "-DOPTIMC_KERNEL_TESTS=ON"]
    run(cmake, "-S", SOURCE, "-B", folder, *generator, *options, f"-DOPTIMC_SANITIZE={sanitizers}")
    run(cmake, "--build", folder, "--target", "kernel_tests", "--parallel", str(os.cpu_count() or 1))
    return folder / "kernel_tests"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("kernel_tests"))


def run_all(program: Path) -> str:
    """What the tests print, divided over two processes; each must have run some cases and failed none."""
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda share: run(program, "", share, "2"), ("0", "1")))
    for output in outputs:
        assert re.search(r"^[1-9]\d* cases, 0 failed checks$", output, re.MULTILINE), output
    return "".join(outputs)


def test_kernels_pass_on_every_instruction_set(program: Path) -> None:
    sets = re.findall(r"^instruction sets: (.*)$", run_all(program), re.MULTILINE)[0].split()
    if platform.machine() != "x86_64" or not LISTED_FLAGS.exists():
        assert sets == ["portable"]
        return
    flags = set(LISTED_FLAGS.read_text().split())
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    needs = {
        "avx2": avx2,
        "avx512": avx512,
        "avx512_bf16": avx512 | {"avx512_bf16"},
        "amx": avx512 | {"amx_tile", "amx_int8"},
    }
    # Whether the system grants tiles is its own affair: a container may be refused what the processor has.
    wanted = [name for name, needed in needs.items() if needed <= flags]
    assert sets in (["portable", *wanted], ["portable", *(name for name in wanted if name != "amx")])


def test_a_filter_that_matches_nothing_is_a_failure(program: Path) -> None:
    done = subprocess.run([program, "no test has this name"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "0 cases" in done.stdout


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def test_no_inline_function_crosses_instruction_sets(program: Path, name: str) -> None:
    """The linker keeps one copy of an inline function: it must not be one that only some machines can run."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    objects = sorted((program.parent / "CMakeFiles" / f"optimc_kernels_{name}.dir").rglob("*.o"))
    if not objects:
        pytest.skip(f"no {name} kernels on this processor")
    shared = [
        line
        for line in run(nm, "--demangle", "--defined-only", *objects).splitlines()
        if re.search(r" [WVu] ", line) and f"optimc::{name}::" not in line
    ]
    assert shared == []


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_run_clean_under_sanitizers(tmp_path: Path, sanitizers: str) -> None:
    output = run_all(build(tmp_path, sanitizers))
    assert "ERROR: AddressSanitizer" not in output
    assert "WARNING: ThreadSanitizer" not in output
