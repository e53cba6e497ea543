// SPDX-License-Identifier: Apache-2.0
// The tensors of a launch as global memory: each access is checked against the one that it began in, and
// counted.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "shadow.h"

namespace tidal_sim {

// A tensor of a launch, the tiling data or the workspace. It must outlive the launch. `bytes` may be 0.
struct Buffer {
  const char* name;
  void* data;
  std::size_t bytes;
  bool writable;
};

// Bytes moved out of and into one buffer, by DMA and by the scalar unit.
struct Traffic {
  std::uint64_t dma_read = 0, dma_written = 0, scalar_read = 0, scalar_written = 0;
};

struct GlobalBuffer {
  std::size_t index;
  std::string name;
  std::uint8_t* data;
  std::size_t bytes;
  bool writable;
  std::unique_ptr<Shadow> shadow;  // in the strict modes
};

// Where a GlobalTensor begins: a buffer and a distance that may lie outside of it until it is used.
struct GlobalPlace {
  const GlobalBuffer* buffer = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t declared = UINT64_MAX;  // bytes from offset on that the kernel says are there
};

enum class Way { Read, Write };

class GlobalMemory {
 public:
  // Throws Fault where two buffers overlap: what one core does to a byte must be seen under one name.
  GlobalMemory(const std::vector<Buffer>& buffers, bool strict) : strict_(strict) {
    for (const Buffer& each : buffers) {
      auto* data = static_cast<std::uint8_t*>(each.data);
      const char* name = each.name != nullptr ? each.name : "(no name)";
      if (data == nullptr && each.bytes != 0)
        throw Fault(text("launch: buffer '", name, "' has ", each.bytes, " bytes but no address"));
      for (const GlobalBuffer& other : buffers_)
        if (overlap(data, each.bytes, other.data, other.bytes))
          throw Fault(text("launch: buffers '", other.name, "' and '", name,
                           "' overlap; give memory that is both input and output once, writable"));
      buffers_.push_back({buffers_.size(), name, data, each.bytes, each.writable,
                          strict ? std::make_unique<Shadow>(each.bytes) : nullptr});
    }
  }

  // The buffer in which an address lies, or at whose end; nullptr for an address of none.
  GlobalPlace find(const void* address) const {
    const auto* at = static_cast<const std::uint8_t*>(address);
    const GlobalBuffer* end = nullptr;
    for (const GlobalBuffer& each : buffers_) {
      if (at >= each.data && at < each.data + each.bytes) return place(each, at);
      if (at == each.data + each.bytes) end = &each;
    }
    return end != nullptr ? place(*end, at) : GlobalPlace{};
  }

  // Refuses an access to bytes [extra, extra + length) of a place.
  static void check(const Caller& who, const GlobalPlace& place, std::uint64_t extra, std::uint64_t length,
                    Way way) {
    if (place.buffer == nullptr)
      refuse(who, "the address of this GlobalTensor lies in no buffer of the launch (offset ", extra,
             "); add the buffer to the launch or check SetGlobalBuffer");
    const GlobalBuffer& buffer = *place.buffer;
    if (way == Way::Write && !buffer.writable)
      refuse(who, "buffer '", buffer.name, "' offset ", at(place, extra), ": the buffer may only be read");
    const bool said = place.declared != UINT64_MAX;
    if (said && (extra > place.declared || length > place.declared - extra))
      refuse(who, "buffer '", buffer.name, "' offset ", at(place, extra), ": ", length,
             " bytes leave the GlobalTensor, which has ", place.declared, " bytes from offset ",
             at(place, 0));
    std::uint64_t offset = 0;
    const bool wraps = __builtin_add_overflow(place.offset, extra, &offset);
    if (wraps || offset > buffer.bytes || length > buffer.bytes - offset)
      refuse(who, "buffer '", buffer.name, "' offset ", at(place, extra), ": ", length,
             " bytes leave the buffer, which has ", buffer.bytes, " bytes");
  }

  // Held while bytes or marks of global memory are touched in the strict modes, where cores may meet.
  std::unique_lock<std::mutex> guard() {
    return strict_ ? std::unique_lock<std::mutex>(mutex_) : std::unique_lock<std::mutex>();
  }

  std::size_t size() const { return buffers_.size(); }

 private:
  static GlobalPlace place(const GlobalBuffer& buffer, const std::uint8_t* at) {
    return {&buffer, static_cast<std::uint64_t>(at - buffer.data), UINT64_MAX};
  }

  static bool overlap(const std::uint8_t* a, std::size_t a_bytes, const std::uint8_t* b,
                      std::size_t b_bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
    return a_bytes != 0 && b_bytes != 0 && first < second + b_bytes && second < first + a_bytes;
  }

  // As a signed number: an index below zero arrives as a huge one.
  static std::int64_t at(const GlobalPlace& place, std::uint64_t extra) {
    return static_cast<std::int64_t>(place.offset + extra);
  }

  bool strict_;
  std::vector<GlobalBuffer> buffers_;
  std::mutex mutex_;
};

}  // namespace tidal_sim
