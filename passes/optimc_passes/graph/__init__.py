"""The graph as an object: lazily bound weights, attaching them, storing the graph without them."""
