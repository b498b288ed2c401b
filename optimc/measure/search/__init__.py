"""Search: the best served figure that a recipe can reach within its quality gates."""
