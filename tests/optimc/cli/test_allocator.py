"""The C library's allocator: threads share two arenas, and what is free does not stay resident."""

import platform
import subprocess
import sys
import threading

import pytest

from optimc.cli.allocator import limit_arenas, trimming

PROGRAM = """
import ctypes, sys, threading
from optimc.cli.allocator import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(12)

def work():
    together.wait()
    for _ in range(100):
        libc.malloc(5000)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_stats()
"""


FRAGMENTED = """
import ctypes, resource, sys, time
from pathlib import Path
from optimc.cli.allocator import trimming

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident_kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024

with trimming(0.05):
    blocks = [libc.malloc(20_000) for _ in range(4000)]  # 80 MB in all, each below what is mapped by itself
    for block in blocks:
        ctypes.memset(block, 1, 20_000)
    full = resident_kib()
    for at, block in enumerate(blocks):
        if at % 100:
            libc.free(block)  # the others keep the heap from shrinking
    deadline_s = time.monotonic() + 10
    while resident_kib() > full - 60_000 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    sys.exit(resident_kib() > full - 60_000)
"""

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is glibc's allocator")


@glibc_only
def test_free_pages_between_others_go_back_to_the_system() -> None:
    assert subprocess.run([sys.executable, "-c", FRAGMENTED], check=False).returncode == 0


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimc.cli.allocator._function", lambda _name: None)
    limit_arenas()
    with trimming(0.001):
        assert not any(thread.name == "optimc-trim" for thread in threading.enumerate())


def test_trimming_ends_with_what_it_is_for() -> None:
    with pytest.raises(KeyError), trimming():
        raise KeyError
    assert not any(thread.name == "optimc-trim" for thread in threading.enumerate())


@glibc_only
@pytest.mark.parametrize("how", ["limited", "as it is"])
def test_many_threads_share_two_arenas_once_they_are_limited(how: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    arenas = result.stderr.count("Arena ")
    assert arenas <= 2 if how == "limited" else arenas > 2
