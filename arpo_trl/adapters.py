"""Adapters: merged for the engine without a trace, loaded to go on training, merged for good."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import is_bitsandbytes_available
from trl import GRPOConfig, ModelConfig
from trl.trainer.utils import create_model_from_path


if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return (Path(folder) / "adapter_config.json").is_file()


def base_of(folder: str | Path) -> str:
    """Folder, or name on the Hub, of the model that an adapter was trained on."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(folder).base_model_name_or_path


def tokenizer_source(model: str | Path) -> str:
    """Where to load a model's tokenizer from: its own folder or name; the base model's for an adapter without one."""
    if is_adapter(model) and not (Path(model) / "tokenizer_config.json").is_file():
        return base_of(model)
    return str(model)


def check_quantization(model_args: ModelConfig, use_vllm: bool) -> None:
    """
    Checks the options of QLoRA before a model is loaded.

    Args:
        model_args ([`~trl.ModelConfig`]):
            `load_in_4bit`, `load_in_8bit`, `use_peft` and `model_name_or_path` count.
        use_vllm (`bool`):
            Whether vLLM generates.

    Raises:
        ValueError, ImportError: With what to change.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return
    option = "load_in_4bit" if model_args.load_in_4bit else "load_in_8bit"
    if not (model_args.use_peft or is_adapter(model_args.model_name_or_path)):
        raise ValueError(f"{option} freezes the model, so that only an adapter can be trained: set use_peft: true.")
    if model_args.load_in_8bit and use_vllm:
        raise ValueError(
            "vLLM cannot quantize to 8 bits while it loads: set load_in_4bit instead of load_in_8bit, or use_vllm: "
            "false."
        )
    if not is_bitsandbytes_available():
        raise ImportError(f"{option} needs bitsandbytes: run `pip install bitsandbytes`.")


def load_adapter(folder: str, args: GRPOConfig, arguments: dict[str, Any]) -> "PeftModel":
    """
    Loads an adapter over its base model, to train it further.

    Args:
        folder (`str`):
            The adapter.
        args ([`~trl.GRPOConfig`]):
            Its `model_init_kwargs` are those of the base model.
        arguments (`dict[str, Any]`):
            Keyword arguments for [`~trl.GRPOTrainer`], which are changed: the model stands for `quantization_config`
            and `peft_config`, and the adapter's own tokenizer is the default.

    Returns:
        [`~peft.PeftModel`]: Its adapter is the one that is trained; the base model is frozen.
    """
    from peft import PeftModel

    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None
    options.pop("revision", None)  # of what `folder` names
    if (quantization := arguments.pop("quantization_config", None)) is not None:
        options["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    arguments["peft_config"] = None
    if arguments.get("processing_class") is None:
        arguments["processing_class"] = AutoProcessor.from_pretrained(
            tokenizer_source(folder),
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
    return PeftModel.from_pretrained(create_model_from_path(base_of(folder), **options), folder, is_trainable=True)


def merge_adapter(folder: str | Path, output_dir: str | Path) -> PreTrainedModel:
    """
    Merges an adapter into its base model and saves the result, with the tokenizer, as a model that needs no PEFT.

    Args:
        folder (`str` or `Path`):
            The adapter.
        output_dir (`str` or `Path`):
            Where to save the model, in the base model's data type.

    Returns:
        [`~transformers.PreTrainedModel`]: The merged model.

    Raises:
        ValueError: If `folder` holds no adapter.
    """
    if not is_adapter(folder):
        raise ValueError(f"{folder} holds no adapter (adapter_config.json), so there is nothing to merge.")
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(base_of(folder), dtype="auto")
    model = PeftModel.from_pretrained(base, folder).merge_and_unload(safe_merge=True)
    model.save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(tokenizer_source(folder)).save_pretrained(output_dir)
    return model


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
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()  # the merged values may still be on their way
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
        copy of a module) and values. Sharded parameters stay so.
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
