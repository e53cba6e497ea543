# SPDX-License-Identifier: Apache-2.0
"""Write one checkpoint directory: config, tokenizer, weights. Owns the file names; called in the caller's thread."""

from __future__ import annotations

import json
from pathlib import Path

from tidal_connector.errors import ConfigError
from tidal_connector.modelmaker.shape import ModelShape, hf_config
from tidal_connector.modelmaker.tokenizer import BOS, EOS, PAD, write_tokenizer
from tidal_connector.modelmaker.weights import Recipe, tensors

REPORT_FILE = "tidal_model.json"
WEIGHTS_FILE = "model.safetensors"
_OURS = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    WEIGHTS_FILE,
    REPORT_FILE,
}


def write_checkpoint(directory: Path, shape: ModelShape, seed: int, recipe: Recipe) -> int:
    """Write a checkpoint and return the number of its parameters.

    An existing directory is taken over only if it is empty or holds nothing but an earlier checkpoint of this tool.

    Raises:
        ConfigError: the directory holds something else, is a file, or cannot be made.
    """
    from safetensors.torch import save_file

    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; expected a directory, give another path")
    if directory.is_dir():
        foreign = sorted(entry.name for entry in directory.iterdir() if entry.name not in _OURS)
        if foreign:
            raise ConfigError(
                f"{directory} holds {foreign[0]!r}, which this tool did not write; give an empty or new directory"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}; give another path") from None
    (directory / REPORT_FILE).unlink(missing_ok=True)

    config = hf_config(shape, bos=BOS, eos=EOS, pad=PAD)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory)
    weights = dict(tensors(shape, seed, recipe))
    save_file(weights, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # the library writes it for its owner only; engines may run as another user
    return sum(tensor.numel() for tensor in weights.values())


def disable_checkpoint(directory: Path) -> None:
    """Remove config and weights, so that no engine can load a checkpoint that was refused."""
    for name in ("config.json", WEIGHTS_FILE):
        (directory / name).unlink(missing_ok=True)
