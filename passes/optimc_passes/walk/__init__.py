"""Running a model one decoder layer at a time on calibration tokens, for passes that look at activations.

    activations ─ layer 0 ─► activations ─ layer 1 ─► …        one layer's weights in memory, none of the others'

`LayeredModel` is the model, `Activations` are what flows, `LayerWork` is what a pass does at each layer, `walk_layers`
moves through them and goes on where a build that was killed had come to.
"""
