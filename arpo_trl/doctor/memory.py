"""How much memory a recipe will need, from the model's shape alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """GiB of one process without sharding.

    Args:
        weights, gradients, optimizer (`float`):
            Of the policy; with LoRA gradients and optimizer are the adapter's. A reference model for `beta` > 0 is
            counted in `weights`, unless the adapter can be switched off instead.
        activations (`float`):
            Of a micro-batch, of the longest rows, with gradient checkpointing if the recipe has it.
        logits (`float`):
            Of the same micro-batch, in float32, with their gradient.
        engine (`float`):
            vLLM's weights.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    engine: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.engine

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "logits", "engine")
        return f"{self.total:.1f} GiB (" + ", ".join(f"{name} {getattr(self, name):.1f}" for name in parts) + ")"


def count_parameters(config: "PretrainedConfig") -> int:
    """Parameters of the causal language model that `config` describes; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def estimate(
    config: "PretrainedConfig", parameters: int, args: Any, model_args: Any, row_tokens: int
) -> MemoryEstimate:
    """
    Estimates from above: rows are taken to be as long as they may be.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of the model.
        parameters (`int`):
            Its number of parameters.
        args ([`ARPOConfig`]):
            Of the trainer.
        model_args ([`~trl.ModelConfig`]):
            Data type, LoRA.
        row_tokens (`int`):
            Longest row, prompt and completion.
    """
    text = config.get_text_config()
    size = BYTES.get(str(model_args.dtype).removeprefix("torch."), 4)
    if model_args.load_in_4bit or model_args.load_in_8bit:
        size = 0.5 if model_args.load_in_4bit else 1
    layers, hidden = text.num_hidden_layers, text.hidden_size
    # Rank r on the two large dimensions of the seven projections of a layer; the exact shapes hardly change the sum.
    trained = layers * 7 * model_args.lora_r * 3 * hidden if model_args.use_peft else parameters
    trained_size = 4 if model_args.use_peft else size
    tokens = args.per_device_train_batch_size * row_tokens
    if args.prefix_sharing != "off":
        tokens = min(tokens, args.max_packed_tokens)
    compute = 2 if args.bf16 or args.fp16 else 4
    # One hidden state a layer is kept with checkpointing; without, about 16 of them.
    kept = layers + 16 if args.gradient_checkpointing else 16 * layers
    copies = 2 if args.beta > 0 and not model_args.use_peft else 1
    return MemoryEstimate(
        weights=copies * parameters * size / GIB,
        gradients=trained * trained_size / GIB,
        optimizer=2 * trained * trained_size / GIB,
        activations=tokens * hidden * kept * compute / GIB,
        logits=2 * tokens * text.vocab_size * 4 / GIB,
        engine=parameters * (2 if compute == 2 else 4) / GIB if args.use_vllm else 0.0,
    )
