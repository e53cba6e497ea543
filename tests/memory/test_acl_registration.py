# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from tests.standins.ascendcl import Standin
from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import Conflict, DeviceFailed
from tidal_connector.memory import MemoryRegion, open_region
from tidal_connector.memory.acl import AclRuntime, DeviceAlias, HostRegistration, Run, register_host
from tidal_connector.memory.acl.codes import MEANINGS

MIB, GIB = 1 << 20, 1 << 30
REGISTER, ALIAS, UNREGISTER = "aclrtHostRegisterV2", "aclrtHostGetDevicePointer", "aclrtHostUnregister"
MAPPED, PINNED = 0x2, 0x10000000
SMALL = PoolConfig(register_chunk="2MiB")

Space = Callable[[int], MemoryRegion]


@pytest.fixture
def region() -> Iterator[MemoryRegion]:
    """Eight MiB of ordinary memory: four chunks of SMALL."""
    with open_region(8 * MIB, PoolConfig(pages=PageKind.PLAIN)) as region:
        yield region


def through(alias: DeviceAlias) -> np.ndarray:
    """The memory as a kernel sees it; the stand-in's aliases are real second mappings."""
    return np.frombuffer((ctypes.c_ubyte * alias.length).from_address(alias.pointer), np.uint8)


def test_a_kernel_sees_what_the_host_writes_and_the_other_way_round(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    host = np.frombuffer(region.buffer, np.uint8)
    host[:] = np.resize(np.arange(251, dtype=np.uint8), host.size)
    before = host.copy()
    with register_host(region, runtime, 0, PoolConfig()) as registration:
        alias = registration.alias(0, region.length)
        assert alias.pointer != region.address
        assert standin.library.standin_is_real(region.address)
        seen = through(alias)
        assert (seen == before).all()
        seen[5 * MIB] = 255
        assert host[5 * MIB] == 255
        assert (through(registration.alias(5 * MIB, 1)) == [255]).all()


def test_300_gib_take_five_chunks_on_hugepage_borders(mere_space: Space, runtime: AclRuntime, standin: Standin) -> None:
    region = mere_space(300 * GIB)
    with register_host(region, runtime, 0, PoolConfig()) as registration:
        registered = [(call.number(0), call.number(1)) for call in standin.calls(REGISTER)]
        assert registered == [
            *((region.address + each * 64 * GIB, 64 * GIB) for each in range(4)),
            (region.address + 256 * GIB, 44 * GIB),
        ]
        assert registration.report().chunks == (*[64 * GIB] * 4, 44 * GIB)
        last = registration.alias(300 * GIB - 1, 1)
        assert standin.library.standin_host_of(last.pointer) == region.address + 300 * GIB - 1
        line = registration.report().line()
        assert line == (
            "registered with NPU 0: 4 x 64 GiB + 1 x 44 GiB by aclrtHostRegisterV2(MAPPED|PINNED), aliases in 5 parts"
        )


def test_without_borders_one_alias_covers_300_gib(mere_space: Space, runtime: AclRuntime, standin: Standin) -> None:
    standin.set("adjoining", 1)
    with register_host(mere_space(300 * GIB), runtime, 0, PoolConfig()) as registration:
        assert registration.contiguous_runs() == (Run(0, 300 * GIB),)
        whole = registration.alias(0, 300 * GIB)
        assert registration.alias(200 * GIB, 100 * GIB) == whole.part(200 * GIB, 100 * GIB)


def test_chunks_end_where_layers_begin(mere_space: Space, runtime: AclRuntime) -> None:
    layer = 5 * GIB + 3 * 4096
    cuts = [each * layer for each in range(62)]
    with register_host(mere_space(61 * layer), runtime, 0, PoolConfig(), cuts) as registration:
        assert all(run.offset in cuts for run in registration.contiguous_runs())
        assert len(registration.contiguous_runs()) == 6
        for start, end in pairwise(cuts):
            assert registration.alias(start, end - start).length == layer


def test_an_alias_across_a_border_is_refused_and_the_border_named(region: MemoryRegion, runtime: AclRuntime) -> None:
    with register_host(region, runtime, 0, SMALL) as registration:
        runs = registration.contiguous_runs()
        assert runs == tuple(Run(each * 2 * MIB, 2 * MIB) for each in range(4))
        for run in runs:
            assert registration.alias(run.offset, run.length).length == run.length
        with pytest.raises(DeviceFailed, match=r"alias on NPU 0 jumps at 2097152; place each layer within.*cuts"):
            registration.alias(2 * MIB - 1, 2)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (0, -1), (0, 8 * MIB + 1), (8 * MIB, 1)])
def test_an_alias_outside_the_region_is_refused(
    region: MemoryRegion, runtime: AclRuntime, offset: int, length: int
) -> None:
    with (
        register_host(region, runtime, 0, PoolConfig()) as registration,
        pytest.raises(ValueError, match="of a region of 8388608 bytes"),
    ):
        registration.alias(offset, length)


def test_chunks_are_unregistered_in_reverse_and_each_once(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    registration = register_host(region, runtime, 0, SMALL)
    registration.close()
    registration.close()
    begun = [call.number(0) for call in standin.calls(REGISTER)]
    assert [call.number(0) for call in standin.calls(UNREGISTER)] == begun[::-1]
    with pytest.raises(ValueError, match="is closed"):
        registration.alias(0, 1)
    assert registration.contiguous_runs() == ()


def test_a_chunk_that_fails_takes_back_those_before_it(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    standin.fail(REGISTER, 207006, nth=3)
    with pytest.raises(DeviceFailed, match=r"\(4 MiB of 8 MiB were\): aclrtHostRegisterV2 of 2 MiB at 0x.*207006"):
        register_host(region, runtime, 0, SMALL)
    begun = [call.number(0) for call in standin.calls(REGISTER) if not call.code]
    assert [call.number(0) for call in standin.calls(UNREGISTER)] == begun[::-1]
    assert len(begun) == 2
    register_host(region, runtime, 0, SMALL).close()  # nothing is left that would be in its way


def test_a_chunk_without_an_alias_takes_back_itself_too(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    standin.fail(ALIAS, 107000, nth=3)
    with pytest.raises(DeviceFailed, match=r"aclrtHostGetDevicePointer of 0x.*107000"):
        register_host(region, runtime, 0, SMALL)
    assert standin.registrations == 0
    assert len(standin.calls(UNREGISTER)) == 3


@pytest.mark.parametrize("code", [107000, 107002, 207000, 207001, 207006, 507057, 507899, 507910, 507911, 507000])
def test_every_code_is_one_line_with_its_meaning_a_mend_and_what_else_may_be_set(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, code: int
) -> None:
    standin.fail(REGISTER, code, times=2)  # a refused parameter is tried once more, with other flags
    with pytest.raises(DeviceFailed) as caught:
        register_host(region, runtime, 0, PoolConfig())
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.code == code
    assert caught.value.call == REGISTER
    assert f": {code}, " in text
    if code in MEANINGS:
        assert MEANINGS[code].text in text
        assert MEANINGS[code].mend in text
    assert 'the runtime: "EZ9999: Inner Error! aclrtHostRegisterV2' in text  # its own words, with the breaks taken out
    assert 'pool.register = "runtime"' in text
    assert '"off"' in text


def test_too_much_at_once_is_halved_until_it_is_taken(mere_space: Space, runtime: AclRuntime, standin: Standin) -> None:
    standin.set("single_limit", 20 * GIB)
    with register_host(mere_space(100 * GIB), runtime, 0, PoolConfig()) as registration:
        assert registration.report().chunks == (*[16 * GIB] * 6, 4 * GIB)
        assert registration.report().notes == (
            "64 GiB at once were refused (207001)",
            "32 GiB at once were refused (207001)",
        )


def test_too_much_in_all_is_halved_only_so_far_and_says_how_much_there_was(
    mere_space: Space, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("total_limit", 20 * GIB)
    with pytest.raises(DeviceFailed, match=r"\(20 GiB of 100 GiB were\).*64 MiB at 0x.*drivers before 25.5.0"):
        register_host(mere_space(100 * GIB), runtime, 0, PoolConfig())
    assert min(call.number(1) for call in standin.calls(REGISTER)) == 64 * MIB
    assert standin.registrations == 0


def test_a_layer_that_the_runtime_does_not_take_at_once_names_its_size_and_the_mend(
    mere_space: Space, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("single_limit", 100_000_000)
    text = (
        r"a tensor over 128 MiB of the pool .* the largest that was taken has 64 MiB \(pool.register_chunk = 64 GiB\); "
        "the runtime refused more at once .207001.: upgrade the driver, or lower pool.bytes$"
    )
    with pytest.raises(DeviceFailed, match=text):
        register_host(mere_space(256 * MIB), runtime, 0, PoolConfig(), [0, 128 * MIB])
    assert standin.registrations == 0
    with (  # the last layer ends where its caller says, which may be before the region does
        register_host(mere_space(256 * MIB), runtime, 0, PoolConfig(), [128 * MIB]) as registration,
        pytest.raises(DeviceFailed, match=text),
    ):
        registration.alias(128 * MIB, 128 * MIB)


def test_a_layer_longer_than_register_chunk_names_what_to_set(mere_space: Space, runtime: AclRuntime) -> None:
    cuts = [0, 3 * MIB, 8 * MIB + 4096]
    with pytest.raises(
        DeviceFailed,
        match=r"a tensor over 5.004 MiB .*, and the largest that was taken has 2 MiB \(pool.register_chunk = 2 MiB\); "
        'set pool.register_chunk = "6MiB" or more, or lower pool.bytes$',
    ):
        register_host(mere_space(12 * MIB), runtime, 0, SMALL, cuts)
    with register_host(mere_space(12 * MIB), runtime, 0, PoolConfig(register_chunk="6MiB"), cuts) as registration:
        assert registration.alias(3 * MIB, 5 * MIB + 4096).length == 5 * MIB + 4096


def test_a_layer_of_several_registrations_may_do_where_their_aliases_adjoin(
    mere_space: Space, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("adjoining", 1)
    with register_host(mere_space(12 * MIB), runtime, 0, SMALL, [0, 6 * MIB]) as registration:
        assert registration.alias(0, 6 * MIB).length == 6 * MIB


def interrupted(call: Callable[..., Any], nth: int) -> Callable[..., Any]:
    """The call, with Ctrl-C in place of the nth."""
    numbers = count(1)

    def instead(*arguments: Any) -> Any:
        if next(numbers) == nth:
            raise KeyboardInterrupt
        return call(*arguments)

    return instead


def test_an_interruption_takes_back_what_was_registered(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "register", interrupted(runtime.register, nth=3))
    with pytest.raises(KeyboardInterrupt):
        register_host(region, runtime, 0, SMALL)
    assert [call.name for call in standin.calls(REGISTER, UNREGISTER)] == [REGISTER] * 2 + [UNREGISTER] * 2
    assert standin.registrations == 0


def test_chunks_that_stayed_are_tried_again_from_the_last_to_the_first(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    registration = register_host(region, runtime, 0, SMALL)
    standin.fail(UNREGISTER, 507899, nth=2, times=2)
    with pytest.raises(DeviceFailed, match="507899"):
        registration.close()
    registration.close()
    tried = [(call.number(0) - region.address) // (2 * MIB) for call in standin.calls(UNREGISTER)]
    assert tried == [3, 2, 1, 0, 2, 1]


def test_an_alias_of_null_is_tried_again_without_pinning(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("without_alias", MAPPED | PINNED)
    with register_host(region, runtime, 0, PoolConfig()) as registration:
        assert registration.alias(0, 1).pointer
        assert registration.report().how == ("aclrtHostRegisterV2(MAPPED)",)
    names = [(call.name, call.code) for call in standin.calls(REGISTER, ALIAS, UNREGISTER)]
    assert names == [(REGISTER, 0), (ALIAS, 0), (UNREGISTER, 0), (REGISTER, 0), (ALIAS, 0), (UNREGISTER, 0)]


def test_an_alias_of_null_in_every_way_is_a_failure(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("without_alias", MAPPED)
    standin.fail(REGISTER, 107000)  # so that the flags with which there is an alias are refused
    with pytest.raises(
        DeviceFailed, match=r"no alias \(NULL\).*: MAPPED\|PINNED was refused \(107000\), MAPPED gave none"
    ):
        register_host(region, runtime, 0, PoolConfig())
    assert standin.registrations == 0


def test_registering_twice_ourselves_is_told_before_the_runtime_is_asked(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    with register_host(region, runtime, 0, PoolConfig()):
        asked = len(standin.calls())
        with pytest.raises(Conflict, match="has a registration with NPU 0 already: close that one first"):
            register_host(region, runtime, 0, PoolConfig())
        assert len(standin.calls()) == asked
        assert standin.registrations == 1


def register_as_another(runtime: AclRuntime, address: int, length: int) -> Callable[[], None]:
    """Register as another component of this process would, past the connector; returns how to end it."""
    with runtime.on(0):  # which stays: the thread had none
        library = ctypes.CDLL(runtime.path)
    library.aclrtHostRegisterV2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)
    library.aclrtHostUnregister.argtypes = (ctypes.c_void_p,)
    assert library.aclrtHostRegisterV2(address, length, MAPPED) == 0
    return lambda: library.aclrtHostUnregister(address)


def test_what_another_component_registered_whole_is_used_said_and_left_alone(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidal.memory")
    end = register_as_another(runtime, region.address, 4 * MIB)
    with register_host(region, runtime, 0, SMALL) as registration:
        assert registration.report().borrowed == 4 * MIB
        assert registration.contiguous_runs()[0] == Run(0, 4 * MIB)
        assert standin.library.standin_host_of(registration.alias(3 * MIB, 1).pointer) == region.address + 3 * MIB
    assert "4 MiB registered by another component" in caplog.text
    assert standin.registrations == 1
    assert end() == 0


@pytest.mark.parametrize(("offset", "length"), [(0, MIB), (MIB, MIB), (6 * MIB, 2 * MIB)])
def test_what_another_component_registered_in_part_is_a_failure(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, offset: int, length: int
) -> None:
    end = register_as_another(runtime, region.address + offset, length)
    with pytest.raises(DeviceFailed, match=r"507910, the memory is registered already.*another component"):
        register_host(region, runtime, 0, PoolConfig())
    assert standin.registrations == 1
    end()


@pytest.mark.parametrize("adjoining", [0, 1])
def test_two_foreign_registrations_with_a_gap_or_a_border_between_are_not_used(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, adjoining: int
) -> None:
    """With adjoining aliases the first and the last page look like one registration; the gap does not."""
    standin.set("adjoining", adjoining)
    reach = 3 * MIB if adjoining else 4 * MIB
    ends = [register_as_another(runtime, region.address + at, reach) for at in (0, region.length - reach)]
    with pytest.raises(DeviceFailed, match="507910"):
        register_host(region, runtime, 0, PoolConfig())
    assert [end() for end in ends] == [0, 0]


def test_a_foreign_registration_is_not_used_where_its_alias_can_be_asked_for_at_its_start_only(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    standin.set("base_only", 1)
    end = register_as_another(runtime, region.address, region.length)
    with pytest.raises(DeviceFailed, match="507910"):
        register_host(region, runtime, 0, PoolConfig())
    end()


def test_a_region_that_is_closed_first_ends_its_registration_first(
    runtime: AclRuntime, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidal.memory")
    region = open_region(4 * MIB, PoolConfig(pages=PageKind.PLAIN))
    registration = register_host(region, runtime, 0, PoolConfig())
    region.close()
    assert "closed before its registration with NPU 0: that is ended first" in caplog.text
    assert standin.registrations == 0
    assert standin.violations() == []  # the stand-in knows what is mapped
    with pytest.raises(ValueError, match="is closed"):
        registration.alias(0, 1)
    registration.close()
    with pytest.raises(ValueError, match="closed"):
        register_host(region, runtime, 0, PoolConfig())


def test_memory_that_cannot_be_unregistered_stays_mapped(
    runtime: AclRuntime, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    region = open_region(4 * MIB, PoolConfig(pages=PageKind.PLAIN))
    registration = register_host(region, runtime, 0, SMALL)
    standin.fail(UNREGISTER, 507899)
    with pytest.raises(DeviceFailed, match="507899"):
        registration.close()
    assert standin.registrations == 1  # the other chunk was ended all the same
    standin.fail(UNREGISTER, 507899)
    region.close()
    assert "registration with NPU 0 is in use: its 4 MiB stay until this process ends" in caplog.text
    registration.close()
    assert standin.violations() == []


def test_a_chunk_that_somebody_else_unregistered_is_no_failure_but_told(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    registration = register_host(region, runtime, 0, SMALL)
    library = ctypes.CDLL(standin.path)
    library.aclrtHostUnregister.argtypes = (ctypes.c_void_p,)
    assert library.aclrtHostUnregister(region.address) == 0
    registration.close()
    assert "ended elsewhere for a part: aclrtHostUnregister" in caplog.text


def test_each_thread_gets_its_device_back(region: MemoryRegion, runtime: AclRuntime, standin: Standin) -> None:
    with runtime.on(5):
        with register_host(region, runtime, 3, PoolConfig()):
            assert runtime.current() == 5
        assert runtime.current() == 5
    assert [call.arguments for call in standin.calls("aclrtSetDevice")] == [("5",), ("3",), ("5",), ("3",), ("5",)]
    assert len(standin.calls("aclInit")) == 1


def test_a_thread_without_a_device_can_close(region: MemoryRegion, runtime: AclRuntime, standin: Standin) -> None:
    registration = register_host(region, runtime, 0, PoolConfig())
    closer = threading.Thread(target=registration.close)
    closer.start()
    closer.join(10)
    assert standin.registrations == 0


def test_a_device_that_is_not_there(region: MemoryRegion, runtime: AclRuntime) -> None:
    with pytest.raises(DeviceFailed, match="aclrtSetDevice of NPU 12: 107001, there is no NPU of this number"):
        register_host(region, runtime, 12, PoolConfig())


def test_a_runtime_that_somebody_initialised_is_used_and_one_that_cannot_be_is_an_error(
    region: MemoryRegion, runtime: AclRuntime, standin: Standin
) -> None:
    assert ctypes.CDLL(standin.path).aclInit(None) == 0
    register_host(region, runtime, 0, PoolConfig()).close()
    standin.reset()
    standin.fail("aclInit", 507899)
    with pytest.raises(DeviceFailed, match="aclInit: 507899"):
        register_host(region, runtime, 0, PoolConfig())


def test_two_regions_have_registrations_of_their_own(region: MemoryRegion, runtime: AclRuntime) -> None:
    def both(first: HostRegistration, second: HostRegistration) -> None:
        assert first.alias(0, 1).pointer != second.alias(0, 1).pointer

    with (
        open_region(MIB, PoolConfig(pages=PageKind.PLAIN)) as other,
        register_host(region, runtime, 0, PoolConfig()) as first,
        register_host(other, runtime, 0, PoolConfig()) as second,
    ):
        both(first, second)


@pytest.mark.hugepages
def test_a_pool_partly_on_hugepages_is_registered_whole(
    hugepages: Callable[[int], None], runtime: AclRuntime, standin: Standin
) -> None:
    hugepages(5)
    with open_region(16 * MIB, PoolConfig()) as region:
        assert region.report.pieces[0] == (PageKind.HUGE_2M, 10 * MIB)
        host = np.frombuffer(region.buffer, np.uint8)
        with register_host(region, runtime, 0, PoolConfig(register_chunk="4MiB")) as registration:
            assert registration.report().chunks == (4 * MIB,) * 4
            for run in registration.contiguous_runs():
                host[run.offset : run.end] = run.offset // MIB
                if standin.library.standin_is_real(region.address + run.offset):
                    assert (through(registration.alias(run.offset, run.length)) == run.offset // MIB).all()
        del host
