// SPDX-License-Identifier: Apache-2.0
// The flags of one core, 8 for each hard event, and which of their ids are taken. A flag is set once and
// waited for once; on a device the rest is a hang, so here it is an error.

#pragma once

#include <array>

#include "clock.h"
#include "error.h"

namespace tidal_sim {

class Flags {
 public:
  static constexpr int kIds = 8;
  static constexpr int kKernelIds = 6;  // 6 and 7 are reserved for the queues

  void set(const Caller& who, AscendC::HardEvent event, int id, const Clock& clock) {
    Flag& flag = at(who, event, id);
    if (flag.set)
      refuse(who, "flag ", id, " of HardEvent::", event_of(event).name,
             " is set already, perhaps by a queue; its WaitFlag must come first, or take an id from "
             "AllocEventID");
    flag.set = true;
    flag.clock = clock;
  }

  Clock wait(const Caller& who, AscendC::HardEvent event, int id) {
    Flag& flag = at(who, event, id);
    if (!flag.set)
      refuse(who, "flag ", id, " of HardEvent::", event_of(event).name,
             " was never set, so a device waits for ever; set it first");
    flag.set = false;
    return flag.clock;
  }

  // The first id below `limit` that nobody has reserved. Whether somebody set it regardless is not known on a
  // device either.
  int find(const Caller& who, AscendC::HardEvent event, int limit) const {
    for (int id = 0; id < limit; ++id)
      if (!flags_[static_cast<std::size_t>(event)][static_cast<std::size_t>(id)].reserved) return id;
    refuse(who, "no event id of HardEvent::", event_of(event).name, " is free below ", limit,
           "; release some, or use fewer buffers");
  }

  int reserve(const Caller& who, AscendC::HardEvent event, int limit) {
    const int id = find(who, event, limit);
    at(who, event, id).reserved = true;
    return id;
  }

  void release(const Caller& who, AscendC::HardEvent event, int id) {
    Flag& flag = at(who, event, id);
    if (!flag.reserved)
      refuse(who, "event id ", id, " of HardEvent::", event_of(event).name, " is not reserved");
    if (flag.set)
      refuse(who, "flag ", id, " of HardEvent::", event_of(event).name, " is still set; wait for it first");
    flag.reserved = false;
  }

  void check_end(int core) const {
    for (std::size_t event = 0; event < kEvents.size(); ++event)
      for (std::size_t id = 0; id < kIds; ++id)
        if (flags_[event][id].set)
          refuse({core, "end of the kernel"}, "flag ", id, " of HardEvent::", kEvents[event].name,
                 " is still set; a WaitFlag is missing");
  }

 private:
  struct Flag {
    bool set = false;
    bool reserved = false;
    Clock clock;
  };

  Flag& at(const Caller& who, AscendC::HardEvent event, int id) {
    if (id < 0 || id >= kIds)
      refuse(who, "event id ", id, " of HardEvent::", event_of(event).name, " does not exist; take 0 to ",
             kKernelIds - 1);
    return flags_[static_cast<std::size_t>(event)][static_cast<std::size_t>(id)];
  }

  std::array<std::array<Flag, kIds>, kEvents.size()> flags_;
};

}  // namespace tidal_sim
