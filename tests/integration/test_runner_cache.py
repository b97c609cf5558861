"""One cache, several processes, one of them killed."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from arpo_trl.tools.cache import ToolCache
from tests.integration.runner_tools import ask_one, write_many


@pytest.fixture
def processes():
    return multiprocessing.get_context("spawn")


def test_nothing_is_lost_or_corrupt_when_a_writer_is_killed(tmp_path, processes):
    writers = [
        processes.Process(target=write_many, args=(str(tmp_path / "cache"), str(tmp_path / f"progress{n}"), n, 400))
        for n in range(2)
    ]
    for writer in writers:
        writer.start()

    def progress(n: int) -> list[int]:
        file = tmp_path / f"progress{n}"
        return [int(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    deadline = time.monotonic() + 60
    while len(progress(0)) < 50:
        assert time.monotonic() < deadline and writers[0].is_alive()
        writers[0].join(0.01)
    os.kill(writers[0].pid, signal.SIGKILL)
    writers[0].join()
    writers[1].join(60)
    assert writers[1].exitcode == 0
    cache = ToolCache(tmp_path / "cache")
    for writer, finished in ((0, progress(0)), (1, list(range(400)))):
        for n in finished:
            assert cache.get(f"{writer}:{n}") == (f"answer {n} " * 50, None)
    assert cache._store.check() == []
    cache.put("after", ("still works", None))
    assert cache.get("after") == ("still works", None)


def test_equal_calls_of_several_processes_are_made_once(tmp_path, processes):
    log = tmp_path / "log"
    askers = [processes.Process(target=ask_one, args=(str(tmp_path / "cache"), str(log))) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert [asker.exitcode for asker in askers] == [0, 0, 0]
    assert log.read_text() == "called\n"


def test_the_claim_of_a_dead_process_is_taken_over(tmp_path, processes):
    cache = ToolCache(tmp_path / "cache")
    dead = processes.Process(target=time.sleep, args=(0,))
    dead.start()
    dead.join()
    import socket

    cache._store.set("claim:key", {"host": socket.gethostname(), "pid": dead.pid})
    ask_one(str(tmp_path / "cache"), str(tmp_path / "log"))
    assert Path(tmp_path / "log").read_text() == "called\n"
