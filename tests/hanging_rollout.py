"""A rollout whose tools never end, for a test that ends it from outside. Says when they run."""

import sys

import psutil
from runner_tools import hang

from arpo_trl.rollout.environments import Environments
from arpo_trl.rollout.sampler import Limits, Prompt, Sampler
from arpo_trl.tools.contract import ToolCall
from arpo_trl.tools.options import ToolOptions
from arpo_trl.tools.python import PythonTool
from arpo_trl.tools.runner import ToolRunner
from tests.scripted import CALL, NumberDialect, ScriptedEngine


class Calls(NumberDialect):
    def read(self, ids, finish_reason, tools):
        turn = super().read(ids, finish_reason, tools)
        turn.calls = [ToolCall("hang"), ToolCall("python", {"code": "while True: pass"})]
        return turn


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


if __name__ == "__main__":
    python = PythonTool(timeout_s=600, preload=())
    python.preflight()
    tools = {"hang": hang, "python": python.python}
    options = {"hang": ToolOptions(isolate=True, timeout_s=600), "python": ToolOptions(timeout_s=600)}
    runner = ToolRunner(tools, options)
    warm = processes()

    def say(trees, running) -> None:
        # The sandboxed call is a process of its own.
        if running and processes() > warm and not said:
            said.append(True)
            print("tools hang", flush=True)

    said: list[bool] = []
    engine = ScriptedEngine(lambda request, sampled: (CALL, 1.0))
    sampler = Sampler(engine, Calls(), runner, Limits(100), on_progress=say)
    try:
        sampler.run([Prompt([[7]], 0, Environments(tools))])
    finally:
        runner.close()
        python.close()
    sys.exit("the rollout ended by itself")
