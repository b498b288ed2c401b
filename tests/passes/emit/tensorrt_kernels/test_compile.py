import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from optimc.errors import LoweringError, MissingExtraError
from optimc_passes.emit.tensorrt_kernels import compile_source
from optimc_passes.emit.tensorrt_kernels.compile import compile_kernels
from optimc_passes.emit.tensorrt_kernels.plan_kernels import plan_kernels

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the extra rtx")

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "ptx")


@pytest.fixture(scope="module")
def kernels():
    return compile_kernels(ARCHITECTURES)


def tool(name):
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


@needs_triton
def test_every_kernel_comes_for_every_architecture(kernels):
    names = [(kernel.name, kernel.architecture) for kernel in kernels]
    assert names == [(n, a) for a in ARCHITECTURES for n in ("commit_rows", "gather_rows", "scatter_rows")]


@needs_triton
def test_a_cubin_is_an_elf_file_of_its_architecture_with_the_entry(kernels, tmp_path):
    for kernel in kernels:
        if kernel.architecture == "ptx":
            continue
        assert kernel.image[:4] == b"\x7fELF"
        path = tmp_path / "image.cubin"
        path.write_bytes(kernel.image)
        listing = subprocess.run([tool("cuobjdump"), "-elf", str(path)], capture_output=True, text=True, check=True)
        assert f".text.{kernel.function}" in listing.stdout
        assert kernel.architecture.replace("_", "=") in listing.stdout


@needs_triton
def test_text_is_read_by_drivers_since_cuda_12_and_assembles_for_later_gpus(kernels, tmp_path):
    for kernel in kernels:
        if kernel.architecture != "ptx":
            continue
        assert kernel.image.endswith(b"\0")
        text = kernel.image.rstrip(b"\0").decode()
        assert ".version 8.0\n" in text
        assert ".target sm_80\n" in text
        path = tmp_path / "image.ptx"
        path.write_text(text)
        for gpu in ("sm_80", "sm_90", "sm_120"):
            command = [tool("ptxas-blackwell"), f"--gpu-name={gpu}", str(path), "-o", str(tmp_path / "image.cubin")]
            subprocess.run(command, check=True, capture_output=True)


@needs_triton
def test_arguments_end_with_the_two_triton_appends(kernels):
    for kernel in kernels:
        assert kernel.arguments == ("*i64", "*i64", "*i32", "*i64", "i32", "*i8", "*i8")
        if kernel.architecture == "ptx":
            text = kernel.image.decode()
            assert text.split(")")[0].count(".param") == len(kernel.arguments)


@needs_triton
def test_equal_input_gives_equal_bytes_in_another_process(kernels):
    code = (
        "import hashlib\n"
        "from optimc_passes.emit.tensorrt_kernels.compile import compile_kernels\n"
        "print([hashlib.sha256(k.image).hexdigest() for k in compile_kernels(['sm_80', 'sm_90', 'ptx'])])"
    )
    expected = [hashlib.sha256(each.image).hexdigest() for each in kernels if each.architecture != "sm_89"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


@needs_triton
def test_images_name_no_file_of_this_machine(kernels):
    for kernel in kernels:
        assert b"row_kernels" not in kernel.image
        assert b".ptx" not in kernel.image.replace(b".text", b"")


@needs_triton
def test_the_plan_holds_each_image_once(kernels):
    tensors, entries = plan_kernels(kernels)
    assert len(entries) == len(kernels)
    assert len(tensors) == 2 * len(ARCHITECTURES)
    images = {tensor.name: tensor.load().tobytes() for tensor in tensors}
    for kernel, entry in zip(kernels, entries, strict=True):
        assert images[entry.tensor] == kernel.image
        assert (entry.name, entry.function) == (kernel.name, kernel.function)
        assert (entry.num_warps, entry.shared_bytes) == (kernel.num_warps, kernel.shared_bytes)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_999", "90", "gfx942"])
def test_an_architecture_triton_cannot_compile_for_is_refused_before_it_is_imported(architecture, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LoweringError, match=rf"'{architecture}', only for sm_80, .*sm_90.*, ptx"):
        compile_kernels(["sm_80", architecture])


def test_without_triton_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match=r"triton: pip install 'optimc\[rtx\]'"):
        compile_kernels(["sm_80"])


@needs_triton
def test_an_interpreter_cannot_compile():
    code = (
        "from optimc.errors import LoweringError\n"
        "from optimc_passes.emit.tensorrt_kernels.compile import compile_kernels\n"
        "try: compile_kernels(['sm_80'])\n"
        "except LoweringError as error: print(error)"
    )
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("TRITON_INTERPRET is set")


def test_importing_the_package_does_not_import_triton():
    code = (
        "import sys, pkgutil, importlib\n"
        "import optimc_passes.emit.tensorrt_kernels as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    if 'kernel' not in module.name or module.name == 'plan_kernels':\n"
        "        if module.name != 'attention_tile': importlib.import_module(f'{package.__name__}.{module.name}')\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_capabilities_are_those_names_stand_for():
    assert compile_source.capability_of("sm_90") == 90
    assert compile_source.capability_of("ptx") == 80
    assert compile_source.capability_of("ptx_90") == 90
