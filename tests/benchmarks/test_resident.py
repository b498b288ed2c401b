import os
import subprocess
import sys
from pathlib import Path

from peer.resident import highest_resident_bytes

FILL_AND_FREE = "bytearray(b'x' * 80_000_000); print(flush=True); input()"


def test_what_was_freed_counts():
    with subprocess.Popen(
        [sys.executable, "-c", FILL_AND_FREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        resident_now = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        highest = highest_resident_bytes(child.pid)
        child.communicate(b"\n")
    assert resident_now < 60_000_000
    assert 80_000_000 < highest < 300_000_000
