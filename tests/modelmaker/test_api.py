# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tidal_connector.errors import ConfigError
from tidal_connector.modelmaker import api, report
from tidal_connector.modelmaker.checkpoint import WEIGHTS_FILE


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("arch", ["v32", "glm", "v3"])
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path, arch: str) -> None:
    api.make_model(tmp_path / "a", arch=arch)
    api.make_model(tmp_path / "b", arch=arch)
    api.make_model(tmp_path / "c", arch=arch, seed=8)
    first, second, other = (_digests(tmp_path / name) for name in "abc")
    assert first == second
    assert first[WEIGHTS_FILE] != other[WEIGHTS_FILE]
    assert first["config.json"] == other["config.json"]


def test_an_earlier_checkpoint_is_replaced(tmp_path: Path) -> None:
    api.make_model(tmp_path, seed=1)
    api.make_model(tmp_path, seed=2)
    assert report.read_report(tmp_path / "tidal_model.json").seed == 2


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt.*empty or new"):
        api.make_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        api.make_model(tmp_path / "file")


@pytest.mark.parametrize(("dtype", "size"), [("float32", 2304), ("bfloat16", 1152)])
def test_the_report_tells_the_size_of_a_row(tmp_path: Path, dtype: str, size: int) -> None:
    assert api.make_model(tmp_path, dtype=dtype).kv_row_bytes == size


def test_weights_can_be_read_by_other_users(tmp_path: Path) -> None:
    api.make_model(tmp_path)
    assert (tmp_path / WEIGHTS_FILE).stat().st_mode & 0o044 == 0o044


def test_a_refused_checkpoint_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = report.Measurement(
        noise=report.Noise(0.5, {}, 1, 1, 0.1, [1], 1),
        sensitivity=report.Sensitivity(1.0, 1.0, {}, 0.0, 1, []),
        reach=report.Reach(4, 64, 4),
        engine_start_s=0.0,
        measured_s=0.0,
    )
    monkeypatch.setattr(api, "measure_checkpoint", lambda directory, dtype: measured)
    made = api.make_model(tmp_path, measure=True)
    assert any(line.startswith("noise is 0.5 ") for line in made.shortcomings)
    assert not (tmp_path / WEIGHTS_FILE).exists()
    assert not (tmp_path / "config.json").exists()
    assert report.read_report(tmp_path / "tidal_model.json").shortcomings == made.shortcomings
