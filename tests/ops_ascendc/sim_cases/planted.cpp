// SPDX-License-Identifier: Apache-2.0
// Faults for the sanitizers to find, through raw addresses, which the simulation does not check. They run
// only when they are named.

#include <atomic>
#include <limits>
#include <thread>

#include "case.h"

namespace sim_cases {
namespace {

std::string planted(tidal_sim::Options options, int blocks, Kernel kernel) {
  Bed bed;
  options.blocks = blocks;
  return tidal_sim::Launch(options, bed.buffers(), [&] { kernel(bed); }).error;
}

}  // namespace

PLANTED(planted_overrun) {
  return planted(options, 1, [](Bed& bed) {
    volatile std::uint8_t* behind = bed.Out();
    behind[Bed::kBytes + static_cast<std::size_t>(GetBlockIdx())] = 1;
  });
}

PLANTED(planted_overflow) {
  return planted(options, 1, [](Bed& bed) {
    volatile int most = std::numeric_limits<int>::max();
    const int sum = most + static_cast<int>(GetBlockNum());  // a cast of the sum itself may never add ints
    bed.Out()[0] = static_cast<std::uint8_t>(sum);
  });
}

PLANTED(planted_race) {
  static std::atomic<int> here;
  here = 0;
  return planted(options, 2, [](Bed& bed) {
    // Relaxed, which orders nothing: both run at once, or the end of one might be ordered before the other.
    here.fetch_add(1, std::memory_order_relaxed);
    while (here.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    volatile std::uint8_t* both = bed.Out();
    for (int i = 0; i < 100; ++i) both[0] = static_cast<std::uint8_t>(both[0] + 1);
  });
}

}  // namespace sim_cases
