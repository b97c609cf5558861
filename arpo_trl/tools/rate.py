"""How often a tool may be called, by all processes of a run on one machine together."""

import hashlib
import os
import socket
import time
from pathlib import Path

from filelock import FileLock


# In the folder of a run. What begins with "_" is not pushed to the Hub.
FOLDER = "_rate_limits"


class RateLimit:
    """Lets calls start evenly spaced.

    Args:
        rate (`float`):
            Calls a second.
        file (`Path`, *optional*):
            Shared by the processes that share the rate: its time of change is the moment from which on the next call may
            start. Without it this process has the rate for itself.
    """

    def __init__(self, rate: float, file: Path | None = None):
        self.interval, self._file, self._next = 1 / rate, file, 0.0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(file.with_suffix(".lock"), poll_interval=0.001)
            with self._lock:
                if not file.exists():
                    file.touch()

    def take(self) -> float:
        """Takes the right to start a call now: 0 where there is one, else the seconds after which to ask again.

        Raises:
            `OSError`: where the file is gone.
        """
        if self._file is None:
            return self._take(time.monotonic())
        with self._lock:
            now, self._next = time.time(), self._file.stat().st_mtime  # the clock that processes share
            if self._next > now + self.interval:  # it was set back
                self._next = now
            if wait := self._take(now):
                return wait
            os.utime(self._file, (now, self._next))
            return 0.0

    def _take(self, now: float) -> float:
        if self._next > now:
            return self._next - now
        self._next = now + self.interval
        return 0.0


def rate_file(folder: Path, tool: str) -> Path:
    """Where the processes of this machine keep the rate of a tool; several machines may share the folder."""
    return folder / socket.gethostname() / hashlib.sha256(tool.encode()).hexdigest()[:16]
