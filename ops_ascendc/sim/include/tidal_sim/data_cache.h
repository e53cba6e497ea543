// SPDX-License-Identifier: Apache-2.0
// The data cache through which the scalar unit of a core sees global memory, for the mode scalar_cache:
// 64-byte lines that stay until the kernel cleans them. What a device would answer with an old value or a
// lost write is an error here, whatever the moment at which the cores happened to run. Lines count from the
// start of a buffer.

#pragma once

#include <cstring>
#include <map>
#include <utility>

#include "global_memory.h"

namespace tidal_sim {

class DataCache {
 public:
  static constexpr std::uint64_t kLine = 64;

  // All under the guard of global memory. Reads bytes of one line that are in bounds.
  void read(const Caller& who, const GlobalBuffer& buffer, std::uint64_t offset, void* out,
            std::uint64_t bytes, const Moment& now) {
    const Line& line = line_of(buffer, offset, now);
    for (std::uint64_t i = offset; i < offset + bytes; ++i)
      if (!line.dirty[i % kLine] && foreign(buffer, i, line.loaded))
        refuse(who, "buffer '", buffer.name, "' offset ", i,
               ": the data cache holds an older value; DataCacheCleanAndInvalid is missing before the read");
    std::memcpy(out, line.bytes + offset % kLine, bytes);
  }

  void write(const GlobalBuffer& buffer, std::uint64_t offset, const void* from, std::uint64_t bytes,
             const Moment& now) {
    Line& line = line_of(buffer, offset, now);
    std::memcpy(line.bytes + offset % kLine, from, bytes);
    std::memset(line.dirty + offset % kLine, 1, bytes);
  }

  // Writes the line of an offset back, if it was written, and drops it.
  void clean(const Caller& who, const GlobalBuffer& buffer, std::uint64_t offset, const Moment& now) {
    const auto found = lines_.find({&buffer, offset / kLine});
    if (found == lines_.end()) return;
    write_back(who, buffer, found->first.second * kLine, found->second, now);
    lines_.erase(found);
  }

  void clean_all(const Caller& who, const Moment& now) {
    for (const auto& [key, line] : lines_) write_back(who, *key.first, key.second * kLine, line, now);
    lines_.clear();
  }

  void check_end(int core) const {
    for (const auto& [key, line] : lines_)
      for (std::uint64_t i = 0; i < kLine; ++i)
        if (line.dirty[i])
          refuse({core, "end of the kernel"}, "buffer '", key.first->name, "' offset ",
                 key.second * kLine + i,
                 ": SetValue wrote it into the data cache only; DataCacheCleanAndInvalid is missing");
  }

 private:
  struct Line {
    std::uint8_t bytes[kLine];
    bool dirty[kLine];
    Moment loaded;
  };
  using Key = std::pair<const GlobalBuffer*, std::uint64_t>;

  Line& line_of(const GlobalBuffer& buffer, std::uint64_t offset, const Moment& now) {
    const auto [at, fresh] = lines_.try_emplace({&buffer, offset / kLine});
    if (fresh) {
      const std::uint64_t first = offset / kLine * kLine;
      std::memcpy(at->second.bytes, buffer.data + first, size(buffer, first));
      at->second.loaded = now;
    }
    return at->second;
  }

  static std::uint64_t size(const GlobalBuffer& buffer, std::uint64_t first) {
    return std::min(kLine, buffer.bytes - first);
  }

  // Whether others, or a DMA of this core, may have written a byte since the line was loaded.
  static bool foreign(const GlobalBuffer& buffer, std::uint64_t offset, const Moment& loaded) {
    const Mark& mark = buffer.shadow->written(offset);
    const bool own = mark.core == static_cast<std::uint64_t>(loaded.core) && mark.pipe == index_of(Pipe::S);
    return !own && !ordered(mark, loaded);
  }

  static void write_back(const Caller& who, const GlobalBuffer& buffer, std::uint64_t first, const Line& line,
                         const Moment& now) {
    const std::uint64_t bytes = size(buffer, first);
    bool dirty = false;
    for (std::uint64_t i = 0; i < bytes; ++i) dirty = dirty || line.dirty[i];
    if (!dirty) return;
    for (std::uint64_t i = 0; i < bytes; ++i) {
      if (line.dirty[i]) {
        buffer.shadow->settle(first + i, now);  // nobody else came near it: check_order refuses cached bytes
      } else if (foreign(buffer, first + i, line.loaded)) {
        refuse(who, "buffer '", buffer.name, "' offset ", first + i,
               ": writing the 64-byte line back undoes what was written there since the line was loaded; "
               "let no two cores write to one line, and clean it before others write");
      }
    }
    std::memcpy(buffer.data + first, line.bytes, bytes);
  }

  std::map<Key, Line> lines_;
};

}  // namespace tidal_sim
