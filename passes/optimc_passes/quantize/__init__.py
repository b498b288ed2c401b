"""Passes that turn linear weights into integer codes, and the arithmetic they share."""
