"""The `optimc` command."""


def main() -> None:
    """Run the command line."""
