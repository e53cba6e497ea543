// SPDX-License-Identifier: Apache-2.0

#include "second_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace standin {
namespace {

constexpr std::uint64_t kGiant = std::uint64_t{1} << 30;     // the phase that every page size shares
constexpr std::uint64_t kDistance = std::uint64_t{1} << 43;  // from the host's address to an adjoining alias
constexpr std::uint64_t kGuard = std::uint64_t{2} << 20;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMostCopied = std::uint64_t{1} << 32;

struct Area {
  std::uint64_t start, end, file_offset;  // as the kernel lists it
  bool writable, shared;
};

void* Pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

std::vector<Area> AreasOf(std::uint64_t start, std::uint64_t end) {
  std::vector<Area> found;
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return found;
  char line[4096];
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long long from, to, offset;
    char rights[5];
    if (std::sscanf(line, "%llx-%llx %4s %llx", &from, &to, rights, &offset) != 4) continue;
    if (from < end && to > start) found.push_back({from, to, offset, rights[1] == 'w', rights[3] == 's'});
  }
  std::fclose(maps);
  return found;
}

bool MapFileAgain(const Area& area, std::uint64_t from, std::uint64_t length, std::uint64_t to) {
  char path[96];
  std::snprintf(path, sizeof path, "/proc/self/map_files/%llx-%llx",
                static_cast<unsigned long long>(area.start), static_cast<unsigned long long>(area.end));
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  off_t offset = static_cast<off_t>(area.file_offset + (from - area.start));
  void* mapped = mmap(Pointer(to), length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
  close(file);
  return mapped != MAP_FAILED;
}

// Move private memory into a file without a name, under the same addresses, and map that a second time.
bool ShareInPlace(std::uint64_t from, std::uint64_t length, std::uint64_t to) {
  if (length > kMostCopied) return false;
  int file = memfd_create("standin", MFD_CLOEXEC);
  if (file < 0) return false;
  static const char zeros[kPage] = {};
  bool done = ftruncate(file, static_cast<off_t>(length)) == 0;
  for (std::uint64_t at = 0; done && at < length; at += kPage) {
    if (std::memcmp(Pointer(from + at), zeros, kPage) == 0) continue;
    done = pwrite(file, Pointer(from + at), kPage, static_cast<off_t>(at)) == static_cast<ssize_t>(kPage);
  }
  for (std::uint64_t at : {from, to}) {
    done = done &&
           mmap(Pointer(at), length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
  }
  close(file);
  return done;
}

bool MapAreaAgain(const Area& area, std::uint64_t from, std::uint64_t length, std::uint64_t to) {
  if (!area.writable) return false;
  if (!area.shared) return ShareInPlace(from, length, to);
  if (mremap(Pointer(from), 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, Pointer(to)) != MAP_FAILED) return true;
  return MapFileAgain(area, from, length, to);
}

void* Reserve(std::uint64_t at, std::uint64_t length) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED_NOREPLACE : 0);
  return mmap(Pointer(at), length, PROT_NONE, flags, -1, 0);
}

}  // namespace

SecondMapping MapAgain(std::uint64_t host, std::uint64_t length, bool adjoining) {
  SecondMapping mapping;
  mapping.space_length = adjoining ? length : length + 2 * kGiant + kGuard;
  void* space = Reserve(adjoining ? host - kDistance : 0, mapping.space_length);
  if (space == MAP_FAILED) std::abort();
  mapping.space = reinterpret_cast<std::uint64_t>(space);
  mapping.at = adjoining ? mapping.space : (mapping.space / kGiant + 1) * kGiant + host % kGiant;
  mapping.real = true;
  for (const Area& area : AreasOf(host, host + length)) {
    std::uint64_t from = std::max(area.start, host), to = std::min(area.end, host + length);
    if (!MapAreaAgain(area, from, to - from, mapping.at + (from - host))) mapping.real = false;
  }
  return mapping;
}

void Unmap(const SecondMapping& mapping) { munmap(Pointer(mapping.space), mapping.space_length); }

bool IsMapped(std::uint64_t at, std::uint64_t length) { return msync(Pointer(at), length, MS_ASYNC) == 0; }

std::uint64_t MapFresh(std::uint64_t length) {
  void* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) std::abort();
  return reinterpret_cast<std::uint64_t>(at);
}

void UnmapFresh(std::uint64_t at, std::uint64_t length) { munmap(Pointer(at), length); }

}  // namespace standin
