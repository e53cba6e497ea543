// SPDX-License-Identifier: Apache-2.0
// Faults for the sanitizers to find, through raw addresses, which the simulation does not check. They run
// only when they are named.

#include <limits>

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
    const int most = std::numeric_limits<int>::max();
    bed.Out()[0] = static_cast<std::uint8_t>(most + static_cast<int>(GetBlockNum()));
  });
}

PLANTED(planted_race) {
  return planted(options, 2, [](Bed& bed) {
    volatile std::uint8_t* both = bed.Out();
    for (int i = 0; i < 10000; ++i) both[0] = static_cast<std::uint8_t>(both[0] + 1);
  });
}

}  // namespace sim_cases
