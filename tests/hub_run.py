"""Trains, pushes and loads again, in a process whose Hub is the one that HF_ENDPOINT names."""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo_trl import AEPOConfig, AEPOTrainer, ARPOConfig, ARPOTrainer
from arpo_trl.commands.cli import main as arpo_trl
from arpo_trl.commands.train import finish
from arpo_trl.training.adapters import is_adapter, load_adapter, merge_adapter
from arpo_trl.training.hub import push_model
from tests import scripted_training


def run(classes, model_dir, folder, **options):
    trainer, _ = scripted_training.build(
        *classes,
        model_dir,
        folder,
        **{
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "learning_rate": 1e-2,
            "num_iterations": 1,
            **options,
        },
    )
    trainer.train()
    return trainer


def lora(model_dir: str):
    """What the trainer gets instead of a whole model."""

    def from_pretrained(name: str, **kwargs):
        model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    return patch.object(scripted_training, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40, 60)[None]).logits


def main(model_dir: str, folder: str) -> None:
    # A whole model, with its checkpoints as revisions.
    full = run(
        (ARPOTrainer, ARPOConfig),
        model_dir,
        f"{folder}/full",
        push_to_hub=True,
        hub_model_id="tester/full",
        rollout_log=True,
        save_strategy="steps",
        save_steps=1,
    )
    full.evaluate(full.train_dataset)
    full.push_to_hub(dataset_name="org/questions")
    assert arpo_trl(["push", f"{folder}/full", "team/steps", "--checkpoints", "--private"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained("tester/full", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(full.model))
    first = AutoModelForCausalLM.from_pretrained("team/steps", revision="step-1", dtype=torch.float32)
    assert not torch.equal(logits(first), logits(full.model))
    assert AutoTokenizer.from_pretrained("tester/full").chat_template

    # An adapter, as it is and merged; AEPO.
    with lora(model_dir):
        adapter = run((AEPOTrainer, AEPOConfig), model_dir, f"{folder}/adapter", hub_model_id="tester/adapter")
    adapter.push_to_hub(dataset_name=f"{folder}/train.jsonl")
    assert arpo_trl(["push", f"{folder}/adapter", "tester/merged", "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("tester/merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapter.model), rtol=0, atol=1e-4)
    assert (
        logits(merged) - logits(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    ).abs().max() > 1e-2
    again = load_adapter("tester/adapter", adapter.args, {})
    assert torch.equal(logits(again), logits(adapter.model))
    assert all(parameter.requires_grad for name, parameter in again.named_parameters() if "lora_" in name)
    push_model(f"{folder}/adapter", "tester/revised", revision="v1")
    assert is_adapter("tester/revised", "v1") and not is_adapter("tester/revised")
    adapter.args.model_init_kwargs = {"revision": "v1"}
    arguments = {}
    revised = load_adapter("tester/revised", adapter.args, arguments)
    assert torch.equal(logits(revised), logits(adapter.model))
    assert arguments["processing_class"].chat_template
    merged_here = merge_adapter("tester/adapter", f"{folder}/merged_here")
    assert torch.equal(logits(merged_here), logits(merged))

    # The baseline tells that it did not fork.
    baseline = run((ARPOTrainer, ARPOConfig), model_dir, f"{folder}/grpo", branching=False)
    finish(baseline, SimpleNamespace(dataset_name=None), baseline.args)
    assert arpo_trl(["push", f"{folder}/grpo", "tester/baseline"]) == 0

    # Faults are one sentence.
    assert arpo_trl(["push", f"{folder}/full", "tester/full", "--merge"]) == 1
    assert arpo_trl(["push", folder, "tester/nothing"]) == 1
    assert arpo_trl(["push", folder, "tester/nothing", "--checkpoints"]) == 1


if __name__ == "__main__":
    main(*sys.argv[1:])
