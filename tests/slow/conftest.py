"""For all slow tests: a vLLM server, and the demo, whose cold start takes minutes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tenacity

from tests.small_models import save_tagged_model


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_demo():
    """Runs the demo with these arguments; what it printed."""

    def run(*arguments) -> str:
        command = [sys.executable, "scripts/demo.py", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def whole_demo(run_demo, tmp_path_factory):
    """Folder of the demo with seed 0, from its first step to its last, and what it printed."""
    folder = tmp_path_factory.mktemp("whole_demo")
    return folder, run_demo("--output_dir", folder)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Folder of the small tagged model, and the address of a real vLLM server that has it, on loopback."""
    model = save_tagged_model(tmp_path_factory.mktemp("served_model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", "256", "--enforce-eager", "--dtype", "float32"]
    command += ["--logprobs-mode", "processed_logprobs", "--block-size", "32"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    # TRL resets the prefix cache through an endpoint of the development mode.
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield model, f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(httpx.TransportError), wait=tenacity.wait_fixed(1), reraise=True
)
def _wait(url, server, log):
    assert server.poll() is None, log.read_text()[-3000:]
    httpx.get(url, timeout=5).raise_for_status()
