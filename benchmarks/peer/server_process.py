"""A server as its user meets it: started from the shell, ready when it answers."""

from __future__ import annotations

import http.client
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from peer.worker import PeerError

POLL_S = 0.005
TIMEOUT_S = 120.0


class ServerProcess:
    """Started, and waited for until GET /health says 200. Raises PeerError if that never happens."""

    def __init__(self, command: Sequence[str], url: str) -> None:
        self.url = url
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        started_s = time.perf_counter()
        # Users of a Python server do not compile it at every start, as this variable would have them do.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=variables)
        while not _is_ready(url):
            if self._process.poll() is not None or time.perf_counter() - started_s > TIMEOUT_S:
                self.close()
                raise PeerError(f"{' '.join(command)}: not ready\n{self._said}")
            time.sleep(POLL_S)
        self.ready_s = time.perf_counter() - started_s
        """From starting the process to the first good answer."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.seek(0)
        self._said = self._log.read().decode(errors="replace").strip()[-2000:]
        self._log.close()


def _is_ready(url: str) -> bool:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
