# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import ConfigError, PoolExhausted
from tidal_connector.memory import MemoryRegion, open_region
from tidal_connector.memory.machine import Machine

MIB, TWO_MIB = 1 << 20, 2 << 20
Reserve = Callable[[int], None]


def fill_and_check(region: MemoryRegion) -> None:
    """Write every byte and read it back: a page that is not there would be a SIGBUS here."""
    memory = np.frombuffer(region.buffer, np.uint8)
    pattern = np.resize(np.arange(251, dtype=np.uint8), memory.size)
    memory[:] = pattern
    assert (memory == pattern).all()


def test_ordinary_pages_when_nothing_else_is_there(tmp_path: Path) -> None:
    with open_region(5 * MIB + 1, PoolConfig(), machine=Machine(tmp_path)) as region:
        assert region.report.pieces == ((PageKind.PLAIN, 5 * MIB + 4096),)
        assert region.length == 5 * MIB + 4096
        assert region.report.hugepage_bytes == 0
        assert "transparent hugepages are switched off" in region.report.line()
        assert "3 2 MiB hugepages wanted" in region.report.line()
        fill_and_check(region)


@pytest.mark.skipif(not Machine().transparent(), reason="transparent hugepages are switched off here")
def test_transparent_hugepages_are_counted_as_the_kernel_counts_them() -> None:
    with open_region(8 * MIB, PoolConfig(pages=PageKind.TRANSPARENT)) as region:
        assert region.report.pieces == ((PageKind.TRANSPARENT, 8 * MIB),)
        assert region.address % TWO_MIB == 0
        assert region.report.hugepage_bytes in range(0, 8 * MIB + 1, TWO_MIB)
        fill_and_check(region)


def test_progress_reaches_the_end() -> None:
    steps: list[tuple[int, int]] = []
    with open_region(130 * MIB, PoolConfig(pages=PageKind.PLAIN), lambda done, of: steps.append((done, of))):
        assert steps == [(64 * MIB, 130 * MIB), (128 * MIB, 130 * MIB), (130 * MIB, 130 * MIB)]


def test_without_prefaulting_nothing_is_touched() -> None:
    steps: list[tuple[int, int]] = []
    settings = PoolConfig(pages=PageKind.PLAIN, prefault=False)
    with open_region(4 * MIB, settings, lambda done, of: steps.append((done, of))) as region:
        assert steps == []
        fill_and_check(region)


def test_demanding_hugepages_that_are_not_there_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(PoolExhausted, match=r"3 2 MiB hugepages wanted .2 MiB each., 0 free, 0 had.*nr_hugepages"):
        open_region(5 * MIB, PoolConfig(pages=PageKind.HUGE_2M), machine=Machine(tmp_path))


def test_a_memory_limit_below_the_pool_is_an_error_and_not_a_kill(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    with pytest.raises(PoolExhausted, match="2 MiB on ordinary pages wanted, 1 MiB available"):
        open_region(TWO_MIB, PoolConfig(), machine=Machine(tmp_path))


def test_more_than_the_machine_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(PoolExhausted, match="available"):
        open_region(1 << 44, PoolConfig(pages=PageKind.PLAIN))


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_path_that_is_no_hugetlbfs_is_a_wrong_setting(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"pool.path = .*hugetlbfs mount"):
        open_region(TWO_MIB, PoolConfig(path=str(tmp_path / path)))


def test_a_numa_node_that_is_not_there_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"pool.numa = 4095: no such NUMA node"):
        open_region(TWO_MIB, PoolConfig(numa=4095))


@pytest.mark.skipif(0 not in Machine().nodes(), reason="the kernel shows no NUMA nodes")
def test_a_pool_can_be_bound_to_a_node() -> None:
    with open_region(TWO_MIB, PoolConfig(numa=0, pages=PageKind.PLAIN)) as region:
        assert region.report.numa == 0
        assert "NUMA node 0" in region.report.line()
        assert not region.report.notes
        policy = Path("/proc/self/numa_maps").read_text()
        assert re.search(rf"^{region.address:x} bind:0 ", policy, re.MULTILINE)


def test_closing_twice_is_fine_and_the_buffer_is_gone() -> None:
    region = open_region(TWO_MIB, PoolConfig(pages=PageKind.PLAIN))
    region.close()
    region.close()
    with pytest.raises(ValueError, match="closed"):
        _ = region.buffer
    assert f"{region.address:x}-" not in Path("/proc/self/maps").read_text()


def test_memory_in_use_is_not_unmapped_under_its_user(caplog: pytest.LogCaptureFixture) -> None:
    region = open_region(TWO_MIB, PoolConfig(pages=PageKind.PLAIN))
    view = np.frombuffer(region.buffer, np.uint8)
    region.close()
    view[:] = 1
    assert "is in use" in caplog.text


def test_the_address_space_around_the_region_is_given_back() -> None:
    def spaces() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = spaces()
    for _ in range(20):
        open_region(TWO_MIB, PoolConfig(pages=PageKind.PLAIN)).close()
    assert spaces() <= before + 1


def test_an_empty_pool_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        open_region(0, PoolConfig())


@pytest.mark.hugepages
class TestRealHugepages:
    def test_all_on_hugepages(self, hugepages: Reserve) -> None:
        hugepages(8)
        with open_region(15 * MIB, PoolConfig()) as region:
            assert region.report.pieces == ((PageKind.HUGE_2M, 16 * MIB),)
            assert region.length == region.report.hugepage_bytes == 16 * MIB
            assert region.report.notes == ()
            assert Machine().free_hugepages(TWO_MIB) == 0
            fill_and_check(region)
        assert Machine().free_hugepages(TWO_MIB) == 8

    def test_fr_46_two_thirds_on_hugepages_and_the_rest_visibly_elsewhere(self, hugepages: Reserve) -> None:
        hugepages(63)
        with open_region(100 * TWO_MIB - 5, PoolConfig()) as region:
            (first, had), (second, rest) = region.report.pieces
            assert (first, had) == (PageKind.HUGE_2M, 63 * TWO_MIB)
            assert second in (PageKind.TRANSPARENT, PageKind.PLAIN)
            assert rest == 37 * TWO_MIB
            assert "100 2 MiB hugepages wanted (2 MiB each), 63 free, 63 had" in region.report.line()
            fill_and_check(region)

    def test_fr_46_demanded_hugepages_that_are_short_name_both_numbers(self, hugepages: Reserve) -> None:
        hugepages(3)
        with pytest.raises(PoolExhausted, match=r"4 2 MiB hugepages wanted .* 3 free"):
            open_region(8 * MIB, PoolConfig(pages=PageKind.HUGE_2M))
        assert Machine().free_hugepages(TWO_MIB) == 3

    def test_fr_46_hugepages_do_not_count_against_available_memory(self, hugepages: Reserve, tmp_path: Path) -> None:
        hugepages(4)
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("MemAvailable: 4 kB\n")
        (tmp_path / "sys").symlink_to("/sys")
        with open_region(8 * MIB, PoolConfig(), machine=Machine(tmp_path)) as region:
            assert region.report.pieces == ((PageKind.HUGE_2M, 8 * MIB),)

    def test_two_pools_share_what_is_free(self, hugepages: Reserve) -> None:
        hugepages(6)
        with open_region(4 * TWO_MIB, PoolConfig()) as first, open_region(4 * TWO_MIB, PoolConfig()) as second:
            assert first.report.hugepage_bytes == 4 * TWO_MIB
            assert second.report.pieces[0] == (PageKind.HUGE_2M, 2 * TWO_MIB)
            fill_and_check(first)
            fill_and_check(second)

    def test_kill_minus_9_leaves_nothing(self, hugepages: Reserve) -> None:
        hugepages(4)
        program = (
            "from tidal_connector.memory import open_region\nfrom tidal_connector.config import PoolConfig\n"
            "region = open_region(8 << 20, PoolConfig())\nprint(region.report.hugepage_bytes, flush=True)\ninput()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == str(8 * MIB)
            assert Machine().free_hugepages(TWO_MIB) == 0
            os.kill(child.pid, signal.SIGKILL)
        assert Machine().free_hugepages(TWO_MIB) == 4

    def test_a_forked_child_does_not_take_pages(self, hugepages: Reserve) -> None:
        hugepages(2)
        with open_region(4 * MIB, PoolConfig()) as region:
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            fill_and_check(region)

    def test_a_hugetlbfs_directory(self, hugepages: Reserve, hugetlbfs: Path) -> None:
        hugepages(8)
        with open_region(7 * MIB, PoolConfig(path=str(hugetlbfs))) as region:
            assert region.report.pieces == ((PageKind.HUGETLBFS, 8 * MIB),)
            assert list(hugetlbfs.iterdir()) == []  # unlinked at once
            fill_and_check(region)
        assert Machine().free_hugepages(TWO_MIB) == 8

    def test_a_full_hugetlbfs_names_both_numbers_or_falls_back(self, hugepages: Reserve, hugetlbfs: Path) -> None:
        hugepages(8)
        settings = PoolConfig(path=str(hugetlbfs), pages=PageKind.HUGETLBFS)
        with pytest.raises(PoolExhausted, match=r"8 hugetlbfs pages wanted .* 4 free"):  # the mount is limited to 8 MiB
            open_region(16 * MIB, settings)
        with open_region(16 * MIB, PoolConfig(path=str(hugetlbfs))) as region:
            assert region.report.pieces == ((PageKind.HUGETLBFS, 8 * MIB), (PageKind.HUGE_2M, 8 * MIB))
            fill_and_check(region)

    def test_a_hugetlbfs_without_permission(self, hugepages: Reserve, hugetlbfs: Path) -> None:
        hugepages(2)
        program = (
            "import os, sys\nfrom tidal_connector.memory import open_region\n"
            "from tidal_connector.config import PageKind, PoolConfig\nos.seteuid(65534)\n"
            "try:\n    open_region(1 << 20, PoolConfig(path=sys.argv[1], pages=PageKind.HUGETLBFS))\n"
            "except Exception as error:\n    print(type(error).__name__, error)\n"
        )
        command = [sys.executable, "-c", program, str(hugetlbfs)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        assert "PoolExhausted" in said
        assert "Permission denied" in said


@pytest.fixture
def hugetlbfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tidal-huge-") as folder:
        mount = Path(folder)
        mount.chmod(0o755)  # so that another user gets as far as the mount
        yield from mounted(mount)


def mounted(mount: Path) -> Iterator[Path]:
    command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M,size=8M,mode=0755", "none", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        pytest.skip("mount is not installed")
    if done.returncode:
        pytest.skip(f"hugetlbfs cannot be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True, timeout=20)
