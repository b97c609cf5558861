"""Adapters: trained further, resumed, merged."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo_trl.training.adapters import merge_adapter
from tests.resumable_run import make, result
from tests.small_models import save_tagged_model


CONFIG = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_dir(base_dir, tmp_path_factory) -> str:
    """An adapter that is not its base model; it has no tokenizer."""
    folder = str(tmp_path_factory.mktemp("adapter"))
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base_dir), CONFIG).save_pretrained(folder)
    return folder


def test_an_adapter_is_trained_further_and_resumed(base_dir, adapter_dir, tmp_path):
    """Its own settings hold, the base model stays as it is, and the reference is the adapter as it was."""
    options = {"use_vllm": False, "beta": 0.1, "max_steps": 2, "max_completion_length": 24}
    trainer = make(adapter_dir, str(tmp_path), options, peft_config=LoraConfig(r=8))
    start = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    base = AutoModelForCausalLM.from_pretrained(base_dir).state_dict()
    assert torch.equal(start["base_model.model.model.norm.weight"], base["model.norm.weight"])
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        trained = "lora_" in name and ".default." in name
        assert torch.equal(parameter, start[name]) != trained, name
    assert trainer.model.peft_config["default"].r == 4

    resumed = make(adapter_dir, str(tmp_path), options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert result(resumed) == result(trainer)


def test_a_merged_model_says_what_model_and_adapter_say(base_dir, adapter_dir, tmp_path):
    merge_adapter(adapter_dir, tmp_path)
    ids = torch.arange(4, 18)[None]
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base_dir, tmp_path))
    difference = merged(ids).logits - base(ids).logits
    assert difference.abs().max() > 0.1
    adapted = get_peft_model(base, CONFIG)
    adapted.load_adapter(adapter_dir, "default")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


def test_merging_what_is_no_adapter_says_so(base_dir, tmp_path):
    with pytest.raises(ValueError, match="holds no adapter"):
        merge_adapter(base_dir, tmp_path)
