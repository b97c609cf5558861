"""Prefix sharing in training: with everything TRL combines it with, and in two processes."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from scoring import CONFIGS, VOCAB_SIZE, ScoringTrainer, collate, make_model
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOConfig, GRPOTrainer

from arpo_trl.training.prefix_sharing import PrefixSharingMixin
from tests.sharding import assert_sharded, shard_on_cpu


@dataclass
class SharingGRPOConfig(GRPOConfig):
    prefix_sharing: str = "auto"
    max_packed_tokens: int = 16384


class SharingGRPOTrainer(PrefixSharingMixin, GRPOTrainer):
    pass


def reward(completion_ids, **kwargs):
    return [(sum(ids) % 11) / 10 for ids in completion_ids]


@pytest.mark.parametrize("lora", [False, True])
def test_training_is_the_same_with_and_without(tiny_model_dir, tmp_path, lora):
    """Two iterations over each generation batch, a reference model, gradient checkpointing; groups over two steps."""
    runs = {}
    for prefix_sharing in ("on", "off"):
        args = SharingGRPOConfig(
            output_dir=tmp_path,
            prefix_sharing=prefix_sharing,
            max_packed_tokens=60,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=2,
            num_generations=4,
            num_iterations=2,
            max_completion_length=12,
            max_steps=4,
            beta=0.1,
            gradient_checkpointing=True,
            optim="sgd",  # Adam would turn a rounding difference of a tiny gradient into a step of full length
            learning_rate=0.1,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        trainer = SharingGRPOTrainer(
            model=tiny_model_dir,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict(
                {"prompt": ["Who wrote it?", "The capital of France is", "result of search"]}
            ),
            peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0) if lora else None,
        )
        initial = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        trainer.train()
        runs[prefix_sharing] = trainer, initial

    (shared, initial), (plain, _) = runs["on"], runs["off"]
    logs = [[entry for entry in trainer.state.log_history if "loss" in entry] for trainer in (shared, plain)]
    assert len(logs[0]) == 4
    for one, other in zip(*logs, strict=True):
        # Other metrics are means over micro-batches, which hold other rows
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=1e-4), name
    assert all(entry["prefix_sharing/token_fraction"] < 1 for entry in logs[0])
    assert not any("prefix_sharing/token_fraction" in entry for entry in logs[1])
    expected = dict(plain.model.named_parameters())
    for name, param in shared.model.named_parameters():
        torch.testing.assert_close(param, expected[name], atol=1e-5, rtol=0, msg=name)
    assert max((param - initial[name]).abs().max() for name, param in shared.model.named_parameters()) > 1e-3


def test_two_processes():
    """DDP, then FSDP2. One process has rows that share nearly all, the other rows that share nothing and so need more packs."""
    tests = Path(__file__).parent.parent
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, __file__], env=env, check=True, timeout=200)


def run_process(strategy: str) -> None:
    """What each process of [`test_two_processes`] does: raises where it differs from TRL."""
    plugin = None
    if strategy == "fsdp2":
        shard_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = make_model(CONFIGS["qwen3"])
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if strategy == "fsdp2":
        assert_sharded(model)
    else:
        assert isinstance(model, DistributedDataParallel)
    trainer = ScoringTrainer(model, max_packed_tokens=100, accelerator=accelerator)
    if accelerator.process_index == 0:
        rows = [([1, 2, 3, 4, 5], [6, 7, 8, index]) for index in range(8)]
    else:
        rows = [([index, *range(25)], [*range(index, VOCAB_SIZE - 10)]) for index in range(8)]
    input_ids, attention_mask, width = collate(rows)
    weights = torch.linspace(-1, 1, 8 * width).view(8, width) * attention_mask[:, -width:]

    def score(method):
        model.zero_grad()
        logps, entropies, _ = method(trainer, model, input_ids, attention_mask, width, compute_entropy=True)
        accelerator.backward(((logps + 0.3 * entropies) * weights).sum())
        grads = [param.grad for param in model.parameters()]
        return logps.detach(), [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]

    expected_logps, expected_grads = score(GRPOTrainer._get_per_token_logps_and_entropies)
    logps, grads = score(ScoringTrainer._get_per_token_logps_and_entropies)
    torch.testing.assert_close(logps, expected_logps, atol=1e-5, rtol=0)
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert expected.norm() > 0 and (grad - expected).norm() <= 1e-4 * expected.norm()
    # Process 0 alone would have run one forward
    assert (trainer._metrics["train"]["prefix_sharing/recomputed_tokens"][0] > 0) == (accelerator.process_index == 0)
    with torch.no_grad():
        torch.testing.assert_close(
            trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, width)[0],
            expected_logps,
            atol=1e-5,
            rtol=0,
        )


if __name__ == "__main__":
    run_process("ddp")
    AcceleratorState._reset_state(reset_partial_state=True)
    run_process("fsdp2")
    torch.distributed.destroy_process_group()
