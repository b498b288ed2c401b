"""GPUs as their datasheets have them: dense peaks, without sparsity. Good for floors, never for predictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from optimc.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's peaks."""

    name: str
    bytes_per_s: float
    """Of its memory."""
    int8_ops_per_s: float
    """Dense, multiplications and additions each counted, like what follows."""
    fp16_ops_per_s: float
    fp8_ops_per_s: float | None
    """None: it has none."""
    source: str
    """Title of the vendor's document."""

    @property
    def float_ops_per_s(self) -> float:
        """Of floating point in 16 bits, the widest that tensor cores do at full rate."""
        return self.fp16_ops_per_s

    @property
    def margin(self) -> float:
        """1: a datasheet's peaks are never reached."""
        return 1.0

    def bandwidth_at(self, working_set_bytes: float) -> float:  # noqa: ARG002  as MachineRates has it
        """Return the memory's bandwidth, whatever is read."""
        return self.bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def _gpu(name: str, gb: float, int8: float, fp16: float, fp8: float | None, source: str) -> Gpu:
    """Gigabytes and tera-operations per second."""
    return Gpu(name, gb * 1e9, int8 * 1e12, fp16 * 1e12, None if fp8 is None else fp8 * 1e12, source)


GPUS = (
    _gpu("A10", 600, 250, 125, None, "NVIDIA A10 Tensor Core GPU datasheet"),
    _gpu("A100", 2039, 624, 312, None, "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM"),
    _gpu("A100 40GB", 1555, 624, 312, None, "NVIDIA A100 Tensor Core GPU datasheet, 40GB"),
    _gpu("H100", 3350, 1979, 989.5, 1979, "NVIDIA H100 Tensor Core GPU datasheet, SXM"),
    _gpu("H100 PCIe", 2000, 1513, 756.5, 1513, "NVIDIA H100 Tensor Core GPU datasheet, PCIe"),
    _gpu("H200", 4800, 1979, 989.5, 1979, "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
    _gpu("L4", 300, 242.5, 121, 242.5, "NVIDIA L4 Tensor Core GPU datasheet"),
    # The datasheet's 362.05 beside 733 with sparsity is the L40's; a fourth of the 366.5 is its own float32 rate.
    _gpu("L40S", 864, 733, 366.5, 733, "NVIDIA L40S GPU datasheet"),
    # Sums in 16 bits, as floors have it; in 32 bits this GPU does half as much.
    _gpu("RTX 4090", 1008, 660.6, 330.3, 660.6, "NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090"),
    _gpu("B200", 8000, 4500, 2250, 4500, "NVIDIA DGX B200 datasheet, per GPU"),
)
"""Without a form, the fastest that is sold by itself. Figures given with sparsity are halved."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, whatever its case and spaces. Raises UnknownNameError that lists the known ones."""
    wanted = _plain(name)
    for gpu in GPUS:
        if _plain(gpu.name) == wanted:
            return gpu
    raise UnknownNameError("GPU", name, [gpu.name for gpu in GPUS])


def _plain(name: str) -> str:
    return "".join(name.lower().split()).replace("-", "")
