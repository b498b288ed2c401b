"""Options that the tensorrt target alone has: others refuse them, one by one."""

from __future__ import annotations

from optimc_passes.emit.lowered import LoweringOptions

NAMES = ("flavor", "precision", "gpu", "builder_level")


def refuse_tensorrt_options(options: LoweringOptions, backend: str) -> dict[str, str]:
    """Return why each of them that is set is refused by `backend`, by the option's name."""
    asked = [name for name in NAMES if getattr(options, name) is not None]
    return dict.fromkeys(asked, f"is for target tensorrt; the {backend} target has nothing of the kind")
