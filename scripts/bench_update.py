"""
Time, memory and agreement of the policy update with and without prefix sharing.

For each case one micro-batch goes forward and backward through a causal language model, once as TRL does it and once
with [`~arpo_trl.training.prefix_sharing.PrefixSharingMixin`], in turns.

```shell
python scripts/bench_update.py --json bench_update.json
python scripts/bench_update.py --cases grpo_group arpo_tree --device cuda --dtype bfloat16 --model Qwen/Qwen3-0.6B
```
"""

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from arpo_trl.training.prefix_sharing import PrefixSharingMixin


CASES = ("grpo_group", "arpo_tree", "long_prompt", "no_sharing")


@dataclass
class BenchmarkArguments:
    """
    Args:
        cases (`list[str]`, *optional*, defaults to all):
            Cases to run, among `"grpo_group"`, `"arpo_tree"`, `"long_prompt"` and `"no_sharing"`.
        model (`str` or `None`, *optional*):
            Model to load. By default a Llama of 4 million parameters with random weights.
        device (`str`, *optional*, defaults to `"cpu"`):
            Where to run.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Data type of the parameters.
        repeats (`int`, *optional*, defaults to `3`):
            Timed updates of each kind; the fastest counts, which other programs disturb least.
        max_packed_tokens (`int`, *optional*, defaults to `16384`):
            Most tokens in one packed forward.
        seed (`int`, *optional*, defaults to `0`):
            Seed of weights and rows.
        json (`str` or `None`, *optional*):
            File the results are written to.
    """

    cases: list[str] = field(default_factory=lambda: list(CASES), metadata={"choices": CASES})
    model: str | None = field(default=None, metadata={"help": "Model to load instead of a small Llama."})
    device: str = field(default="cpu", metadata={"help": "Where to run."})
    dtype: str = field(default="float32", metadata={"help": "Data type of the parameters."})
    repeats: int = field(default=3, metadata={"help": "Timed updates of each kind."})
    max_packed_tokens: int = field(default=16384, metadata={"help": "Most tokens in one packed forward."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and rows."})
    json: str | None = field(default=None, metadata={"help": "File the results are written to."})


class UpdateTrainer(PrefixSharingMixin, GRPOTrainer):
    """A trainer reduced to what computing log-probabilities reads."""

    def __init__(self, model, max_packed_tokens):
        self.model, self.ref_model, self.aux_loss_enabled = model, None, False
        self.accelerator = Accelerator(cpu=model.device.type == "cpu")
        self.args = SimpleNamespace(prefix_sharing="on", max_packed_tokens=max_packed_tokens, report_to=[])
        self.state = SimpleNamespace(global_step=0)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._prefix_sharing_enabled = self._resolve_prefix_sharing()


def make_rows(case: str, vocab_size: int, rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """
    Rows of one micro-batch.

    - `grpo_group`: 16 rows, one prompt of 436 tokens, 150 sampled tokens each.
    - `long_prompt`: the same with a prompt of 2,000 tokens.
    - `arpo_tree`: 16 rows, one prompt of 1,024 tokens; 8 roots, 8 forks of earlier rows after a random tool result.
      A row makes 2 to 4 tool calls, samples 40 to 80 tokens a turn and reads 100 to 200 a result.
    - `no_sharing`: 16 rows of the size of `grpo_group`'s that share no token.

    Args:
        case (`str`):
            Name of the case.
        vocab_size (`int`):
            Number of token ids.
        rng (`random.Random`):
            Source of lengths, forks and token ids.

    Returns:
        `list[tuple[list[int], list[int]]]`: Prompt and completion ids of each row.
    """

    def tokens(length):
        return [rng.randrange(vocab_size) for _ in range(length)]

    if case == "no_sharing":
        return [([row, *tokens(435)], tokens(150)) for row in range(16)]
    if case in ("grpo_group", "long_prompt"):
        prompt = tokens(436 if case == "grpo_group" else 2000)
        return [(prompt, tokens(150)) for _ in range(16)]

    prompt = tokens(1024)
    rows = []  # each a list of turns: sampled tokens and, but for the last turn, a tool result
    for index in range(16):
        parent = [] if index < 8 else rng.choice(rows)
        kept = rng.randrange(1, len(parent)) if parent else 0
        num_calls = max(rng.randint(2, 4), kept)
        turns = [tokens(rng.randint(40, 80) + rng.randint(100, 200)) for _ in range(num_calls - kept)]
        rows.append([*parent[:kept], *turns, tokens(rng.randint(40, 80))])
    return [(prompt, [token for turn in turns for token in turn]) for turns in rows]


def collate(rows: list[tuple[list[int], list[int]]], device: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Left-padded prompts and right-padded completions as TRL lays them out: ids, mask, completion width."""
    prompt_width = max(len(prompt) for prompt, _ in rows)
    completion_width = max(len(completion) for _, completion in rows)
    input_ids = torch.zeros(len(rows), prompt_width + completion_width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(rows):
        columns = slice(prompt_width - len(prompt), prompt_width + len(completion))
        input_ids[row, columns] = torch.tensor(prompt + completion)
        attention_mask[row, columns] = 1
    return input_ids.to(device), attention_mask.to(device), completion_width


def peak_memory(function: Callable[[], object], device: str) -> int:
    """Largest number of bytes that PyTorch holds while `function` runs, beyond what it held before."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes))


def run_case(case: str, model: torch.nn.Module, args: BenchmarkArguments) -> dict:
    """
    Run one case both ways.

    Args:
        case (`str`):
            Name of the case.
        model ([`~transformers.PreTrainedModel`]):
            Model with TRL's fused LM head.
        args ([`BenchmarkArguments`]):
            Options.

    Returns:
        `dict`: What the command prints and writes for the case.
    """
    rows = make_rows(case, model.config.vocab_size, random.Random(args.seed))
    input_ids, attention_mask, width = collate(rows, args.device)
    trainer = UpdateTrainer(model, args.max_packed_tokens)
    mask = attention_mask[:, -width:]
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(args.seed)).to(args.device)

    def update(method):
        model.zero_grad(set_to_none=True)
        logps, entropies, _ = method(trainer, model, input_ids, attention_mask, width, compute_entropy=True)
        ratio = torch.exp(logps - logps.detach())
        (-(ratio * advantages * mask).sum() / mask.sum()).backward()
        if args.device != "cpu":
            torch.cuda.synchronize()
        return logps.detach(), entropies.detach(), {name: param.grad for name, param in model.named_parameters()}

    methods = {
        "trl": GRPOTrainer._get_per_token_logps_and_entropies,
        "shared": UpdateTrainer._get_per_token_logps_and_entropies,
    }
    results = {name: update(method) for name, method in methods.items()}
    memory = {name: peak_memory(lambda method=method: update(method), args.device) for name, method in methods.items()}
    seconds = {name: [] for name in methods}
    for _ in range(args.repeats):
        for name, method in methods.items():
            start = time.perf_counter()
            update(method)
            seconds[name].append(time.perf_counter() - start)

    (logps, entropies, gradients), (shared_logps, shared_entropies, shared_gradients) = (
        results["trl"],
        results["shared"],
    )
    trl_s, shared_s = min(seconds["trl"]), min(seconds["shared"])
    return {
        "case": case,
        "tokens": int(attention_mask.sum()),
        "token_fraction": trainer._metrics["train"]["prefix_sharing/token_fraction"][-1],
        "trl_s": trl_s,
        "shared_s": shared_s,
        "speedup": trl_s / shared_s,
        "trl_mib": memory["trl"] / 2**20,
        "shared_mib": memory["shared"] / 2**20,
        "memory_ratio": memory["shared"] / memory["trl"],
        "max_abs_diff": max(
            (logps - shared_logps).abs().max().item(), (entropies - shared_entropies).abs().max().item()
        ),
        "max_relative_gradient_diff": max(
            ((gradients[name] - shared_gradients[name]).norm() / gradients[name].norm()).item() for name in gradients
        ),
    }


def load_model(args: BenchmarkArguments) -> torch.nn.Module:
    """The model to benchmark, in training mode, with the fused LM head `GRPOTrainer` gives it."""
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    else:
        # The proportions of SmolLM2-135M at 4 million parameters
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.to(args.device).train()


def make_parser() -> HfArgumentParser:
    return HfArgumentParser(BenchmarkArguments)


def main() -> None:
    (args,) = make_parser().parse_args_into_dataclasses()
    model = load_model(args)
    print(f"{'case':<12} {'tokens':>7} {'fraction':>8} {'TRL s':>8} {'ours s':>8} {'speedup':>7} ", end="")
    print(f"{'TRL MiB':>8} {'ours MiB':>8} {'ratio':>6} {'abs diff':>9} {'grad diff':>9}")
    results = []
    for case in args.cases:
        result = run_case(case, model, args)
        results.append(result)
        print(
            "{case:<12} {tokens:>7} {token_fraction:>8.3f} {trl_s:>8.3f} {shared_s:>8.3f} {speedup:>7.2f} "
            "{trl_mib:>8.0f} {shared_mib:>8.0f} {memory_ratio:>6.2f} {max_abs_diff:>9.1e} "
            "{max_relative_gradient_diff:>9.1e}".format(**result),
            flush=True,
        )
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
