"""Plugin for pytest that runs a test file of TRL's GRPOTrainer offline, with TRL's class or with ours in its place.

PEER_CLASS says which (`trl` or `arpo`), PEER_RESULTS where to write a JSON object: by test, its outcome and what it said.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import NonCallableMock

import datasets
import torch
import trl
from trl.trainer import grpo_trainer

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.rollout.engines import transformers_engine
from arpo_trl.rollout.engines.protocol import Event
from tests.hub_stand_ins import load_dataset


@dataclass
class CPUConfig(trl.GRPOConfig):
    """TRL's configuration for a machine without a GPU."""

    use_cpu: bool = True
    bf16: bool | None = False


@dataclass
class DropInConfig(ARPOConfig):
    """Ours in its place: rows do not fork, and go on in lock-step, since mocks answer all of them at once."""

    use_cpu: bool = True
    bf16: bool | None = False
    branching: bool = False
    deterministic_rollouts: bool = True


class DropIn(ARPOTrainer):
    """`ARPOTrainer` where a test wants a `GRPOTrainer`: rows do not fork."""

    def __init__(self, model, reward_funcs=None, args=None, *positional, **named):
        args = trl.GRPOConfig() if args is None else args
        super().__init__(model, reward_funcs, args, *positional, **named)


class GenerateOrSample(transformers_engine.TransformersEngine):
    """Our engine never calls a model's `generate`. Where a test has put a mock there, what that says is the rollout."""

    def poll(self):
        if not isinstance(self._model.generate, NonCallableMock):
            return super().poll()
        events, self._cancelled = self._cancelled, []
        requests = [request for request in self._waiting if request.id in self._live_ids]
        self._waiting.clear()
        if not requests:
            return events
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.tensor([[0] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in requests])
        for request, row in zip(requests, self._model.generate(input_ids=ids)[:, longest:].tolist(), strict=True):
            stop = next((i for i, token in enumerate(row) if token in self.stop_token_ids), len(row))
            row = row[: min(stop + 1, request.max_tokens)]
            reason = "stop" if row[-1] in self.stop_token_ids else "length"
            events.append(Event(request.id, row, [-1.0] * len(row), [], reason))
            self._live_ids.remove(request.id)
        return events


results: dict[str, tuple[str, str]] = {}


def pytest_configure(config):
    datasets.load_dataset = load_dataset
    if os.environ["PEER_CLASS"] == "trl":
        trl.GRPOConfig = grpo_trainer.GRPOConfig = CPUConfig
    else:
        trl.GRPOConfig, trl.GRPOTrainer = DropInConfig, DropIn
        transformers_engine.TransformersEngine = GenerateOrSample


def pytest_runtest_logreport(report):
    before = results.get(report.nodeid, ("passed", ""))
    outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    if report.when == "call" or outcome != "passed":
        results[report.nodeid] = (outcome, str(report.longrepr or "")) if before[0] == "passed" else before


def pytest_sessionfinish():
    Path(os.environ["PEER_RESULTS"]).write_text(json.dumps(results))
