"""Checkpoints from which a run goes on as if it had not been stopped.

[`~transformers.Trainer`] saves weights, optimizer, schedule and global random states. Here is what it lacks: a manifest,
written last, that tells a whole checkpoint from half of one, and no deletion of the last checkpoint before the next is
whole ([`CheckpointMixin`]); and for a [`~trl.GRPOTrainer`] rollouts not yet used, counters, the state of the
transformers engine's generator, what was measured since the last log, a synchronized reference model
([`RolloutCheckpointMixin`]).
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model, send_to_device
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


logger = get_logger(__name__)

MANIFEST = "manifest.json"
REFERENCE_FILE = "reference_model.pt"
# With other values the data position, the rollouts or the random draws would be others. Those that a trainer has count.
SETTINGS = (
    *("world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    *("num_generations", "num_iterations", "seed"),
)


def _on_numbered_cpu(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    return storage if location.startswith("cpu:") else None


# In several processes on CPUs `Trainer` loads to "cpu:0", which `torch.load` takes for a device it does not know.
torch.serialization.register_package(100, lambda storage: None, _on_numbered_cpu)


class IncompleteCheckpoint(ValueError):
    """A checkpoint that a run cannot go on from."""


def write_manifest(folder: str | Path, args: TrainingArguments) -> None:
    """
    Marks a checkpoint as complete: from now on all its files must be there, in their present size.

    Args:
        folder (`str` or `Path`):
            The checkpoint.
        args ([`~transformers.TrainingArguments`]):
            Arguments of the run.
    """
    folder = Path(folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    manifest = {
        "settings": _settings(args),
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(paths)},
    }
    # Renamed when it is whole, since one that is cut off would hide which files there should be.
    unfinished = folder / f"{MANIFEST}.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)


def check_complete(folder: str | Path) -> dict[str, Any]:
    """
    Checks that a checkpoint is whole and holds what a run needs to go on.

    Args:
        folder (`str` or `Path`):
            The checkpoint.

    Returns:
        `dict[str, Any]`: The settings of the run that wrote it.

    Raises:
        IncompleteCheckpoint: If it is not; the message begins with the folder.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{folder} is not complete: it has no {MANIFEST}, which is written last") from None
    for name, size in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise IncompleteCheckpoint(f"{folder} is not complete: {name} has {found} of {size} bytes")
    if not any(name.startswith("rng_state") for name in manifest["files"]):
        raise IncompleteCheckpoint(f"{folder} holds only the model, since it was saved with save_only_model=True")
    return manifest["settings"]


def find_checkpoint(resume_from_checkpoint: str | bool | None, args: TrainingArguments) -> str | None:
    """
    Finds the checkpoint to go on from.

    Args:
        resume_from_checkpoint (`str` or `bool`, *optional*):
            A checkpoint, or `True` (`"true"` on a command line) for the newest complete one in `args.output_dir`.
        args ([`~transformers.TrainingArguments`]):
            Arguments of the run.

    Returns:
        `str` or `None`: Its path; `None` for a run from the beginning, also where there is no complete checkpoint yet.

    Raises:
        ValueError: If the given checkpoint is not complete, or if it was written with other sizes or another seed.
    """
    if resume_from_checkpoint is None or str(resume_from_checkpoint).lower() in ("false", "none"):
        return None
    if str(resume_from_checkpoint).lower() != "true":
        checkpoint = Path(resume_from_checkpoint)
        if not checkpoint.is_dir():
            raise ValueError(f"resume_from_checkpoint={str(checkpoint)!r} is not a folder.")
        try:
            settings = check_complete(checkpoint)
        except IncompleteCheckpoint as error:
            raise ValueError(f"{error}. Set resume_from_checkpoint=true for the newest complete one.") from None
    else:
        for checkpoint in sorted(checkpoint_folders(args.output_dir), key=_step, reverse=True):
            try:
                settings = check_complete(checkpoint)
                break
            except IncompleteCheckpoint as error:
                logger.warning("Checkpoint skipped: %s.", error)
        else:
            logger.warning("There is no complete checkpoint in %s: the run starts at the beginning.", args.output_dir)
            return None
    present = _settings(args)
    names = dict.fromkeys([*present, *settings])  # another kind of trainer has others
    if changed := [name for name in names if settings.get(name) != present.get(name)]:
        raise ValueError(
            f"{checkpoint} was written with {_listed(settings, changed)}, now it is {_listed(present, changed)}. A run "
            "goes on with the same values only; to start another one from its weights, set model_name_or_path to it."
        )
    return str(checkpoint)


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, complete or not."""
    return [folder for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if folder.name[11:].isdigit()]


def delete_old_checkpoints(output_dir: str | Path, limit: int | None, keep: str | None = None) -> None:
    """
    Deletes what a complete checkpoint makes superfluous: the oldest complete ones, and all that are incomplete.

    Args:
        output_dir (`str` or `Path`):
            Where the checkpoints are.
        limit (`int`, *optional*):
            How many to leave, at least one. If `None` or 0, nothing is deleted.
        keep (`str`, *optional*):
            A checkpoint to leave in any case; it counts.
    """
    if not limit:
        return
    # In the order in which they were completed: a run that went back leaves checkpoints of later steps behind.
    folders = sorted(checkpoint_folders(output_dir), key=_completed)
    kept = [folder for folder in folders if keep is not None and folder.samefile(keep)]
    for folder in reversed(folders):
        if folder not in kept and _completed(folder) and (len(kept) < limit or folder == folders[-1]):
            kept.append(folder)
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder)


def _settings(args: TrainingArguments) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _completed(folder: Path) -> int:
    manifest = folder / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else 0


def _listed(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={settings.get(name)}" for name in names)


class CheckpointMixin:
    """
    Makes a [`~transformers.Trainer`] subclass write checkpoints that are whole or not there, and go on from whole ones
    only, with what was measured since the last log. It is to stand before it among the base classes.
    """

    _state_kind = "trainer"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Trains, from the beginning or from a checkpoint, see [`find_checkpoint`]; else as in transformers."""
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args)
        if checkpoint is not None:
            self.args.eval_on_start = False  # this is not the start
        return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # half of one, from a run that was killed
        self.accelerator.wait_for_everyone()
        # `Trainer` would delete the last one before this one is whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
            self._complete_checkpoint(folder)
        except Exception as error:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(
                f"Checkpoint {folder} could not be written ({error}). Those before it are untouched: make room for "
                "one, then start again with resume_from_checkpoint=true."
            ) from error
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            delete_old_checkpoints(run_dir, limit, keep=self.state.best_model_checkpoint)

    # What `Trainer`'s checkpoint lacks, and each process knows by itself

    def _state_file(self, folder: str) -> str:
        return os.path.join(folder, f"{self._state_kind}_{self.accelerator.process_index}.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        torch.save(self._process_state(), self._state_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Comes last, right before the first step: what evaluation or the construction of loaders changed is put right.
        super()._load_rng_state(checkpoint)
        # A cold start's checkpoint had none before.
        if checkpoint is not None and os.path.isfile(path := self._state_file(checkpoint)):
            self._restore(torch.load(path, map_location="cpu", weights_only=True))

    def _process_state(self) -> dict[str, Any]:
        """What this process has measured since the last log, in types that `torch.load` takes without pickle."""
        return {
            "metrics": {mode: dict(metrics) for mode, metrics in self._metrics.items()},
            "loss": self._tr_loss,
            "total_loss": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "num_tokens": getattr(self, "_total_train_tokens", None),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
        self._tr_loss = state["loss"].to(self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = state["total_loss"], state["last_logged_step"]
        if (num_tokens := state.get("num_tokens")) is not None:
            self._total_train_tokens = num_tokens

    def _complete_checkpoint(self, folder: str) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(folder, self.args)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._complete_checkpoint(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)


class RolloutCheckpointMixin(CheckpointMixin):
    """
    Makes a [`~trl.GRPOTrainer`] subclass resumable. It is to stand before it among the base classes.

    A run in deterministic mode that is stopped at any moment and resumed gives the same weights and logs as one that
    was not stopped. Without that mode it goes on from the same state, but arrival times shape its rollouts as ever.
    """

    _state_kind = "rollouts"

    _finished_epochs = 0

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Trains, from the beginning or from a checkpoint, see [`find_checkpoint`]; else as in TRL."""
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args)
        self._finished_epochs = 0
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
            self._finished_epochs = int(state.epoch)
        return super().train(checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        # Its generator goes on from epoch to epoch: each one draws a permutation.
        for _ in range(self._finished_epochs):
            next(iter(sampler))
        return sampler

    # Saving

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        # The engine gets its weights, and an empty prefix cache, as it will after a resumption.
        self._last_loaded_step = -1

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.rollout_log is not None:
            self.rollout_log.flush()
        if self.args.sync_ref_model:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(self.ref_model, options=whole)
            if self.args.should_save:
                torch.save(weights, os.path.join(output_dir, REFERENCE_FILE))

    def _process_state(self) -> dict[str, Any]:
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        generator = self._sampler.engine.generator
        return {
            **super()._process_state(),
            "step": self._step,
            "buffered_inputs": None if used_up else self._buffered_inputs,
            "rollouts": self._rollouts,
            "generator": None if generator is None else generator.get_state(),
            "warnings": self._warnings.state_dict(),
        }

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # `Trainer` loads either the adapters in subfolders, TRL's frozen "ref" among them, or the trained one.
        model = model or self.model
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if is_peft_model(model) and len(model.peft_config) > 1 and not sharded:
            model.load_adapter(resume_from_checkpoint, model.active_adapter, is_trainable=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and self.args.sync_ref_model:
            weights = torch.load(os.path.join(checkpoint, REFERENCE_FILE), map_location="cpu", weights_only=True)
            set_model_state_dict(self.ref_model, weights, options=StateDictOptions(full_state_dict=True))

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._step, self._rollouts = state["step"], state["rollouts"]
        self._buffered_inputs = send_to_device(state["buffered_inputs"], self.accelerator.device)
        if state["generator"] is not None:
            generator = self._sampler.engine.generator = torch.Generator(self.model.device)
            generator.set_state(state["generator"])
        self._warnings.load_state_dict(state["warnings"])
