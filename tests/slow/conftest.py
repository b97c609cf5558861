"""A vLLM server for all slow tests."""

import os
import socket
import subprocess
import sys

import httpx
import pytest
import tenacity

from tests.small_models import save_tagged_model


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
