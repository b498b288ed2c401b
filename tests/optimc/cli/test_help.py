import subprocess
import sys

HEAVY = ("numpy", "pydantic", "rich", "starlette", "tokenizers", "torch", "transformers", "onnx")


def test_the_command_line_loads_nothing_heavy_before_a_command_runs():
    code = f"import sys, optimc.cli; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
