// SPDX-License-Identifier: Apache-2.0
// The unified buffer (UB) of one core: 192 KB less 256 bytes, full of poison at the start, cut into the
// buffers of queues and TBufs by a bump allocator. Knows of each byte whether it was written since it was
// handed out.

#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "shadow.h"

namespace tidal_sim {

constexpr std::uint32_t kUbBytes = 192 * 1024 - 256;
constexpr std::uint32_t kUbBlock = 32;  // bytes of the smallest piece that a DMA addresses

inline std::uint32_t round_up(std::uint32_t bytes) { return (bytes + kUbBlock - 1) / kUbBlock * kUbBlock; }

enum class State : std::uint8_t { Idle, Allocated, Queued, Dequeued, Open };  // Open: of a TBuf

inline const char* name_of(State state) {
  constexpr const char* names[] = {"idle", "allocated", "queued", "dequeued", "open"};
  return names[static_cast<std::size_t>(state)];
}

// A piece of UB: a buffer of a queue, or all of a TBuf.
struct LocalBuffer {
  std::string name;
  std::uint32_t offset;  // in UB
  std::uint32_t bytes;
  State state;
  std::uint32_t generation = 0;  // counts FreeTensor, after which older tensors are dead
  int filled = -1;               // the event id that EnQue set and DeQue waits for
  int freed = -1;                // the event id that FreeTensor set and the next AllocTensor waits for
  AscendC::HardEvent freed_event{};
};

// Where a LocalTensor lies: bytes [offset, offset + bytes) of its buffer.
struct LocalPlace {
  LocalBuffer* buffer = nullptr;
  std::uint32_t generation = 0;
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

class UnifiedBuffer {
 public:
  UnifiedBuffer(std::uint8_t poison, bool strict)
      : poison_(poison),
        bytes_(new Block[kUbBytes / sizeof(Block)]),
        written_(kUbBytes, 0),
        shadow_(strict ? std::make_unique<Shadow>(kUbBytes) : nullptr) {
    std::memset(data(0), poison_, kUbBytes);
  }

  LocalBuffer& cut(const Caller& who, std::string name, std::uint32_t length, State state) {
    if (length == 0) refuse(who, name, " has no bytes; give a length of at least 1");
    if (length > kUbBytes || round_up(length) > kUbBytes - used_)
      refuse(who, name, " needs ", length, " bytes at UB offset ", used_, ", but UB has ", kUbBytes,
             "; make the buffers smaller");
    buffers_.push_back({std::move(name), used_, round_up(length), state});
    used_ += round_up(length);
    return buffers_.back();
  }

  // Makes the content of a buffer undefined again.
  void forget(const LocalBuffer& buffer) {
    std::memset(data(buffer.offset), poison_, buffer.bytes);
    std::memset(&written_[buffer.offset], 0, buffer.bytes);
  }

  // Refuses an access to bytes [extra, extra + length) of a tensor. A DMA may use its last piece of 32 bytes
  // whole.
  void check(const Caller& who, const LocalPlace& place, std::uint64_t extra, std::uint64_t length,
             bool dma) const {
    if (place.buffer == nullptr) refuse(who, "this LocalTensor has no memory; get it from a queue or a TBuf");
    const LocalBuffer& buffer = *place.buffer;
    const std::uint64_t offset = place.offset + extra;
    if (buffer.generation != place.generation || buffer.state == State::Idle)
      refuse(who, "UB buffer '", buffer.name, "' offset ", offset, ": the tensor was given to FreeTensor");
    if (buffer.state == State::Queued)
      refuse(who, "UB buffer '", buffer.name, "' offset ", offset,
             ": the tensor lies in its queue; take it out with DeQue first");
    const std::uint64_t end = place.offset + place.bytes;
    const std::uint64_t room =
        dma ? std::min<std::uint64_t>(end + kUbBlock - 1, buffer.bytes) / kUbBlock * kUbBlock : end;
    if (offset > room || length > room - offset)
      refuse(who, "UB buffer '", buffer.name, "' offset ", offset, ": ", length,
             " bytes leave the tensor, which ends at ", end);
  }

  void check_written(const Caller& who, const LocalPlace& place, std::uint32_t extra,
                     std::uint32_t length) const {
    const std::uint32_t first = place.buffer->offset + place.offset + extra;
    const auto* hole = static_cast<const std::uint8_t*>(std::memchr(&written_[first], 0, length));
    if (hole != nullptr)
      refuse(who, "UB buffer '", place.buffer->name, "' offset ", hole - &written_[place.buffer->offset],
             ": nobody has written this byte");
  }

  void set_written(std::uint32_t first, std::uint32_t length, bool written) {
    std::memset(&written_[first], written ? 1 : 0, length);
  }

  // In the strict modes, refuses an access that is not ordered behind an earlier one.
  void check_order(const Caller& who, const LocalPlace& place, std::uint32_t extra, std::uint32_t length,
                   const Moment& moment, bool writes) {
    if (!shadow_) return;
    const std::size_t first = place.buffer->offset + place.offset + extra;
    const auto conflict =
        writes ? shadow_->write(first, length, moment) : shadow_->read(first, length, moment);
    if (conflict)
      refuse(who, "UB buffer '", place.buffer->name, "' offset ", conflict->offset - place.buffer->offset,
             ": ", remedy(*conflict, moment));
  }

  std::uint8_t* data(std::uint32_t offset) { return bytes_[0].bytes + offset; }
  std::uint8_t poison() const { return poison_; }
  std::deque<LocalBuffer>& buffers() { return buffers_; }

 private:
  struct alignas(kUbBlock) Block {
    std::uint8_t bytes[kUbBlock];
  };

  std::uint8_t poison_;
  std::unique_ptr<Block[]> bytes_;
  std::vector<std::uint8_t> written_;
  std::unique_ptr<Shadow> shadow_;
  std::deque<LocalBuffer> buffers_;  // a deque: tensors hold their addresses
  std::uint32_t used_ = 0;
};

}  // namespace tidal_sim
