"""Warnings about a training run that will not learn what it should: once each, with what to do about it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import TrainerCallback


logger = logging.getLogger(__name__)

# Steps in a row (without a tool call: the first steps) after which it is no accident.
PATIENCE = 3
# Nats a token. Below it the rows of a prompt are all but copies of each other.
COLLAPSED_ENTROPY = 0.02
# Mean |log π_train − log π_engine| of a token in nats, where both should be the same policy. Rounding gives 0.001 to
# 0.02; more is another model.
MISMATCH = 0.1
# Share of the sampled tokens that the importance sampling correction may take out of the loss.
DROPPED_TOKENS = 0.2


class Symptom(NamedTuple):
    """Something wrong with a step: `message` says what to do. `patience` steps in a row make it worth a warning."""

    name: str
    patience: int
    message: str


class TrainingWarnings(TrainerCallback):
    """Looks at the metrics of each step.

    Calls that all fail are reported by [`~arpo_trl.tools.runner.ToolRunner`], where the error is known.

    Args:
        metrics (`Mapping[str, Sequence[float]]`):
            The trainer's training metrics since the last log, by name.
        dialect (`str`, *optional*):
            How tool calls look, where there are tools.
        sample (`Callable[[], str]`, *optional*):
            Gives the text of one of the last rows.
    """

    def __init__(
        self,
        metrics: Mapping[str, Sequence[float]],
        dialect: str | None = None,
        sample: Callable[[], str] = str,
    ):
        self._metrics, self._dialect, self._sample = metrics, dialect, sample
        self._given: set[str] = set()
        self._in_a_row: dict[str, int] = {}
        self._steps = 0
        self._called = False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: which warnings were given, and what has been wrong for how long."""
        return {
            "given": sorted(self._given),
            "in_a_row": self._in_a_row,
            "steps": self._steps,
            "called": self._called,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a [`state_dict`]."""
        self._given, self._in_a_row = set(state["given"]), state["in_a_row"]
        self._steps, self._called = state["steps"], state["called"]

    def on_step_end(self, args, state, control, **kwargs):
        latest = {name: values[-1] for name, values in self._metrics.items() if values}
        self._steps += 1
        found = list(symptoms(latest, args.mask_truncated_completions))
        self._in_a_row = {symptom.name: self._in_a_row.get(symptom.name, 0) + 1 for symptom in found}
        for symptom in found:
            if self._in_a_row[symptom.name] >= symptom.patience:
                self._warn(state, symptom.name, symptom.message)
        self._called |= latest.get("rollout/tool_calls", 0) > 0
        if self._steps == PATIENCE:
            self._check_calls(state)

    def on_train_end(self, args, state, control, **kwargs):
        if 0 < self._steps < PATIENCE:
            self._check_calls(state)

    def _check_calls(self, state) -> None:
        if self._dialect is None or self._called:
            return
        shape = {
            "native": "as the chat template writes them",
            "tagged": "as text in a tag of the tool's name, <search>…</search> for `search`",
        }.get(self._dialect, "which is your own")
        self._warn(
            state,
            "no_calls",
            f"No tool was called in the first {self._steps} steps, so no row forks. Calls are read in the "
            f"'{self._dialect}' dialect, {shape}. If the row below calls in another way, set `dialect`; if it does not "
            "try to, say in the system prompt how to call and when, or start from a model that was fine-tuned on tool "
            f"calls.\n{self._sample()}",
        )

    def _warn(self, state, name: str, message: str) -> None:
        if name not in self._given and state.is_world_process_zero:
            logger.warning(message)
        self._given.add(name)


def symptoms(metrics: Mapping[str, float], mask_truncated: bool = False) -> Iterator[Symptom]:
    """What is wrong with a step.

    Args:
        metrics (`Mapping[str, float]`):
            Those of one step.
        mask_truncated (`bool`, *optional*, defaults to `False`):
            Whether rows that were cut off are left out of the update.
    """
    cut = metrics.get("completions/clipped_ratio", 0.0)
    if cut == 1.0:
        lost = ", and mask_truncated_completions=True leaves them all out of the update" if mask_truncated else ""
        yield Symptom(
            "all_truncated",
            PATIENCE,
            f"Every row was cut off before its answer{lost}. Raise max_completion_length, or rollout_timeout if "
            "rollout/failed_rows is above 0; if rows never stop, check that the model ends a turn with its EOS token.",
        )
    if (empty := metrics.get("rollout/empty_rows", 0.0)) > 0:
        yield Symptom(
            "empty_rows",
            1,
            f"{empty:.0%} of the rows have no sampled token, so there is nothing to train on in them. Leave long "
            "prompts out with max_prompt_length, or raise vllm_max_model_length; if rollout/failed_rows is above 0, "
            "look for errors of the engine above.",
        )
    if (unscored := metrics.get("rollout/unscored_rows", 0.0)) > 0.5:
        yield Symptom(
            "unscored_rows",
            1,
            f"{unscored:.0%} of the rows got no reward and are left out of the update. Look for failing tool backends "
            "(tools/*/infrastructure) and for reward functions that return None.",
        )
    if metrics.get("frac_reward_zero_std") == 1.0:
        yield Symptom(
            "equal_rewards",
            PATIENCE,
            f"All rows of a prompt get the same reward (mean {metrics.get('reward', float('nan')):.3g}), for every "
            "prompt: advantages are 0 and nothing is learnt. Take prompts that the model answers right some of the "
            "time, raise num_generations, or check the reward function.",
        )
    if (entropy := metrics.get("entropy", 1.0)) < COLLAPSED_ENTROPY:
        yield Symptom(
            "entropy",
            PATIENCE,
            f"The policy's entropy is {entropy:.2g} nats a token: it has collapsed, rows hardly differ and few fork. "
            "Lower learning_rate, raise epsilon_high or temperature, or set beta above 0.",
        )
    mismatch = metrics.get("sampling/sampling_logp_difference/mean", 0.0)
    if mismatch > MISMATCH:
        yield Symptom(
            "mismatch",
            1,
            f"Importance ratios are far from 1: the engine's and the trainer's log-probabilities of the same tokens "
            f"differ by {mismatch:.2g} nats on average. Check that both use the same dtype, temperature and weights.",
        )
    if (dropped := metrics.get("sampling/masked_token_frac", 0.0)) > DROPPED_TOKENS:
        yield Symptom(
            "dropped_tokens",
            PATIENCE,
            f"The importance sampling correction takes {dropped:.0%} of the sampled tokens out of the update. Set "
            "vllm_importance_sampling_mode='token_truncate': at the sequence level long rows leave its range.",
        )
