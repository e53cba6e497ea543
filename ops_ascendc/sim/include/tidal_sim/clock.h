// SPDX-License-Identifier: Apache-2.0
// The pipes of a core, and the vocabulary of "happened before" between them.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "types.h"

namespace tidal_sim {

enum class Pipe : std::uint8_t { S, V, MTE2, MTE3 };
constexpr std::size_t kPipes = 4;

inline std::size_t index_of(Pipe pipe) { return static_cast<std::size_t>(pipe); }

inline const char* name_of(Pipe pipe) {
  constexpr const char* names[kPipes] = {"S", "V", "MTE2", "MTE3"};
  return names[index_of(pipe)];
}

struct Event {
  const char* name;
  Pipe from, to;
};

constexpr std::array<Event, 12> kEvents = {{
    {"MTE2_V", Pipe::MTE2, Pipe::V},
    {"V_MTE2", Pipe::V, Pipe::MTE2},
    {"MTE3_V", Pipe::MTE3, Pipe::V},
    {"V_MTE3", Pipe::V, Pipe::MTE3},
    {"MTE2_MTE3", Pipe::MTE2, Pipe::MTE3},
    {"MTE3_MTE2", Pipe::MTE3, Pipe::MTE2},
    {"MTE2_S", Pipe::MTE2, Pipe::S},
    {"S_MTE2", Pipe::S, Pipe::MTE2},
    {"MTE3_S", Pipe::MTE3, Pipe::S},
    {"S_MTE3", Pipe::S, Pipe::MTE3},
    {"V_S", Pipe::V, Pipe::S},
    {"S_V", Pipe::S, Pipe::V},
}};
static_assert(kEvents[static_cast<std::size_t>(AscendC::HardEvent::S_V)].to == Pipe::V);

inline const Event& event_of(AscendC::HardEvent event) { return kEvents[static_cast<std::size_t>(event)]; }

// For each pipe the number of the last of its instructions that has ended.
class Clock {
 public:
  std::uint64_t& operator[](Pipe pipe) { return ended_[index_of(pipe)]; }
  std::uint64_t operator[](Pipe pipe) const { return ended_[index_of(pipe)]; }

  void join(const Clock& other) {
    for (std::size_t i = 0; i < kPipes; ++i) ended_[i] = std::max(ended_[i], other.ended_[i]);
  }

 private:
  std::array<std::uint64_t, kPipes> ended_{};
};

// An access to memory: who makes it, and what is known to have ended before it begins. `epoch` counts
// SyncAll, which orders everything before it on all cores against everything behind it.
struct Moment {
  int core;
  Pipe pipe;
  std::uint64_t number;
  std::uint64_t epoch;
  Clock known;
};

}  // namespace tidal_sim
