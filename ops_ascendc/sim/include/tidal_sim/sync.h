// SPDX-License-Identifier: Apache-2.0
// What orders things: flags between pipes, barriers of a pipe and of all cores, and cleaning the data cache.

#pragma once

#include "pipe.h"

namespace AscendC {

enum CoreType : int { AIC = 1, AIV = 2 };
inline constexpr CoreType g_coreType = AIV;  // only vector cores are simulated

inline std::int64_t GetBlockIdx() { return tidal_sim::current("GetBlockIdx").id; }
inline std::int64_t GetBlockNum() { return tidal_sim::current("GetBlockNum").device.options.blocks; }

template <HardEvent event>
void SetFlag(std::int32_t id) {
  tidal_sim::Core& core = tidal_sim::current("SetFlag");
  const tidal_sim::Caller who = core.who("SetFlag");
  if (id >= tidal_sim::Flags::kKernelIds)
    tidal_sim::refuse(who, "event id ", id, " of HardEvent::", tidal_sim::event_of(event).name,
                      " is reserved; take 0 to ", tidal_sim::Flags::kKernelIds - 1);
  core.set_flag(who, event, id);
}

template <HardEvent event>
void WaitFlag(std::int32_t id) {
  tidal_sim::Core& core = tidal_sim::current("WaitFlag");
  core.wait_flag(core.who("WaitFlag"), event, id);
}

template <pipe_t pipe>
void PipeBarrier() {
  static_assert(pipe != PIPE_S, "PipeBarrier takes no PIPE_S");
  tidal_sim::Pipes& pipes = tidal_sim::current("PipeBarrier").pipes;
  if constexpr (pipe == PIPE_ALL)
    pipes.barrier_all();
  else
    pipes.barrier(pipe == PIPE_V      ? tidal_sim::Pipe::V
                  : pipe == PIPE_MTE2 ? tidal_sim::Pipe::MTE2
                                      : tidal_sim::Pipe::MTE3);
}

// The hard barrier of all vector cores. What the pipes of each core were given before has ended behind it.
template <bool vector_cores_only = true>
void SyncAll() {
  static_assert(vector_cores_only, "only vector cores are simulated");
  tidal_sim::Core& core = tidal_sim::current("SyncAll");
  const tidal_sim::Caller who = core.who("SyncAll");
  if (core.type != tidal_sim::KernelType::MixAiv10)
    tidal_sim::refuse(who, "needs KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0) in the kernel");
  core.pipes.barrier_all();
  core.device.sync_all(who, ++core.sync_alls);
  core.pipes.next_epoch();
}

// Writes a line of the data cache (that of the tensor's first element), or all of it, back to GM and drops
// it.
template <typename T, CacheLine lines, DcciDst target = DcciDst::CACHELINE_OUT>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& tensor) {
  static_assert(target == DcciDst::CACHELINE_OUT || target == DcciDst::CACHELINE_ALL,
                "the simulation knows the data cache of GM");
  const char* const api = "DataCacheCleanAndInvalid";
  tidal_sim::Core& core = tidal_sim::current(api);
  const tidal_sim::Caller who = core.who(api);
  const auto guard = core.device.memory.guard();
  if constexpr (lines == CacheLine::ENTIRE_DATA_CACHE) {
    core.cache.clean_all(who, core.pipes.scalar());
  } else {
    const tidal_sim::GlobalPlace& place = tensor.Place();
    tidal_sim::GlobalMemory::check(who, place, 0, sizeof(T), tidal_sim::Way::Read);
    if (place.offset % tidal_sim::DataCache::kLine != 0)
      tidal_sim::refuse(who, "buffer '", place.buffer->name, "' offset ", place.offset,
                        ": only the rest of the 64-byte line would be cleaned; begin at a multiple of 64");
    core.cache.clean(who, *place.buffer, place.offset, core.pipes.scalar());
  }
}

}  // namespace AscendC
