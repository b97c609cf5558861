"""FSDP2 that shards, on CPUs over gloo: accelerate shards on accelerators only, and says nothing elsewhere."""

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
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
    """A trained model is sharded if, and only if, the arguments of its trainer ask for FSDP."""
    if trainer.args.fsdp:
        assert trainer.accelerator.is_fsdp2
        assert_sharded(trainer.model)
    else:
        assert not any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
