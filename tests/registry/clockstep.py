# SPDX-License-Identifier: Apache-2.0
"""Step the wall clock of one process, not the machine's: a library loaded before libc's own functions.

It adds the seconds in a file to ``CLOCK_REALTIME`` as Python and gRPC read it; other clocks are left alone. (A time
namespace offsets the other clocks, and not this one.)
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *step;

__attribute__((constructor)) static void begin(void) {
  int fd = open(getenv("CLOCK_STEP"), O_RDONLY);
  step = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real(clock, at);
  if (!rc && clock == CLOCK_REALTIME && step) at->tv_sec += *step;
  return rc;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


class SteppedClock:
    """The wall clock of the processes that are started with :attr:`environment`."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER
        source, library, self._file = folder / "step.c", folder / "step.so", folder / "step"
        source.write_text(_SOURCE)
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
        self.step(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_STEP": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set the clock ahead of the true one by so much."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))
