"""Weight quantization beside GPTQModel and llm-compressor: what `benchmarks/quantization.py` is made of."""
