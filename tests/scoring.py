"""What the tests of prefix sharing score: small models, rows that fork, and a trainer without the training."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from arpo_trl.training.prefix_sharing import PrefixSharingMixin


VOCAB_SIZE = 61
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES),
    "smollm": LlamaConfig(**SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
CONFIGS["smollm"].tie_word_embeddings = True


class ScoringTrainer(PrefixSharingMixin, GRPOTrainer):
    """A trainer reduced to what computing log-probabilities reads."""

    def __init__(self, model, prefix_sharing="on", max_packed_tokens=16384, aux_loss_enabled=False, accelerator=None):
        self.model, self.ref_model, self.aux_loss_enabled = model, None, aux_loss_enabled
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.args = SimpleNamespace(prefix_sharing=prefix_sharing, max_packed_tokens=max_packed_tokens, report_to=[])
        self.state = SimpleNamespace(global_step=0)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._prefix_sharing_enabled = self._resolve_prefix_sharing()


def make_model(config: PreTrainedConfig, **head_kwargs) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"), **head_kwargs)
    return model.train()


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Left-padded prompts, right-padded completions: ids, mask and the width of the completions."""
    prompt_width = max(len(prompt) for prompt, _ in rows)
    width = max(len(completion) for _, completion in rows)
    input_ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(rows):
        columns = slice(prompt_width - len(prompt), prompt_width + len(completion))
        input_ids[row, columns] = torch.tensor(prompt + completion)
        attention_mask[row, columns] = 1
    return input_ids, attention_mask, width


def random_rows(seed: int, num_rows: int = 9, max_turn: int = 12) -> list[tuple[list[int], list[int]]]:
    """Two groups of unequal rows, each but the first of its group forked from an earlier one."""
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(VOCAB_SIZE, size=rng.integers(low, high + 1)).tolist()

    groups = [(tokens(1, max_turn), []) for _ in range(2)]
    for index in range(num_rows):
        prompt, completions = groups[index % 2]
        parent = completions[rng.integers(len(completions))] if completions else []
        kept = parent[: rng.integers(len(parent) + 1)]
        completions.append(kept + tokens(1, max_turn))
    return [(prompt, completion) for prompt, completions in groups for completion in completions]
