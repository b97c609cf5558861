"""Warnings about runs that cannot learn: when, once, and what they say."""

import logging
from types import SimpleNamespace

import pytest

from arpo_trl.reporting.warnings import PATIENCE, TrainingWarnings, symptoms


HEALTHY = {
    "reward": 0.4,
    "frac_reward_zero_std": 0.25,
    "completions/clipped_ratio": 0.1,
    "entropy": 0.4,
    "rollout/tool_calls": 90.0,
    "rollout/empty_rows": 0.0,
    "rollout/unscored_rows": 0.0,
    "sampling/sampling_logp_difference/mean": 0.004,
    "sampling/masked_token_frac": 0.0,
}
SICK = {
    "all_truncated": ({"completions/clipped_ratio": 1.0}, "max_completion_length"),
    "empty_rows": ({"rollout/empty_rows": 0.25}, "25% of the rows have no sampled token"),
    "unscored_rows": ({"rollout/unscored_rows": 0.75}, "tools/*/infrastructure"),
    "equal_rewards": ({"frac_reward_zero_std": 1.0}, "num_generations"),
    "entropy": ({"entropy": 0.001}, "learning_rate"),
    "mismatch": ({"sampling/sampling_logp_difference/mean": 0.5}, "same dtype"),
    "dropped_tokens": ({"sampling/masked_token_frac": 0.9}, "token_truncate"),
}


class Run:
    """Steps of a trainer that does nothing but measure."""

    def __init__(self, main_process: bool = True, **options):
        self.metrics: dict[str, list[float]] = {}
        self.callback = TrainingWarnings(self.metrics, **options)
        self.state = SimpleNamespace(is_world_process_zero=main_process)
        self.args = SimpleNamespace(mask_truncated_completions=False)

    def step(self, **changes: float) -> None:
        self.metrics.clear()
        self.metrics.update({name: [value] for name, value in {**HEALTHY, **changes}.items()})
        self.callback.on_step_end(self.args, self.state, None)

    def end(self) -> None:
        self.callback.on_train_end(self.args, self.state, None)


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_healthy_run_is_left_alone(warned):
    run = Run(dialect="native")
    for _ in range(10):
        run.step()
    run.end()
    assert warned() == [] and not list(symptoms({}))


@pytest.mark.parametrize("name", SICK)
def test_c24_each_symptom_is_reported_once_with_what_to_do(name, warned):
    changes, remedy = SICK[name]
    [symptom] = symptoms({**HEALTHY, **changes})
    run = Run(dialect="native")
    for step in range(1, 8):
        run.step(**changes)
        assert len(warned()) == (step >= symptom.patience)
    assert remedy in warned()[0]


def test_what_passes_is_no_symptom(warned):
    run = Run()
    for _ in range(4):
        for _ in range(PATIENCE - 1):
            run.step(frac_reward_zero_std=1.0)
        run.step()
    assert warned() == []


@pytest.mark.parametrize(("dialect", "shape"), [("tagged", "<search>"), ("native", "chat template")])
def test_c09_no_tool_call_names_the_dialect_and_shows_a_row(dialect, shape, warned):
    run = Run(dialect=dialect, sample=lambda: "Action: search[Paris]")
    for _ in range(PATIENCE):
        assert warned() == []
        run.step(**{"rollout/tool_calls": 0.0})
    run.step(**{"rollout/tool_calls": 0.0})
    [message] = warned()
    assert f"'{dialect}'" in message and shape in message and "Action: search[Paris]" in message


def test_c09_a_run_shorter_than_that_is_looked_at_when_it_ends(warned):
    run = Run(dialect="native")
    run.step(**{"rollout/tool_calls": 0.0})
    run.end()
    assert len(warned()) == 1 and "first 1 steps" in warned()[0]


@pytest.mark.parametrize("options", [{"dialect": None}, {"dialect": "native", "main_process": False}])
def test_no_word_of_calls_without_tools_or_from_other_processes(options, warned):
    run = Run(**options)
    for _ in range(5):
        run.step(**{"rollout/tool_calls": 0.0})
    assert warned() == []


def test_one_call_is_enough(warned):
    run = Run(dialect="native")
    run.step(**{"rollout/tool_calls": 1.0})
    for _ in range(5):
        run.step(**{"rollout/tool_calls": 0.0})
    assert warned() == []
