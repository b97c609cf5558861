"""What a configuration may say is checked before a model is loaded, TRL's options too."""

import ast
import inspect
from collections import defaultdict

import pytest
import trl.trainer.grpo_config
import trl.trainer.grpo_trainer
from transformers import TrainingArguments
from trl import GRPOConfig

from arpo_trl import AEPOConfig, ARPOConfig
from arpo_trl.training.config.aepo import AEPO_LOSS_TYPES
from arpo_trl.training.config.checks import TRL_CHOICES


def config(config_class=ARPOConfig, **options):
    return config_class(**{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": [], **options})


def compared_with() -> dict[str, set[str]]:
    """The texts that TRL compares each attribute with, which are those it knows."""
    texts = defaultdict(set)
    for module in (trl.trainer.grpo_trainer, trl.trainer.grpo_config):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                constants = (part for side in node.comparators for part in ast.walk(side))
                texts[node.left.attr] |= {c.value for c in constants if isinstance(getattr(c, "value", None), str)}
    return texts


@pytest.mark.parametrize("option", sorted(set(TRL_CHOICES) - {"vllm_model_impl"}))
def test_our_list_of_choices_is_that_of_the_installed_trl(option):
    assert compared_with()[option] == set(TRL_CHOICES[option])
    assert getattr(GRPOConfig(output_dir="unused", use_cpu=True, bf16=False), option) in TRL_CHOICES[option]


def test_every_option_of_trl_that_is_compared_with_texts_is_in_the_list():
    own = {name for name in GRPOConfig.__dataclass_fields__ if name not in TrainingArguments.__dataclass_fields__}
    assert {name for name, texts in compared_with().items() if len(texts) > 1} & own == set(TRL_CHOICES) - {
        "vllm_model_impl"
    }
    described = GRPOConfig.__dataclass_fields__["vllm_model_impl"].metadata["help"]
    assert all(f"`{name}`" in described for name in TRL_CHOICES["vllm_model_impl"][:2])
    assert set(AEPO_LOSS_TYPES) <= set(TRL_CHOICES["loss_type"])


@pytest.mark.parametrize("option", [*TRL_CHOICES, "cache_implementation", "report_to", "log_level", "ddp_backend"])
def test_a_misspelt_choice_is_said_at_once(option):
    with pytest.raises(ValueError, match=f"`{option}` must be one of .*; you gave 'nonsense'"):
        config(**{option: "nonsense"})


@pytest.mark.parametrize(("option", "values"), TRL_CHOICES.items())
def test_every_choice_is_taken(option, values):
    for value in values:
        assert getattr(config(**{option: value, "vllm_importance_sampling_clip_max": 3.0}), option) == value


def test_scale_rewards_may_be_a_truth_value():
    assert config(scale_rewards=False).scale_rewards == "none"


@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("config_class", [ARPOConfig, AEPOConfig])
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_of_zero_is_refused(config_class, branching, temperature):
    with pytest.raises(ValueError, match=r"temperature \(.*\) must be above 0: rows that are all the same"):
        config(config_class, branching=branching, temperature=temperature)


@pytest.mark.parametrize("option", ["num_generations", "max_completion_length", "per_device_train_batch_size"])
@pytest.mark.parametrize("value", [None, 0, -8])
def test_sizes_without_which_nothing_is_sampled(option, value):
    with pytest.raises(ValueError, match=rf"{option} \({value}\) must be an integer, at least 1"):
        config(**{option: value})
