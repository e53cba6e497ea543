// SPDX-License-Identifier: Apache-2.0
// Cases of the simulation: small kernels that keep a rule or break one. FAULT names the error that its kernel
// must give, RIGHT what must hold behind it; main.cpp runs each in every mode.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernel_operator.h"
#include "tidal_sim/launch.h"

namespace sim_cases {

using namespace AscendC;

// The tensors that kernels get: `in` may only be read; `out` begins as zeros.
struct Bed {
  static constexpr std::size_t kBytes = 4096;
  alignas(64) std::array<std::uint8_t, kBytes> in;
  alignas(64) std::array<std::uint8_t, kBytes> out;

  Bed();
  GM_ADDR In() { return in.data(); }
  GM_ADDR Out() { return out.data(); }
  template <typename T>
  GlobalTensor<T> Input() {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<T*>(In()));
    return tensor;
  }
  template <typename T>
  GlobalTensor<T> Output() {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<T*>(Out()));
    return tensor;
  }
  std::vector<tidal_sim::Buffer> buffers() {
    return {{"in", in.data(), kBytes, false}, {"out", out.data(), kBytes, true}};
  }
};

// In which modes a fault is seen: in all, or in those with the strict mode named.
enum class Seen { Always, Lazy, Cache, LazyOrCache };

inline bool seen_in(Seen seen, const tidal_sim::Options& options) {
  switch (seen) {
    case Seen::Lazy:
      return options.lazy_dma;
    case Seen::Cache:
      return options.scalar_cache;
    case Seen::LazyOrCache:
      return options.lazy_dma || options.scalar_cache;
    default:
      return true;
  }
}

struct Case {
  const char* name;
  std::function<std::string(const tidal_sim::Options&)> run;  // the error, or what did not hold
  std::function<std::string(const tidal_sim::Options&)> expected;
  bool only_when_named = false;
};

std::vector<Case>& cases();

using Kernel = void (*)(Bed&);
struct AddFault {
  AddFault(const char* name, int blocks, Seen seen, const char* error, Kernel kernel);
};
struct AddRight {
  AddRight(const char* name, int blocks, bool (*holds)(const Bed&), Kernel kernel);
};
struct AddLaunch {
  AddLaunch(const char* name, const char* error, std::string (*run)(tidal_sim::Options),
            bool only_when_named = false);
};

// What several kernels do.
inline DataCopyExtParams block(std::uint32_t length) { return {1, length, 0, 0, 0}; }
template <typename T>
DataCopyPadExtParams<T> no_pad() {
  return {false, 0, 0, T{}};
}
template <HardEvent event>
void sync(std::int32_t id = 0) {
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

inline bool same(const Bed& bed) { return bed.in == bed.out; }
inline bool anything(const Bed&) { return true; }

}  // namespace sim_cases

#define FAULT(name, blocks, seen, error)                                    \
  static void name(Bed& bed);                                               \
  static const AddFault add_##name(#name, blocks, Seen::seen, error, name); \
  static void name([[maybe_unused]] Bed& bed)
#define RIGHT(name, blocks, holds)                              \
  static void name(Bed& bed);                                   \
  static const AddRight add_##name(#name, blocks, holds, name); \
  static void name([[maybe_unused]] Bed& bed)
#define LAUNCH(name, error)                              \
  static std::string name(tidal_sim::Options options);   \
  static const AddLaunch add_##name(#name, error, name); \
  static std::string name([[maybe_unused]] tidal_sim::Options options)
#define PLANTED(name)                                       \
  static std::string name(tidal_sim::Options options);      \
  static const AddLaunch add_##name(#name, "", name, true); \
  static std::string name([[maybe_unused]] tidal_sim::Options options)
