# SPDX-License-Identifier: Apache-2.0
"""Give a test checkpoint a drafter: one more layer of its own kind, which guesses the token after the next (MTP).

Takes a checkpoint of the model maker and writes another one beside it. The drafter sees the code of the newest token
and the context that the model had one token earlier, runs a copy of the first layer over them and reads the guess from
the model's own head; it is right often enough, and wrong often enough, that drafts are both accepted and rejected.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tidal_connector.modelmaker.checkpoint import WEIGHTS_FILE
from tidal_connector.modelmaker.weights import CODE, FLAGS


def add_drafter(model: Path, folder: Path) -> Path:
    """Copy a checkpoint to ``folder`` and add the layer that vLLM's method ``mtp`` drafts with; return ``folder``."""
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    config["num_nextn_predict_layers"] = 1
    config["first_k_dense_replace"] = layers + 1  # no experts in the drafter either
    (folder / "config.json").write_text(json.dumps(config))

    weights = load_file(model / WEIGHTS_FILE)
    first, own = "model.layers.0.", f"model.layers.{layers}."
    drafter = {own + name.removeprefix(first): weights[name] for name in weights if name.startswith(first)}
    dtype = weights["lm_head.weight"].dtype
    lane = CODE + FLAGS
    mixed = torch.zeros(hidden, 2 * hidden, dtype=dtype)
    mixed[:lane, :lane] = torch.eye(lane)
    mixed[lane:, hidden + lane :] = torch.eye(hidden - lane)
    drafter |= {
        own + "enorm.weight": torch.ones(hidden, dtype=dtype),
        own + "hnorm.weight": torch.ones(hidden, dtype=dtype),
        own + "eh_proj.weight": mixed,
        own + "shared_head.norm.weight": torch.ones(hidden, dtype=dtype),
        own + "shared_head.head.weight": weights["lm_head.weight"],
        own + "embed_tokens.weight": weights["model.embed_tokens.weight"],
    }
    copies = {name: tensor.clone() for name, tensor in drafter.items()}  # safetensors refuses shared memory
    save_file(weights | copies, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder
