"""Threads share two arenas of the C library's allocator."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from optimc.cli.malloc_arenas import limit_arenas

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the arenas are glibc's")
@pytest.mark.parametrize("how", ["limited", "as it is"])
def test_many_threads_share_two_arenas_once_they_are_limited(how: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    arenas = result.stderr.count("Arena ")
    assert arenas <= 2 if how == "limited" else arenas > 2
