// SPDX-License-Identifier: Apache-2.0
// Scalar access to both memories: what GetValue and SetValue check, count and move.

#pragma once

#include <cstring>

#include "core.h"

namespace tidal_sim {

// The distance of an element; an index that overflows stays out of every range.
inline std::uint64_t distance(std::uint64_t index, std::size_t size) {
  std::uint64_t bytes = 0;
  return __builtin_mul_overflow(index, size, &bytes) ? UINT64_MAX : bytes;
}

// In the strict modes, refuses an access to global memory that others may make at the same time, or that
// would pass a value by which lies in a data cache. Under the guard of global memory.
inline void check_order(const Caller& who, const GlobalBuffer& buffer, std::uint64_t offset,
                        std::uint64_t length, const Moment& moment, Way way, bool cached = false) {
  if (!buffer.shadow) return;
  for (std::uint64_t i = offset; i < offset + length; ++i) {
    const Mark& mark = buffer.shadow->written(i);
    const bool own = mark.core == static_cast<std::uint64_t>(moment.core) && moment.pipe == Pipe::S;
    if (mark.cached && !own)
      refuse(who, "buffer '", buffer.name, "' offset ", i, ": SetValue on core ", static_cast<int>(mark.core),
             " wrote it into the data cache only; DataCacheCleanAndInvalid is missing there");
  }
  const auto conflict = way == Way::Write ? buffer.shadow->write(offset, length, moment, cached)
                                          : buffer.shadow->read(offset, length, moment);
  if (conflict)
    refuse(who, "buffer '", buffer.name, "' offset ", conflict->offset, ": ", remedy(*conflict, moment));
}

inline void check_scalar(const Caller& who, const GlobalPlace& place, std::uint64_t extra, std::size_t size,
                         Way way) {
  GlobalMemory::check(who, place, extra, size, way);
  if ((place.offset + extra) % size != 0)
    refuse(who, "buffer '", place.buffer->name, "' offset ", place.offset + extra,
           ": the offset is no multiple of the element's ", size, " bytes");
}

inline void read_scalar(const char* api, const GlobalPlace& place, std::uint64_t extra, void* out,
                        std::size_t size) {
  Core& core = current(api);
  const Caller who = core.who(api);
  check_scalar(who, place, extra, size, Way::Read);
  const GlobalBuffer& buffer = *place.buffer;
  const std::uint64_t offset = place.offset + extra;
  core.traffic[buffer.index].scalar_read += size;
  const auto guard = core.device.memory.guard();
  const Moment now = core.pipes.scalar();
  check_order(who, buffer, offset, size, now, Way::Read);
  if (core.device.options.scalar_cache) return core.cache.read(who, buffer, offset, out, size, now);
  std::memcpy(out, buffer.data + offset, size);
}

inline void write_scalar(const char* api, const GlobalPlace& place, std::uint64_t extra, const void* from,
                         std::size_t size) {
  Core& core = current(api);
  const Caller who = core.who(api);
  check_scalar(who, place, extra, size, Way::Write);
  const GlobalBuffer& buffer = *place.buffer;
  const std::uint64_t offset = place.offset + extra;
  core.traffic[buffer.index].scalar_written += size;
  const auto guard = core.device.memory.guard();
  const Moment now = core.pipes.scalar();
  const bool cached = core.device.options.scalar_cache;
  check_order(who, buffer, offset, size, now, Way::Write, cached);
  if (cached) return core.cache.write(buffer, offset, from, size, now);
  std::memcpy(buffer.data + offset, from, size);
}

inline void read_scalar(const char* api, const LocalPlace& place, std::uint64_t extra, void* out,
                        std::uint32_t size) {
  Core& core = current(api);
  const Caller who = core.who(api);
  core.ub.check(who, place, extra, size, false);
  const auto at = static_cast<std::uint32_t>(extra);
  core.ub.check_order(who, place, at, size, core.pipes.scalar(), false);
  core.ub.check_written(who, place, at, size);
  std::memcpy(out, core.ub.data(place.buffer->offset + place.offset + at), size);
}

inline void write_scalar(const char* api, const LocalPlace& place, std::uint64_t extra, const void* from,
                         std::uint32_t size) {
  Core& core = current(api);
  const Caller who = core.who(api);
  core.ub.check(who, place, extra, size, false);
  const auto at = static_cast<std::uint32_t>(extra);
  core.ub.check_order(who, place, at, size, core.pipes.scalar(), true);
  const std::uint32_t first = place.buffer->offset + place.offset + at;
  core.ub.set_written(first, size, true);
  std::memcpy(core.ub.data(first), from, size);
}

}  // namespace tidal_sim
