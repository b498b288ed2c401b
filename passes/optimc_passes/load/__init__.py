"""Loading checkpoints: folders, .gguf files and hub ids become a `Checkpoint`."""

from optimc_passes.load.load_checkpoint import load_checkpoint, load_config

__all__ = ["load_checkpoint", "load_config"]
