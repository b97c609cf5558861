"""FSDP2 that shards, on CPUs over gloo: accelerate shards on accelerators only, and says nothing elsewhere."""

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def shard_on_cpu(args: TrainingArguments | None = None) -> None:
    """Lets the next `Accelerator` of this process, which `args` have been made for, take its CPU for an accelerator."""
    if args is None:
        PartialState(cpu=True)
    else:
        assert args.device.type == "cpu"  # reading it makes the state
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def assert_sharded(model: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def assert_as_asked(trainer: Trainer) -> None:
    """What the arguments of a trainer ask for was on while it trained: FSDP, tensor parallelism, checkpointing."""
    args, model = trainer.args, trainer.model
    if args.fsdp:
        assert trainer.accelerator.is_fsdp2
        assert_sharded(model)
    else:
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if args.world_size > 1:
            assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert model.is_gradient_checkpointing == args.gradient_checkpointing
    grouped = getattr(args, "use_vllm", False) and args.vllm_tensor_parallel_size > 1
    assert (getattr(trainer, "_tensor_parallel", None) is not None) == grouped
