"""Runs a script of ours whose recipe asks for FSDP, on CPUs, and checks that the model was sharded.

torchrun --nproc_per_node 2 tests/sharded_script.py scripts/sft.py --config …
"""

import runpy
import sys

from transformers import Trainer

from tests.sharding import assert_as_asked, shard_on_cpu


create_accelerator, train = Trainer.create_accelerator_and_postprocess, Trainer.train


def create_sharding_accelerator(self):
    shard_on_cpu(self.args)
    create_accelerator(self)


def train_and_check(self, *args, **kwargs):
    train(self, *args, **kwargs)
    assert_as_asked(self)


Trainer.create_accelerator_and_postprocess, Trainer.train = create_sharding_accelerator, train_and_check

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
