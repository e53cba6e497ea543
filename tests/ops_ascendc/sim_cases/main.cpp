// SPDX-License-Identifier: Apache-2.0
// Runs every case in every mode, or with arguments only the cases named. One line for each run, parted by
// tabs: case, mode, the error expected (* stands for anything), the error.

#include <algorithm>
#include <iostream>

#include "case.h"

namespace sim_cases {

Bed::Bed() {
  for (std::size_t i = 0; i < kBytes; ++i) in[i] = static_cast<std::uint8_t>(i * 31 + i / 256 * 7 + 1);
  out.fill(0);
}

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

static std::string launch(tidal_sim::Options options, int blocks, bool (*holds)(const Bed&), Kernel kernel) {
  Bed bed;
  options.blocks = blocks;
  const std::string error = tidal_sim::Launch(options, bed.buffers(), [&] { kernel(bed); }).error;
  if (!error.empty()) return error;
  return holds(bed) ? "" : "the output is wrong";
}

AddFault::AddFault(const char* name, int blocks, Seen seen, const char* error, Kernel kernel) {
  cases().push_back({name, [=](const auto& options) { return launch(options, blocks, anything, kernel); },
                     [=](const auto& options) { return seen_in(seen, options) ? error : ""; }});
}

AddRight::AddRight(const char* name, int blocks, bool (*holds)(const Bed&), Kernel kernel) {
  cases().push_back({name, [=](const auto& options) { return launch(options, blocks, holds, kernel); },
                     [](const auto&) { return ""; }});
}

AddLaunch::AddLaunch(const char* name, const char* error, std::string (*run)(tidal_sim::Options),
                     bool only_when_named) {
  cases().push_back({name, run, [=](const auto&) { return error; }, only_when_named});
}

}  // namespace sim_cases

int main(int count, char** names) {
  for (const auto& each : sim_cases::cases()) {
    const bool named = std::find(names + 1, names + count, std::string(each.name)) != names + count;
    if (count > 1 ? !named : each.only_when_named) continue;
    for (const bool lazy : {false, true})
      for (const bool cache : {false, true})
        for (const std::uint64_t seed : {0, 1}) {
          tidal_sim::Options options;
          options.lazy_dma = lazy;
          options.scalar_cache = cache;
          options.seed = seed;
          options.deadline_s = 20;
          std::cout << each.name << '\t' << (lazy ? "lazy " : "") << (cache ? "cache " : "") << "seed "
                    << seed << '\t' << each.expected(options) << '\t' << each.run(options) << std::endl;
        }
  }
}
