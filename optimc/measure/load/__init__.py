"""Offering load: arrivals, datasets, both kinds of loop, limits, intervals, and the ladder of rates."""
