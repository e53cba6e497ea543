// SPDX-License-Identifier: Apache-2.0
// TPipe: hands out UB to queues and TBufs, and event ids to the kernel. A kernel has one.

#pragma once

#include <array>
#include <string>

#include "queue.h"

namespace AscendC {

class TPipe {
 public:
  static constexpr int kMostBuffers = 8;  // of all queues at one position

  TPipe() {
    tidal_sim::Core& core = tidal_sim::current("TPipe");
    if (core.pipe != nullptr) tidal_sim::refuse(core.who("TPipe"), "the kernel has a TPipe already");
    core.pipe = this;
  }
  ~TPipe() {
    if (tidal_sim::core_of_this_thread() != nullptr) tidal_sim::core_of_this_thread()->pipe = nullptr;
  }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  // `count` buffers of `length` bytes, rounded up to 32.
  template <TPosition source, TPosition destination, std::int32_t depth>
  bool InitBuffer(TQueBind<source, destination, depth>& queue, std::uint8_t count, std::uint32_t length) {
    constexpr TPosition position = TQueBind<source, destination, depth>::kPosition;
    tidal_sim::Core& core = tidal_sim::current("InitBuffer");
    const tidal_sim::Caller who = core.who("InitBuffer");
    const std::string name =
        tidal_sim::text("queue ", queues_, position == TPosition::VECIN ? " (VECIN" : " (VECOUT",
                        source == TPosition::VECIN ? " to VECOUT)" : ")");
    if (queue.State().ready()) tidal_sim::refuse(who, name, " has buffers already");
    if (count == 0) tidal_sim::refuse(who, name, " needs at least 1 buffer");
    int& there = buffers_[static_cast<std::size_t>(position)];
    there += count;
    if (there > kMostBuffers)
      tidal_sim::refuse(who, name, ": ", there, " buffers at its position, of which a device has ",
                        kMostBuffers);
    for (int i = 0; i < count; ++i)
      queue.State().add(
          core.ub.cut(who, tidal_sim::text(name, " buffer ", i), length, tidal_sim::State::Idle));
    ++queues_;
    return true;
  }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, std::uint32_t length) {
    tidal_sim::Core& core = tidal_sim::current("InitBuffer");
    const tidal_sim::Caller who = core.who("InitBuffer");
    const std::string name = tidal_sim::text("TBuf ", tbufs_);
    if (buffer.Bound()) tidal_sim::refuse(who, name, " has memory already");
    buffer.Bind(core.ub.cut(who, name, length, tidal_sim::State::Open));
    ++tbufs_;
    return true;
  }

  // An id that is free now. It is not kept free: use it up before the next call or EnQue.
  TEventID FetchEventID(HardEvent event) {
    tidal_sim::Core& core = tidal_sim::current("FetchEventID");
    return static_cast<TEventID>(
        core.flags.find(core.who("FetchEventID"), event, tidal_sim::Flags::kKernelIds));
  }
  template <HardEvent event>
  TEventID FetchEventID() {
    return FetchEventID(event);
  }

  // An id that stays the caller's until it is released.
  template <HardEvent event>
  TEventID AllocEventID() {
    tidal_sim::Core& core = tidal_sim::current("AllocEventID");
    return static_cast<TEventID>(
        core.flags.reserve(core.who("AllocEventID"), event, tidal_sim::Flags::kKernelIds));
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    tidal_sim::Core& core = tidal_sim::current("ReleaseEventID");
    core.flags.release(core.who("ReleaseEventID"), event, id);
  }

 private:
  std::array<int, 4> buffers_{};
  int queues_ = 0;
  int tbufs_ = 0;
};

inline TPipe* GetTPipePtr() {
  tidal_sim::Core& core = tidal_sim::current("GetTPipePtr");
  if (core.pipe == nullptr) tidal_sim::refuse(core.who("GetTPipePtr"), "the kernel has no TPipe");
  return core.pipe;
}

}  // namespace AscendC
