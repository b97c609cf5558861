"""Tests in the manner of TRL's own of `GRPOTrainer`, for `scripts/peer_tests.py`: one for each verdict that it knows."""

from unittest.mock import patch

import pytest
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from .testing_utils import TrlTestCase, require_no_such_package


def multiply_tool(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


# Tokens of Qwen's: a call with two right arguments, one with a wrong name, no call, and an answer.
CALL = "151657 198 4913 606 788 330 64648 22785 497 330 16370 788 5212 64 788 220 18 11 330 65 788 220 19 11248 151658 151645"
CALL = [int(number) for number in CALL.split()]
WRONG_CALL = [66 if token == 65 else token for token in CALL]
NO_CALL = [40, 1513, 944, 1414, 894, 5392, 151645] + [151643] * (len(CALL) - 7)
ANSWER = [17453, 0, 151645]


def says(input_ids, **kwargs):
    rows = [CALL, WRONG_CALL, NO_CALL] if len(input_ids) == 3 else [ANSWER] * len(input_ids)
    return torch.cat([input_ids, torch.tensor(rows)], dim=1)


def length(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]


class TestGRPOTrainer(TrlTestCase):
    def trainer(self, model="tiny-Qwen2ForCausalLM-2.5", prompts="standard_prompt_only", tools=None, **options):
        """A trainer that makes one update on three rows."""
        return GRPOTrainer(
            model=f"trl-internal-testing/{model}",
            reward_funcs=["trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5", length],
            args=GRPOConfig(
                output_dir=self.tmp_dir,
                learning_rate=0.1,
                per_device_train_batch_size=3,
                num_generations=3,
                max_steps=1,
                **{"max_completion_length": 8, **options},
            ),
            train_dataset=load_dataset("trl-internal-testing/zen", prompts, split="train"),
            tools=tools,
        )

    def test_training(self):
        trainer = self.trainer()
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        assert not any(torch.equal(before[name], new) for name, new in trainer.model.named_parameters())

    def test_tools_and_a_mocked_generate(self):
        trainer = self.trainer(
            "tiny-Qwen3ForCausalLM", "conversational_prompt_only", [multiply_tool], max_completion_length=128
        )
        with patch.object(trainer.model, "generate", side_effect=says):
            trainer.train()
        figures = {name: value for log in trainer.state.log_history for name, value in log.items()}
        assert figures["tools/call_frequency"] == pytest.approx(2 / 3)
        assert figures["tools/failure_frequency"] == pytest.approx(1 / 2)

    def test_what_is_refused(self):
        self.trainer(generation_kwargs={"no_repeat_ngram_size": 2}).train()

    def test_what_only_trls_class_has(self):
        assert GRPOTrainer.__init__.__module__ == "trl.trainer.grpo_trainer"

    def test_a_model_that_is_not_there(self):
        self.trainer("no-such-model")

    @require_no_such_package
    def test_what_is_not_installed(self):
        raise AssertionError("This should not run.")
