"""The tool `python` as the model and the recipe see it."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolError
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.python import PythonTool
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.sandbox import launch, walls


class FusionServer(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does; what it runs is the tests' own."""

    broken: str | None = None

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and request["language"] == "python"
        if self.broken == "status":
            self.send_error(503)
            return
        if self.broken == "sandbox":
            answer = {"status": "SandboxError", "message": "no workers", "run_result": None}
        else:
            answer = self.run(request)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def run(request: dict) -> dict:
        try:
            done = subprocess.run(
                [sys.executable, "-c", request["code"]],
                capture_output=True,
                text=True,
                timeout=request["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
            return {"status": "Failed", "message": "", "run_result": result}
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Success" if done.returncode == 0 else "Failed", "message": "", "run_result": result}

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def fusion_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FusionServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=["bubblewrap", "landlock", "unprotected", "sandbox_fusion"])
def tool(request, fusion_url):
    url = {"url": fusion_url} if request.param == "sandbox_fusion" else {}
    made = PythonTool(request.param, timeout_s=20, preload=["numpy"], memory_mb=256, **url)
    made.preflight()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("6 * 7", "42\n"),
        ("x = 6\nx * 7", "42\n"),
        ("'text'", "'text'\n"),
        ("None", ""),
        ("\n```python\nx = 1\nx + 1\n```\n", "2\n"),
        ("len('```')", "3\n"),
        ("def f():\n    return 1\nf(); f()", "1\n"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)", "out\nerr\n"),
        ("import sys\nsys.exit()", ""),
        ("print('é ∑ 漢')", "é ∑ 漢\n"),
        ("import numpy as np\nint(np.arange(4).sum())", "6\n"),
        ("input() if False else 'x'", "'x'\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)\n"),
        ("import threading\nthreading.Timer(0.05, print, ['later']).start()", "later\n"),
    ],
)
def test_what_is_printed(tool, code, output):
    assert tool.python(code) == output


def test_c28_printing_nothing_is_a_success_and_a_traceback_is_an_error(tool):
    with ToolRunner([tool.python]) as runner:
        runner.start(
            "turn",
            [
                ToolCall("python", {"code": "x = 1"}),
                ToolCall("python", {"code": "print('before')\n1 / 0"}),
                ToolCall("python", {"code": "def f(:"}),
                ToolCall("python", {"code": "raise SystemExit('given up')"}),
                ToolCall("python", {"code": ""}),
            ],
        )
        ((_, results),) = runner.poll(30)
        stats = runner.stats()["python"]
    assert [r.failure for r in results] == [None, "tool_error", "tool_error", "tool_error", None]
    assert results[0].content == results[4].content == ""
    assert results[1].content.startswith('before\nTraceback (most recent call last):\n  File "<python>", line 2')
    assert results[1].content.endswith("ZeroDivisionError: division by zero\n")
    assert "worker.py" not in results[1].content and "SyntaxError" in results[2].content
    assert "given up" in results[3].content
    assert (stats.calls, stats.failures, stats.tool_errors) == (5, 3, 3)


def test_a_call_over_time_is_a_timeout(fusion_url):
    for name in ("bubblewrap", "sandbox_fusion"):
        tool = PythonTool(name, timeout_s=1, preload=[], url=fusion_url if name == "sandbox_fusion" else None)
        with ToolRunner([tool.python], {"python": ToolOptions(timeout_s=20)}) as runner:
            runner.start("turn", [ToolCall("python", {"code": "print('so far', flush=True)\nwhile True: pass"})])
            ((_, (result,)),) = runner.poll(30)
        tool.close()
        assert result.failure == "timeout"
        assert "The code ran longer than 1 s and was stopped." in result.content
    assert "so far" in result.content or name == "sandbox_fusion"


def test_random_numbers_differ_from_call_to_call():
    tool = PythonTool(preload=["numpy"])
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())"
    answers = {number for _ in range(3) for number in tool.python(code).split()}
    assert len(answers) == 6
    assert len({tool.python("print(hash('x'))") for _ in range(2)}) == 1
    tool.close()


def test_c12_long_output_keeps_head_and_tail():
    tool = PythonTool(preload=[])
    with ToolRunner([tool.python], {"python": ToolOptions(max_output_chars=500)}) as runner:
        code = "print('first')\nfor n in range(200_000): print(n)\nprint('last')"
        runner.start("turn", [ToolCall("python", {"code": code})])
        ((_, (result,)),) = runner.poll(30)
    tool.close()
    assert result.failure is None and len(result.content) <= 500
    assert result.content.startswith("first\n0\n1\n") and result.content.endswith("199999\nlast\n")
    assert "left out" in result.content


def test_modules_that_are_not_preloaded_can_be_imported():
    tool = PythonTool(preload=[], timeout_s=60)
    assert tool.python("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x, x)") == "x**2/2\n"
    with pytest.raises(ToolError, match="No module named 'no_such_module'"):
        tool.python("import no_such_module")
    tool.close()


@pytest.mark.parametrize("sandbox", ["bubblewrap", "landlock"])
def test_more_folders_can_be_made_readable(sandbox):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "data.txt")
        file.write_text("figures")
        tool = PythonTool(sandbox, preload=[], readable=[folder])
        assert tool.python(f"print(open({str(file)!r}).read())") == "figures\n"
        with pytest.raises(ToolError, match="Error"):
            tool.python(f"open({str(file)!r}, 'w')")
        tool.close()


def test_a_readable_folder_must_exist():
    with pytest.raises(ValueError, match="do not exist"):
        PythonTool(readable=["/no/such/folder"])


def test_a_warm_parent_that_dies_is_started_again():
    tool = PythonTool(preload=[], timeout_s=20)
    tool.preflight()
    box = tool._backend
    with ThreadPoolExecutor() as pool:
        running = pool.submit(tool.python, "import time\ntime.sleep(15)")
        top = psutil.Process(box._parent._process.pid)
        deadline = time.monotonic() + 10
        while len(top.children(recursive=True)) < 3:
            assert time.monotonic() < deadline
        box._parent._process.kill()
        with pytest.raises(InfrastructureError, match="ended during a call"):
            running.result()
    assert tool.python("1 + 1") == "2\n"
    tool.close()
    tool.close()


def test_the_recipe_names_it():
    tools = resolve_tools([{"name": "python", "arguments": {"preload": [], "timeout_s": 3}, "timeout_s": 10}])
    tools.preflight()
    schema = tools.schemas()[0]["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]
    tools.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sandbox": "docker"}, "choose one of bubblewrap, landlock, sandbox_fusion, unprotected"),
        ({"sandbox": "sandbox_fusion"}, "`url` belongs to"),
        ({"url": "http://localhost"}, "`url` belongs to"),
        ({"timeout_s": 0}, "must be positive"),
        ({"uid": 0}, "unprivileged"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        PythonTool(**arguments)


def test_without_bubblewrap_it_refuses_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(walls, "find_bubblewrap", lambda: None)
    with pytest.raises(InfrastructureError, match="apt install bubblewrap.*'landlock' needs neither"):
        PythonTool(preload=[]).preflight()


def test_without_user_namespaces_it_refuses(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(walls, "find_bubblewrap", lambda: str(fake))
    with pytest.raises(InfrastructureError, match="No permissions to create new namespace.*allow user namespaces"):
        PythonTool(preload=[]).python("print('must not run')")


def test_without_a_new_enough_landlock_it_refuses(monkeypatch):
    def older_kernel(*arguments):
        for command, user in walls.commands(*arguments):
            yield (
                [*command[:-1], command[-1].replace("worker.main", "worker.landlock.NEEDED_ABI = 99; worker.main")],
                user,
            )

    monkeypatch.setattr(launch, "commands", older_kernel)
    with pytest.raises(InfrastructureError, match="99 is needed.*Use Linux 6.12 or newer"):
        PythonTool("landlock", preload=[]).python("print('must not run')")


def test_a_module_that_cannot_be_preloaded_is_named():
    with pytest.raises(InfrastructureError, match="No module named 'no_such_module'"):
        PythonTool(preload=["no_such_module"]).preflight()


@pytest.mark.parametrize("broken", ["status", "sandbox"])
def test_a_remote_sandbox_that_fails(fusion_url, monkeypatch, broken):
    monkeypatch.setattr(FusionServer, "broken", broken)
    tool = PythonTool("sandbox_fusion", url=fusion_url)
    with pytest.raises(InfrastructureError, match="503|no workers"):
        tool.preflight()
    tool.close()


def test_a_remote_sandbox_that_is_not_there(fusion_url):
    tool = PythonTool("sandbox_fusion", url="http://127.0.0.1:9")
    with pytest.raises(InfrastructureError, match="does not answer"):
        tool.preflight()
    tool.close()
