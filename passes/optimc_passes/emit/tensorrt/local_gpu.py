"""The GPU of the machine that builds: full TensorRT builds for no other."""

from __future__ import annotations

from typing import Any

from optimc.errors import LoweringError, MissingExtraError
from optimc.wording import one_line


def local_architecture() -> str:
    """Return the architecture of the first GPU, `sm_90` and so on, asked of the driver.

    Raises MissingExtraError without cuda-bindings, LoweringError on a machine without a usable GPU.
    """
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise MissingExtraError("cuda-bindings", "tensorrt", "building for target tensorrt") from error
    try:
        _checked(driver, driver.cuInit(0))
        device = _checked(driver, driver.cuDeviceGet(0))
        attributes = driver.CUdevice_attribute
        major, minor = (
            _checked(driver, driver.cuDeviceGetAttribute(getattr(attributes, name), device))
            for name in (
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
            )
        )
    except RuntimeError as error:  # also of a driver library that is not there
        raise LoweringError(f"this machine has no NVIDIA GPU that can be used ({one_line(error)})") from error
    return f"sm_{major}{minor}"


def _checked(driver: Any, answer: tuple[Any, ...]) -> Any:
    """Return what a driver call answered beside its status. Raises RuntimeError with the status's name."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None
