"""`python -m optimc` is the `optimc` command."""

from optimc.cli import main

main()
