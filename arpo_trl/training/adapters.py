"""Adapters: merged for the engine without a trace, loaded to go on training, merged for good."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import is_peft_model
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import find_adapter_config_file, is_bitsandbytes_available
from trl import GRPOConfig, ModelConfig
from trl.trainer.utils import create_model_from_path


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


logger = logging.getLogger(__name__)

# vLLM sets the scales of quantized weights when it loads a checkpoint, not when weights are pushed.
NOT_QUANTIZED_FOR_VLLM = "vLLM cannot be given the weights of a model that is trained in 4 or 8 bits"


def is_adapter(model: str | Path, revision: str | None = None) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter rather than a whole model."""
    if not Path(model).is_dir():
        try:
            validate_repo_id(str(model))
        except HFValidationError:  # a folder that is not there
            return False
    return find_adapter_config_file(str(model), revision=revision) is not None


def base_of(adapter: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """Folder, or name on the Hub, of the model that an adapter was trained on, and its revision where that is known."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(adapter), revision=revision)
    return config.base_model_name_or_path, config.revision


def tokenizer_source(model: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """
    Where a model's tokenizer is, and its revision: with the model; for an adapter without one, with its base.

    Raises:
        OSError: The Hub does not say whether an adapter has one.
    """
    if is_adapter(model, revision) and not _has_tokenizer(str(model), revision):
        base = base_of(model, revision)
        logger.info("%s has no tokenizer of its own: the one of %s is used.", model, base[0])
        return base
    return str(model), revision


def _has_tokenizer(model: str, revision: str | None) -> bool:
    file = "tokenizer_config.json"
    if Path(model).is_dir():
        return (Path(model) / file).is_file()
    try:
        hf_hub_download(model, file, revision=revision)
    except LocalEntryNotFoundError:
        if is_offline_mode():  # what was downloaded is all there is
            return False
        raise OSError(
            f"The Hub could not be asked whether the adapter {model} has a tokenizer of its own; try again, or set "
            "HF_HUB_OFFLINE=1 to take what was downloaded before."
        ) from None
    except EntryNotFoundError:
        return False
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"The Hub did not say whether the adapter {model} has a tokenizer of its own: {reason}"
        ) from None
    return True


def check_adapted_layers(model: PreTrainedModel, configs: Iterable["PeftConfig"]) -> None:
    """
    Checks that what adapters change of a model reaches vLLM, which keeps one copy of tied embeddings.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The base model; it may be without weights, on the meta device.
        configs (`Iterable[PeftConfig]`):
            Of its adapters.

    Raises:
        ValueError: With the option and the module to leave out.
    """
    config = model.config
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    for adapter in configs:
        if getattr(adapter, "trainable_token_indices", None):
            raise ValueError(
                "vLLM cannot be given the tokens that trainable_token_indices trains: leave it out, or set use_vllm: "
                "false."
            )
        found = {name: option for name in names if (option := _option_with(adapter, name)) is not None}
        if tied and found:
            listed = ", ".join(f"{name} (by {option})" for name, option in found.items())
            raise ValueError(
                f"The adapter changes {listed}, but the model has tie_word_embeddings: true, so that vLLM, which keeps "
                "one copy of both ends, would sample from another policy. Leave it out, or set use_vllm: false."
            )


def _option_with(adapter: "PeftConfig", module: str) -> str | None:
    """The option of an adapter by which it changes a module."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import INCLUDE_LINEAR_LAYERS_SHORTHAND

    if any(module.endswith(name) for name in getattr(adapter, "modules_to_save", None) or ()):
        return "modules_to_save"
    if any(f"{module}.weight".endswith(name) for name in getattr(adapter, "target_parameters", None) or ()):
        return "target_parameters"
    targets = getattr(adapter, "target_modules", None)
    # The shorthand stands for all linear layers but the last one.
    if not targets or targets in (INCLUDE_LINEAR_LAYERS_SHORTHAND, {INCLUDE_LINEAR_LAYERS_SHORTHAND}):
        return None
    return "target_modules" if check_target_module_exists(adapter, module) else None


def without_weights(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model as its configuration describes it, on the meta device."""
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None:
            return architecture._from_config(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def check_adapters_for_vllm(
    model: str | PreTrainedModel, peft_config: "PeftConfig | None", options: Mapping[str, Any]
) -> None:
    """
    [`check_adapted_layers`] of a trainer's model, before its weights are loaded.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As the trainer takes it; a name may be that of an adapter.
        peft_config ([`~peft.PeftConfig`], *optional*):
            The new adapter.
        options (`Mapping[str, Any]`):
            `revision` and `trust_remote_code` count.
    """
    revision, trust = options.get("revision"), options.get("trust_remote_code", False)
    if isinstance(model, str) and is_adapter(model, revision):
        from peft import PeftConfig as AnyPeftConfig

        configs = [AnyPeftConfig.from_pretrained(model, revision=revision)]
        model, revision = base_of(model, revision)
    elif not isinstance(model, str) and is_peft_model(model):
        configs, model = list(model.peft_config.values()), model.get_base_model()
    else:
        configs = [peft_config] if peft_config is not None else []
    if configs:
        model = without_weights(model, revision, trust) if isinstance(model, str) else model
        check_adapted_layers(model, configs)


def check_quantization(model_args: ModelConfig, use_vllm: bool) -> None:
    """
    Checks the options of QLoRA before a model is loaded.

    Args:
        model_args ([`~trl.ModelConfig`]):
            `load_in_4bit`, `load_in_8bit`, `use_peft`, `model_name_or_path` and `model_revision` count.
        use_vllm (`bool`):
            Whether vLLM generates.

    Raises:
        ValueError, ImportError: With what to change.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return
    option = "load_in_4bit" if model_args.load_in_4bit else "load_in_8bit"
    if not (model_args.use_peft or is_adapter(model_args.model_name_or_path, model_args.model_revision)):
        raise ValueError(f"{option} freezes the model, so that only an adapter can be trained: set use_peft: true.")
    if use_vllm:
        raise ValueError(f"{NOT_QUANTIZED_FOR_VLLM}: set use_vllm: false, or leave {option} out.")
    if not is_bitsandbytes_available():
        raise ImportError(f"{option} needs bitsandbytes: run `pip install bitsandbytes`.")


def load_adapter(adapter: str, args: GRPOConfig, arguments: dict[str, Any]) -> "PeftModel":
    """
    Loads an adapter over its base model, to train it further.

    Args:
        adapter (`str`):
            Its folder, or its name on the Hub.
        args ([`~trl.GRPOConfig`]):
            Its `model_init_kwargs` are those of the base model, but for `revision`, which is the adapter's.
        arguments (`dict[str, Any]`):
            Keyword arguments for [`~trl.GRPOTrainer`], which are changed: the model stands for `quantization_config`
            and `peft_config`, and the adapter's own tokenizer is the default.

    Returns:
        [`~peft.PeftModel`]: Its adapter is the one that is trained; the base model is frozen.
    """
    from peft import PeftModel

    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None
    revision = options.pop("revision", None)
    if (quantization := arguments.pop("quantization_config", None)) is not None:
        options["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    arguments["peft_config"] = None
    if arguments.get("processing_class") is None:
        source, source_revision = tokenizer_source(adapter, revision)
        arguments["processing_class"] = AutoProcessor.from_pretrained(
            source,
            revision=source_revision,
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
    base, base_revision = base_of(adapter, revision)
    model = create_model_from_path(base, revision=base_revision, **options)
    return PeftModel.from_pretrained(model, adapter, revision=revision, is_trainable=True)


def merge_adapter(adapter: str | Path, output_dir: str | Path) -> PreTrainedModel:
    """
    Merges an adapter into its base model and saves the result, with the tokenizer, as a model that needs no PEFT.

    Args:
        adapter (`str` or `Path`):
            Its folder, or its name on the Hub.
        output_dir (`str` or `Path`):
            Where to save the model, in the base model's data type.

    Returns:
        [`~transformers.PreTrainedModel`]: The merged model.

    Raises:
        ValueError: If `adapter` is none.
    """
    if not is_adapter(adapter):
        raise ValueError(f"{adapter} holds no adapter (adapter_config.json), so there is nothing to merge.")
    from peft import PeftModel

    base, revision = base_of(adapter)
    model = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype="auto")
    model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    model.save_pretrained(output_dir)
    source, revision = tokenizer_source(adapter)
    AutoTokenizer.from_pretrained(source, revision=revision).save_pretrained(output_dir)
    return model


@contextmanager
def merged(layer: "BaseTunerLayer") -> Iterator[None]:
    """Within it the base layer has copies of its parameters, with the active adapters merged into them.

    Merging in place and unmerging again, as PEFT does, leaves rounding errors that add up, large ones in bfloat16.
    """
    base = layer.get_base_layer()
    parameters = dict(base.named_parameters(recurse=False))
    originals = {name: parameter.data for name, parameter in parameters.items()}
    # A sharded parameter keeps its shard whatever its data are set to: it is merged in place, and put right afterwards.
    shards = {name: data.to_local().clone() for name, data in originals.items() if isinstance(data, DTensor)}
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
            if name in shards:
                parameter.data.to_local().copy_(shards[name])


def merged_parameters(model: "PeftModel") -> Iterator[tuple[str, torch.Tensor]]:
    """
    The parameters of a model as they would be with its adapters merged, one layer at a time.

    Args:
        model ([`~peft.PeftModel`]):
            It is left as it is, bit for bit.

    Yields:
        `tuple[str, torch.Tensor]`: Name in the base model and values. Sharded parameters stay so.
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
        # Of a module with copies, the one that is trained; TRL keeps another in its frozen adapter "ref".
        before, copies, after = name.partition(".modules_to_save.")
        if copies:
            adapter, _, after = after.partition(".")
            if adapter not in model.active_adapters:
                continue
            name = f"{before}.{after}"
        layer = layers.get(id(parameter))
        with nullcontext() if layer is None else merged(layer):
            if layer is not None:
                parameter = getattr(layer.get_base_layer(), name.rpartition(".")[2])
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data
