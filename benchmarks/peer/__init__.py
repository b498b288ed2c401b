"""optimc beside llama.cpp and OpenVINO GenAI on one machine, in turns. `benchmarks/peers.py` runs it."""
