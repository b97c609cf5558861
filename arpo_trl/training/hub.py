"""Trained models on the Hub: merged with their adapter, or checkpoint by checkpoint, a revision each."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi, ModelCard

from .adapters import is_adapter, merge_adapter


# What only resuming a run needs, and what is nobody else's business.
NOT_PUSHED = (
    *("checkpoint-*", "rollouts/*", "completions/*", "runs/*", "_*", "optimizer*", "scheduler*", "rng_state*"),
    *("scaler*", "trainer_state.json", "training_args.bin", ".gitignore"),
    *("rollouts_*.pt", "reference_model.pt", "manifest.json"),
)


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in an output folder and their steps, in order."""
    found = [(path.name.rpartition("-")[2], path) for path in Path(folder).glob("checkpoint-*")]
    return sorted((int(step), path) for step, path in found if step.isdigit() and _is_model(path))


def push_model(
    folder: str | Path, repo_id: str, merge: bool = False, revision: str | None = None, private: bool | None = None
) -> str:
    """
    Pushes a trained model.

    Args:
        folder (`str` or `Path`):
            The run's `output_dir`, or a checkpoint.
        repo_id (`str`):
            Where to, `"user/name"`; it is made if need be.
        merge (`bool`, *optional*, defaults to `False`):
            Whether to push an adapter merged into its base model, as a model that needs no PEFT.
        revision (`str`, *optional*):
            Branch; it is made if need be. If `None`, the main one.
        private (`bool`, *optional*):
            Whether a new repository is private. If `None`, the account's default.

    Returns:
        `str`: URL of the commit.

    Raises:
        ValueError: If `folder` holds no model, or with `merge` no adapter.
    """
    folder = Path(folder)
    if not _is_model(folder):
        raise ValueError(f"There is no model in {folder}; name the output_dir of a run, or one of its checkpoints.")
    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as merged:
        if merge:
            _merge(folder, Path(merged))
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=merged if merge else folder,
            revision=revision,
            commit_message=f"Model of {folder.name}",
            ignore_patterns=list(NOT_PUSHED),
        )
    return commit.commit_url


def push_checkpoints(folder: str | Path, repo_id: str, merge: bool = False, private: bool | None = None) -> list[str]:
    """
    Pushes every checkpoint of a run as a revision, `"step-<n>"`, of one repository.

    Args:
        folder (`str` or `Path`):
            The run's `output_dir`.
        repo_id, merge, private:
            As in [`push_model`].

    Returns:
        `list[str]`: The revisions, in the order of their steps.

    Raises:
        ValueError: If there is no checkpoint.
    """
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"There is no checkpoint in {folder}. Train with save_strategy: steps.")
    for step, path in found:
        push_model(path, repo_id, merge, revision=f"step-{step}", private=private)
    return [f"step-{step}" for step, _ in found]


def _is_model(folder: Path) -> bool:
    return _is_adapter(folder) or (folder / "config.json").is_file()


def _is_adapter(folder: Path) -> bool:
    return folder.is_dir() and is_adapter(folder)  # what is not there is not looked for on the Hub


def _merge(folder: Path, target: Path) -> None:
    if not _is_adapter(folder):
        raise ValueError(f"{folder} holds a whole model, there is nothing to merge; leave `merge` out.")
    merge_adapter(folder, target)
    if (folder / "README.md").is_file():
        card = ModelCard.load(folder / "README.md")
        card.data.library_name = "transformers"
        card.text = card.text.replace(
            "; this repository holds the adapter, not the base model", ", the adapter merged"
        )
        card.save(target / "README.md")
        for curves in folder.glob("curves.png"):
            (target / curves.name).write_bytes(curves.read_bytes())
