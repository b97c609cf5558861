"""Adapters: merged for the engine without a trace, loaded to go on training, merged for good."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return (Path(folder) / "adapter_config.json").is_file()


@contextmanager
def merged(layer: "BaseTunerLayer") -> Iterator[None]:
    """Within it the base layer has copies of its parameters, with the active adapters merged into them.

    Merging in place and unmerging again, as PEFT does, leaves rounding errors that add up, large ones in bfloat16.
    """
    base = layer.get_base_layer()
    parameters = dict(base.named_parameters(recurse=False))
    originals = {name: parameter.data for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.clone()
    layer.merge()
    try:
        yield
    finally:
        layer.unmerge()
        for name, parameter in parameters.items():
            setattr(base, name, parameter)  # quantized layers get a new one when they are merged
            parameter.data = originals[name]


def merged_parameters(model: "PeftModel") -> Iterator[tuple[str, torch.Tensor]]:
    """
    The parameters of a model as they would be with its adapters merged, one layer at a time.

    Args:
        model ([`~peft.PeftModel`]):
            It is left as it is, bit for bit.

    Yields:
        `tuple[str, torch.Tensor]`: Name in the base model (with `modules_to_save.<adapter>.` where the adapter has a
        copy of a module) and values, valid until the next one is asked for. Sharded parameters stay so.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[int, BaseTunerLayer] = {}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for parameter in module.get_base_layer().parameters(recurse=False):
                layers.setdefault(id(parameter), module)
    for name, parameter in list(model.named_parameters()):
        if model.prefix in name or "original_module" in name:
            continue
        layer = layers.get(id(parameter))
        with nullcontext() if layer is None else merged(layer):
            if layer is not None:
                parameter = getattr(layer.get_base_layer(), name.rpartition(".")[2])
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data
