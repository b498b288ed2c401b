"""optimc beside its peers on one machine, in turns. `benchmarks/peers.py` runs it."""
