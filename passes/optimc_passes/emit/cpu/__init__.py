"""The cpu target (`lower`): from a dialect graph to a program of our own kernels.

Life of a graph here: `translate` names every value's place, `hoist_rows` computes few rows where few are read,
`fuse_sums`, `merge_elementwise` and `fuse_gates` let operations end with what follows them, `quantize_activations`
rounds what integer products read, `share_buffers` and `buffers` give values their places, `weights` packs.
"""
