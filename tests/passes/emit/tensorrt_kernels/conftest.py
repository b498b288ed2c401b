"""Triton reads TRITON_INTERPRET once, when it is imported: tests that need it run in a process of their own."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
