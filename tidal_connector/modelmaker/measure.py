# SPDX-License-Identifier: Apache-2.0
"""Run the measurement of a checkpoint in a process of its own, where vLLM lives. Called in the caller's thread."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tidal_connector.config import child_environment
from tidal_connector.errors import TidalError
from tidal_connector.modelmaker.report import Measurement, measurement_of

_SCRIPT = "tidal_connector.vllm_plugin.measure_model"
_LIMIT_S = 600.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the script changes the scheduler and the KV cache in its own process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def measure_checkpoint(directory: Path, dtype: str, limit_s: float = _LIMIT_S) -> Measurement:
    """Measure a checkpoint on the plain engine; about 40 seconds for the default sizes.

    Args:
        directory: the checkpoint.
        dtype: dtype of the engine.
        limit_s: seconds after which the process is ended.

    Raises:
        TidalError: the engine could not run it, or took longer than ``limit_s``.
    """
    with tempfile.TemporaryDirectory(prefix="tidal-measure-") as scratch:
        out = Path(scratch) / "measured.json"
        command = [sys.executable, "-m", _SCRIPT, str(directory), str(out), "--dtype", dtype]
        try:
            done = subprocess.run(
                command,
                env=child_environment(_ENVIRONMENT),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TidalError(
                f"measuring {directory} took longer than {limit_s:g} s and was ended; give it a less busy machine, "
                "or --no-measure"
            ) from None
        if done.returncode != 0 or not out.is_file():
            last = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()][-6:]
            raise TidalError(
                f"measuring {directory} failed with exit status {done.returncode}; "
                f"the last lines were: {' | '.join(last)}"
            )
        return measurement_of(json.loads(out.read_text()))
