// SPDX-License-Identifier: Apache-2.0
// One simulated vector core: its memory, pipes, flags and counters. Lives on the thread that runs the kernel;
// the AscendC calls of that thread find it with current().

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data_cache.h"
#include "device.h"
#include "error.h"
#include "flags.h"
#include "pipes.h"
#include "unified_buffer.h"

namespace AscendC {
class TPipe;
}

namespace tidal_sim {

enum class KernelType { Unsaid, AivOnly, MixAiv10 };

class Core {
 public:
  Core(Device& owner, int number)
      : device(owner),
        id(number),
        ub(poison_of(owner.options.seed), owner.options.lazy_dma),
        pipes(number, owner.options.lazy_dma, owner.options.seed),
        traffic(owner.memory.size()) {}
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  Device& device;
  const int id;
  UnifiedBuffer ub;
  Pipes pipes;
  Flags flags;
  DataCache cache;
  std::vector<Traffic> traffic;
  std::uint64_t sync_alls = 0;
  AscendC::TPipe* pipe = nullptr;
  KernelType type = KernelType::Unsaid;

  Caller who(const char* api) const { return {id, api}; }

  // What SetFlag and WaitFlag do, for kernels and queues alike.
  void set_flag(const Caller& caller, AscendC::HardEvent event, int flag) {
    flags.set(caller, event, flag, pipes.set_flag(event_of(event).from));
  }
  void wait_flag(const Caller& caller, AscendC::HardEvent event, int flag) {
    pipes.wait_flag(event_of(event).to, flags.wait(caller, event, flag));
  }

  bool tiling_key_is(std::uint64_t key) {
    key_asked_ = true;
    key_found_ = key_found_ || key == device.options.tiling_key;
    return key == device.options.tiling_key;
  }

  // Everything that a kernel must have put away when it returns.
  void finish() {
    const Caller end = who("end of the kernel");
    pipes.barrier_all();
    for (LocalBuffer& buffer : ub.buffers()) {
      if (buffer.freed >= 0)
        flags.wait(end, buffer.freed_event, buffer.freed);  // as TPipe does on its way out
      if (buffer.state != State::Idle && buffer.state != State::Open)
        refuse(end, "UB buffer '", buffer.name, "' at UB offset ", buffer.offset, " is still ",
               name_of(buffer.state), "; a FreeTensor is missing");
    }
    flags.check_end(id);
    cache.check_end(id);
    if (key_asked_ && !key_found_)
      refuse(end, "no TILING_KEY_IS knows the key ", device.options.tiling_key, " of this launch");
  }

 private:
  // Never 0, which too many bugs take for a right value.
  static std::uint8_t poison_of(std::uint64_t seed) {
    return static_cast<std::uint8_t>(0xA5 ^ (seed * 2 % 128));
  }

  bool key_asked_ = false;
  bool key_found_ = false;
};

inline Core*& core_of_this_thread() {
  static thread_local Core* core = nullptr;
  return core;
}

// The core that an API is called on. Each call passes here, so a launch that has failed ends on all cores.
inline Core& current(const char* api) {
  Core* core = core_of_this_thread();
  if (core == nullptr) throw Fault(text(api, ": called outside of a launch; use tidal_sim::Launch"));
  if (core->device.stopped()) throw Stopped{};
  return *core;
}

}  // namespace tidal_sim
