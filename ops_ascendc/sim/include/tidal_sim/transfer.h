// SPDX-License-Identifier: Apache-2.0
// A DMA between the two memories: blocks of equal length at equal steps on each side. All checks are made
// when it is issued; the bytes move when its pipe runs it.

#pragma once

#include <array>
#include <cstring>

#include "access.h"

namespace tidal_sim {

struct Transfer {
  std::uint32_t count;        // blocks
  std::uint32_t bytes;        // of a block in GM
  std::uint64_t global_step;  // bytes from the start of a block to that of the next
  std::uint64_t local_step;
  std::uint32_t left = 0, right = 0;   // bytes of padding that are filled, on the way in
  std::array<std::uint8_t, 8> fill{};  // with this element
  std::uint32_t fill_bytes = 1;

  std::uint32_t local_bytes() const { return round_up(left + bytes + right); }
};

inline void check_local_start(const Caller& who, const LocalPlace& place) {
  if (place.buffer != nullptr && place.offset % kUbBlock != 0)
    refuse(who, "UB buffer '", place.buffer->name, "' offset ", place.offset, ": a DMA needs a multiple of ",
           kUbBlock, " bytes here");
}

// The bytes of one block in UB, padded; what is neither data nor filled stays undefined.
inline void fill_block(std::uint8_t* to, const std::uint8_t* from, const Transfer& plan,
                       std::uint8_t poison) {
  for (std::uint32_t i = 0; i < plan.left; ++i) to[i] = plan.fill[i % plan.fill_bytes];
  std::memcpy(to + plan.left, from, plan.bytes);
  std::uint8_t* const right = to + plan.left + plan.bytes;
  for (std::uint32_t i = 0; i < plan.right; ++i) right[i] = plan.fill[i % plan.fill_bytes];
  std::memset(right + plan.right, poison, plan.local_bytes() - plan.left - plan.bytes - plan.right);
}

// GM to UB, on pipe MTE2.
inline void copy_in(const char* api, const LocalPlace& to, const GlobalPlace& from, const Transfer& plan) {
  Core& core = current(api);
  const Caller who = core.who(api);
  if (plan.count == 0 || plan.bytes == 0) return;
  check_local_start(who, to);
  const std::uint32_t filled = plan.left + plan.bytes + plan.right;
  for (std::uint32_t i = 0; i < plan.count; ++i) {
    GlobalMemory::check(who, from, i * plan.global_step, plan.bytes, Way::Read);
    core.ub.check(who, to, i * plan.local_step, plan.local_bytes(), true);
  }
  const GlobalBuffer& buffer = *from.buffer;
  core.traffic[buffer.index].dma_read += std::uint64_t{plan.count} * plan.bytes;
  const Moment moment = core.pipes.issue(Pipe::MTE2);
  const std::uint32_t first = to.buffer->offset + to.offset;
  for (std::uint32_t i = 0; i < plan.count; ++i) {
    const auto local = static_cast<std::uint32_t>(i * plan.local_step);
    {
      const auto guard = core.device.memory.guard();
      check_order(who, buffer, from.offset + i * plan.global_step, plan.bytes, moment, Way::Read);
    }
    core.ub.check_order(who, to, local, plan.local_bytes(), moment, true);
    core.ub.set_written(first + local, plan.local_bytes(), false);
    core.ub.set_written(first + local, filled, true);
  }
  const std::uint8_t* const source = buffer.data + from.offset;
  core.pipes.submit(moment, [&core, source, first, plan] {
    const auto guard = core.device.memory.guard();
    for (std::uint32_t i = 0; i < plan.count; ++i)
      fill_block(core.ub.data(first + static_cast<std::uint32_t>(i * plan.local_step)),
                 source + i * plan.global_step, plan, core.ub.poison());
  });
}

// UB to GM, on pipe MTE3.
inline void copy_out(const char* api, const GlobalPlace& to, const LocalPlace& from, const Transfer& plan) {
  Core& core = current(api);
  const Caller who = core.who(api);
  if (plan.count == 0 || plan.bytes == 0) return;
  check_local_start(who, from);
  for (std::uint32_t i = 0; i < plan.count; ++i) {
    GlobalMemory::check(who, to, i * plan.global_step, plan.bytes, Way::Write);
    core.ub.check(who, from, i * plan.local_step, plan.bytes, true);
  }
  const GlobalBuffer& buffer = *to.buffer;
  core.traffic[buffer.index].dma_written += std::uint64_t{plan.count} * plan.bytes;
  const Moment moment = core.pipes.issue(Pipe::MTE3);
  const std::uint32_t first = from.buffer->offset + from.offset;
  for (std::uint32_t i = 0; i < plan.count; ++i) {
    const auto local = static_cast<std::uint32_t>(i * plan.local_step);
    core.ub.check_order(who, from, local, plan.bytes, moment, false);
    core.ub.check_written(who, from, local, plan.bytes);
    const auto guard = core.device.memory.guard();
    check_order(who, buffer, to.offset + i * plan.global_step, plan.bytes, moment, Way::Write);
  }
  std::uint8_t* const target = buffer.data + to.offset;
  core.pipes.submit(moment, [&core, target, first, plan] {
    const auto guard = core.device.memory.guard();
    for (std::uint32_t i = 0; i < plan.count; ++i)
      std::memcpy(target + i * plan.global_step,
                  core.ub.data(first + static_cast<std::uint32_t>(i * plan.local_step)), plan.bytes);
  });
}

}  // namespace tidal_sim
