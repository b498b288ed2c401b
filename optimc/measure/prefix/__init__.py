"""Which requests could have shared their prefix, and what kept them from it.

A request's life here: `rendered.py` makes text and units of a line of traffic, `trie.py` and `cache_model.py` say
what was shared, `folded.py` and `families.py` who is alike beyond that, `alignment.py` where two of them differ,
`killers.py` what kind of difference it is, `edited.py` what would be shared without it, `prefix_report.py` puts it
together.
"""
