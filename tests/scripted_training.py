"""Trainers on rows from a script: 2 prompts × 4 rows that call a search tool up to twice and fork."""

import functools
import os
import random
import sys
from hashlib import blake2b
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo_trl import ARPOConfig, ARPOTrainer
from tests.scripted import ScriptedEngine
from tests.sharding import shard_on_cpu


QUESTIONS = ["the capital of France", "the capital of user"]
GROUP = 4


def search(query: str) -> str:
    """Searches.

    Args:
        query: What to look for.
    """
    return f"Paris is the {query}."


def reward(completion_ids, **kwargs):
    """Something that differs from row to row and is the same for the same row; `None` for what ends with 7, 7."""
    return [None if ids[-3:-1] == [7, 7] else (sum(ids) % 11) / 10 for ids in completion_ids]


def script(tokenizer, unscored=()):
    """Zero to two searches, then an answer; what it says depends on the path in the tree only.

    Args:
        unscored (collection of `(row, path)`):
            Rows that `reward` gives nothing, by the index of their prompt's first row and their path, as strings.
    """

    @functools.cache
    def turn(row, name, turns):
        rng = random.Random(blake2b(f"{row}/{name}/{turns}".encode(), digest_size=8).digest())
        if (row, name) in unscored:
            ids = [7, 7]
        elif int(turns) < 2 and rng.random() < 0.75:
            call = f'{{"name": "search", "arguments": {{"query": "{rng.choice(QUESTIONS)}"}}}}'
            ids = tokenizer.encode(f"result {rng.randrange(9)}\n<tool_call>\n{call}\n</tool_call>")
        else:
            ids = [rng.randrange(40, 300) for _ in range(rng.randrange(3, 9))]
        level = rng.uniform(0.5, 5.0)
        return [(token, level * rng.uniform(0.8, 1.2)) for token in [*ids, tokenizer.eos_token_id]]

    return lambda request, sampled: turn(*request.id.split("/")[1:])[len(sampled)]


def build(
    trainer_class,
    config_class,
    model_dir,
    output_dir,
    micro_batch=8,
    prompts=slice(None),
    truncated=(),
    unscored=(),
    refused=(),
    rollout_func=None,
    peft_config=None,
    dtype=torch.float32,
    processes=1,
    generate=True,
    **options,
):
    """A trainer and its first generation batch.

    Args:
        micro_batch (`int`):
            Rows of a micro-batch; an optimizer step takes a whole generation batch.
        prompts (`slice`):
            Which prompts this process has.
        truncated, unscored (collection of `(row, path)`):
            Rows that are cut off after a token, or get no reward, by the index of their prompt's first row and their
            path in the tree, as strings.
        refused (collection of `(row, path)`):
            Rows whose requests the engine does not take.
        rollout_func (`Callable`, *optional*):
            For TRL's `GRPOTrainer`, which knows no scripted engine.
        processes (`int`):
            Among how many the prompts are divided, if this one is to get its own from the sampler.
        generate (`bool`):
            Whether to make the batch; if not, the trainer comes alone.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    engine = ScriptedEngine(
        script(tokenizer, unscored), fails=lambda request: tuple(request.id.split("/")[1:3]) in truncated
    )
    engine.stop_token_ids = frozenset([tokenizer.eos_token_id])
    submit = engine.submit

    def submit_or_refuse(request):
        if tuple(request.id.split("/")[1:3]) in refused:
            raise ValueError("refused")
        submit(request)

    engine.submit = submit_or_refuse
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS[prompts]]
    args = config_class(
        output_dir=str(output_dir),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(questions) * GROUP // micro_batch // processes,
        num_generations=GROUP,
        use_cpu=True,
        seed=3,
        **{
            "bf16": False,
            "max_completion_length": 400,
            "num_iterations": 2,
            "epsilon": 0.05,
            "report_to": [],
            **options,
        },
        # Which forks there are would otherwise depend on which tool answers first.
        **({"deterministic_rollouts": True} if issubclass(config_class, ARPOConfig) else {}),
    )

    if args.fsdp:
        shard_on_cpu(args)

    def make_engine(self):
        self._tensor_parallel = None
        return engine

    with patch.object(ARPOTrainer, "_make_engine", make_engine):
        trainer = trainer_class(
            AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype),
            reward,
            args,
            Dataset.from_dict({"prompt": questions}),
            processing_class=tokenizer,
            peft_config=peft_config,
            **({"tools": [search]} if issubclass(trainer_class, ARPOTrainer) else {"rollout_func": rollout_func}),
        )
    if not generate:
        return trainer
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    inputs = [{"prompt": prompt} for prompt in questions for _ in range(GROUP)]
    return trainer, trainer._generate_and_score_completions(inputs)


def move(model, scale=0.02):
    """Changes the weights, the same each time, so that ratios leave the clipping range."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def loss_and_gradient(trainer, *micro_batches):
    trainer.model.zero_grad()
    total = 0.0
    for inputs in micro_batches:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def assert_same_update(one, other, tolerance):
    """Losses and gradients agree to `tolerance`, relative to the largest component where that is above 1."""
    largest = max(one[1].abs().max().item(), 1.0)
    assert one[0] == pytest.approx(other[0], abs=tolerance * largest)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=tolerance * largest)
    assert one[1].abs().max() > 100 * tolerance  # there is something to compare


TWO_PROCESS_RUNS = {
    loss_type: {"loss_type": loss_type, "attribution": attribution, "beta": 0.1}
    for loss_type, attribution in [("grpo", "soft"), ("dr_grpo", "hard"), ("dapo", "hard")]
}


def main(model_dir, output_dir):
    """One of two processes: the updates of AEPO, averaged over both, go to `output_dir/updates.pt`."""
    import torch.distributed as dist

    from arpo_trl import AEPOConfig, AEPOTrainer

    updates = {}
    for name, options in TWO_PROCESS_RUNS.items():
        rank = int(os.environ["RANK"])
        trainer, batch = build(
            AEPOTrainer, AEPOConfig, model_dir, output_dir, micro_batch=4, prompts=slice(rank, rank + 1), **options
        )
        move(trainer.model)
        loss, gradient = loss_and_gradient(trainer, batch)
        update = torch.cat([torch.tensor([loss]), gradient])
        dist.all_reduce(update)
        updates[name] = ((update[0] / 2).item(), update[1:] / 2)
    if rank == 0:
        torch.save(updates, f"{output_dir}/updates.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
