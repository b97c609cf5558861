"""How much memory a recipe will need, from the model's shape alone."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...training.sharding import syncs_each_batch
from ..launch import Launch


if TYPE_CHECKING:
    from transformers import PretrainedConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30
# What vLLM keeps while it sleeps: CUDA graphs, workspaces, NCCL's buffers.
ASLEEP = 2.0
# A weight in NF4, with the float32 scale of its block of 64.
NF4_BYTES = 0.5 + 4 / 64
# TRL's fused LM head scores tiles of so many tokens and tokens of the vocabulary.
TILE = (4096, 32768)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's memory depends on.

    Args:
        parameters (`int`):
            All of them.
        embeddings (`int`):
            Parameters of the input embedding and the LM head, once if they are tied.
        lora_per_rank (`int`):
            Parameters of an adapter of rank 1 on all linear layers but the LM head.
        num_layers, hidden_size, intermediate_size, vocab_size (`int`):
            As in the model's configuration.
    """

    parameters: int
    embeddings: int
    lora_per_rank: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """GiB of one process.

    Args:
        weights, gradients, optimizer (`float`):
            Of the policy, or of this process's shard; with LoRA gradients and optimizer are the adapter's. A reference
            model for `beta` > 0 is counted in `weights`, unless the adapter can be switched off instead. Under FSDP
            with `sync_each_batch: false` gradients are whole while micro-batches are accumulated.
        gathered (`float`):
            With sharded weights: embeddings, LM head and two layers, which are whole while they compute.
        activations (`float`):
            Of a micro-batch, of the longest rows, with gradient checkpointing if the recipe has it.
        lm_head (`float`):
            A tile of logits and, without LoRA, the LM head's gradient in float32.
        engine (`float`):
            vLLM's weights.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    lm_head: float
    engine: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        parts = {part.name.replace("_", " "): getattr(self, part.name) for part in fields(self)}
        return f"{self.total:.1f} GiB ({', '.join(f'{name} {size:.1f}' for name, size in parts.items() if size)})"


def model_shape(config: "PretrainedConfig") -> ModelShape:
    """The shape of the causal language model that `config` describes; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = {id(part.weight): part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m.weight) not in ends]
    text = config.get_text_config()
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embeddings=sum(weight.numel() for weight in ends.values()),
        lora_per_rank=sum(module.in_features + module.out_features for module in linear),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocab_size=text.vocab_size,
    )


def estimate(
    shape: ModelShape, args: Any, model_args: Any, row_tokens: int, launch: Launch | None = None
) -> MemoryEstimate:
    """
    Estimates from above: rows are taken to be as long as they may be, and to share nothing.

    Args:
        shape ([`ModelShape`]):
            Of the model.
        args ([`ARPOConfig`] or [`~trl.SFTConfig`]):
            Of the trainer.
        model_args ([`~trl.ModelConfig`]):
            Data type, LoRA, quantization.
        row_tokens (`int`):
            Longest row, prompt and completion.
        launch ([`Launch`], *optional*):
            The processes that share the model. If `None`, one.
    """
    launch = launch or Launch()
    compute = 2 if args.bf16 or args.fp16 else 4
    weights, gradients, optimizer = _state(shape, args, model_args, launch, compute)
    activations, lm_head = _working_memory(shape, args, model_args, row_tokens, compute)
    gathered = engine = 0.0
    if launch.sharding in ("fsdp", "zero3"):
        gathered = (shape.embeddings + 2 * (shape.parameters - shape.embeddings) / shape.num_layers) * compute
    if shares_gpu_with_vllm(args):
        engine = shape.parameters * compute / args.vllm_tensor_parallel_size
    parts = (weights, gradients, optimizer, gathered, activations, lm_head, engine)
    return MemoryEstimate(*(part / GIB for part in parts))


def shares_gpu_with_vllm(args: Any) -> bool:
    """Whether vLLM runs in the training processes."""
    return getattr(args, "use_vllm", False) and args.vllm_mode == "colocate"


def _state(shape: ModelShape, args: Any, model_args: Any, launch: Launch, compute: int) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer in one process."""
    deepspeed = launch.sharding.startswith("zero")
    # DeepSpeed keeps the model in the type it computes in, and float32 weights beside the optimizer's moments.
    size = compute if deepspeed else BYTES.get(str(model_args.dtype).removeprefix("torch."), 4)
    linear = NF4_BYTES if model_args.load_in_4bit else 1 if model_args.load_in_8bit else size
    weights = (shape.parameters - shape.embeddings) * linear + shape.embeddings * size
    trained, trained_size = shape.parameters, size
    if model_args.use_peft:
        # TRL keeps adapters of a quantized model in bf16, others in float32.
        trained, trained_size = model_args.lora_r * shape.lora_per_rank, 4 if linear == size else 2
        weights += trained * trained_size
    if getattr(args, "beta", 0) > 0 and not model_args.use_peft:
        weights *= 2
    gradients = trained * trained_size / (launch.num_processes if launch.sharding != "none" else 1)
    if launch.sharding == "fsdp" and args.gradient_accumulation_steps > 1 and not syncs_each_batch(args):
        gradients += trained * compute
    moment = 1 if "8bit" in str(args.optim).lower() else 4 if deepspeed else trained_size
    return (
        weights / (launch.num_processes if launch.sharding in ("fsdp", "zero3") else 1),
        gradients,
        trained * (2 * moment + 4 * deepspeed) / (launch.num_processes if launch.sharding != "none" else 1),
    )


def _working_memory(
    shape: ModelShape, args: Any, model_args: Any, row_tokens: int, compute: int
) -> tuple[float, float]:
    """Bytes of activations and at the LM head."""
    tokens = at_once = args.per_device_train_batch_size * row_tokens
    if getattr(args, "prefix_sharing", "off") != "off" and not (model_args.use_peft and model_args.lora_dropout):
        at_once = min(tokens, args.max_packed_tokens)
    if getattr(args, "token_micro_batches", False):
        tokens = at_once
    per_token = 8 * shape.hidden_size + 4 * shape.intermediate_size
    if args.gradient_checkpointing:
        # Every layer keeps its input, and one layer at a time all that its backward pass needs.
        kept = tokens * shape.num_layers * shape.hidden_size + at_once * per_token
    else:
        kept = tokens * shape.num_layers * per_token
    lm_head = min(at_once, TILE[0]) * min(TILE[1], shape.vocab_size) * compute
    if not model_args.use_peft:
        lm_head += shape.vocab_size * shape.hidden_size * 4
    return kept * compute, lm_head
