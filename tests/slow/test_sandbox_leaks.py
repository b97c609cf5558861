"""Ten thousand calls leave nothing behind."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from arpo_trl.tools.sandbox.launch import Limits, Sandbox


CODES = [
    "print({n})",
    "open('file{n}', 'w').write('x' * 1000)\nprint({n})",
    "import os\nprint({n}, flush=True)\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(60)",
    "print({n})\nimport threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "import os\nprint({n}, flush=True)\nos.closerange(0, 64)\nos._exit(1)",
]


def footprint(box: Sandbox) -> tuple[int, int, int, int]:
    """Processes of the sandbox, descriptors here and there, and mounts of this machine."""
    top = psutil.Process(box._parent._process.pid)
    inside = [top, *top.children(recursive=True)]
    mounts = len(Path("/proc/self/mounts").read_text().splitlines())
    return len(inside), psutil.Process().num_fds(), sum(process.num_fds() for process in inside), mounts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("tier", "codes"), [("bubblewrap", CODES), ("landlock", [CODES[0], CODES[1], *CODES[3:]])])
def test_ten_thousand_calls_leave_no_process_file_or_descriptor(tier, codes):
    box = Sandbox(tier, Limits(memory_mb=128, scratch_mb=4))
    box.start()
    try:
        before = footprint(box)
        memory = psutil.Process(box._parent._process.pid).children(recursive=True)[-1:]
        resident = sum(process.memory_info().rss for process in memory)
        with ThreadPoolExecutor(8) as pool:
            outcomes = pool.map(lambda n: box.run(codes[n % len(codes)].format(n=n), 20), range(10_000))
            for n, outcome in enumerate(outcomes):
                assert outcome.output == f"{n}\n" and outcome.killed is None
        deadline = time.monotonic() + 30
        while footprint(box) != before:
            assert time.monotonic() < deadline, (before, footprint(box))
        grown = sum(process.memory_info().rss for process in memory) - resident
        assert grown < 16 * 2**20
        if box._scratch is not None:
            assert os.listdir(box._scratch.name) == []
    finally:
        box.close()
