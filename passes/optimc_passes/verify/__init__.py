"""Verification of graphs: the dialect's rules and shapes, and what they compute on probe tokens."""

from optimc_passes.verify.verifier import GraphVerifier, VerifyLevel

__all__ = ["GraphVerifier", "VerifyLevel"]
