// SPDX-License-Identifier: Apache-2.0
// The C interface of the simulated kernels: host tiling first, as CANN would, then the kernel on simulated
// cores.

#include "tidal_kernels.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tidal_miss_host.h"
#include "tidal_selection_host.h"
#include "tidal_sim/launch.h"

using Address = uint8_t*;

extern "C" void gather_selection_kv_cache(Address, Address, Address, Address, Address, Address, Address,
                                          Address, Address, Address, Address, Address, Address, Address,
                                          Address, Address, Address);
extern "C" void gather_miss_rows(Address, Address, Address, Address, Address, Address, Address, Address,
                                 Address, Address, Address);

namespace {

constexpr int64_t kUbBytes = 192 * 1024;
// Stands for what CANN keeps for itself at the begin of a workspace.
constexpr int64_t kSystemWorkspace = 512;
constexpr int64_t kAlignment = 512;
constexpr unsigned char kGarbage = 0xA5;  // a workspace comes as the last operator left it

const char* const kSelectionNames[TIDAL_SELECTION_TENSORS] = {"selection_k_rope",
                                                              "selection_kv_cache",
                                                              "selection_kv_block_table",
                                                              "selection_kv_block_status",
                                                              "selection_topk_indices",
                                                              "full_k_rope",
                                                              "full_kv_cache",
                                                              "full_kv_block_table",
                                                              "full_kv_actual_seq",
                                                              "full_q_actual_seq",
                                                              "selection_kv_actual_seq"};
const bool kSelectionWritten[TIDAL_SELECTION_TENSORS] = {true,  true,  false, true,  false, false,
                                                         false, false, false, false, true};
const char* const kMissNames[TIDAL_MISS_TENSORS] = {"selection_k_rope", "selection_kv_cache", "full_k_rope",
                                                    "full_kv_cache",    "miss_rows",          "miss_slots",
                                                    "miss_count"};
const bool kMissWritten[TIDAL_MISS_TENSORS] = {true, true, false, false, false, false, false};

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

int64_t BytesOf(const TidalTensor& tensor) {
  static const int64_t kBytes[] = {2, 2, 1, 4, 4};
  int64_t bytes = kBytes[tensor.element];
  for (int32_t i = 0; i < tensor.rank; ++i) bytes *= tensor.dims[i];
  return bytes;
}

tidal::host::Argument ArgumentOf(const char* name, const TidalTensor& tensor) {
  return {name, static_cast<tidal::host::Element>(tensor.element), {tensor.dims, tensor.dims + tensor.rank}};
}

void Say(const std::string& error, TidalReport& report) {
  std::snprintf(report.error, sizeof(report.error), "%s", error.c_str());
}

tidal::host::Platform PlatformOf(const TidalMachine& machine) {
  return {machine.cores, machine.ub_bytes != 0 ? machine.ub_bytes : kUbBytes, kSystemWorkspace};
}

// Starts the kernel on `launch.cores` cores; `call` gets the workspace and the tiling.
template <typename Tiling, typename Call>
int Run(const TidalTensor* tensors, const char* const* names, const bool* written, int count,
        tidal::host::Launch<Tiling>& launch, const TidalMachine& machine, TidalReport& report,
        const Call& call) {
  const auto bytes = static_cast<size_t>(tidal::host::RoundedUp(launch.workspace, kAlignment));
  const std::unique_ptr<void, Freed> workspace(std::aligned_alloc(kAlignment, bytes));
  if (!workspace) throw std::bad_alloc();
  std::memset(workspace.get(), kGarbage, bytes);
  std::vector<tidal_sim::Buffer> buffers;
  for (int i = 0; i < count; ++i) {
    buffers.push_back({names[i], tensors[i].data, static_cast<size_t>(BytesOf(tensors[i])), written[i]});
  }
  buffers.push_back({"workspace", workspace.get(), static_cast<size_t>(launch.workspace), true});
  buffers.push_back({"tiling", &launch.tiling, sizeof(launch.tiling), false});
  tidal_sim::Options options;
  options.blocks = static_cast<int>(launch.cores);
  options.tiling_key = launch.key;
  options.lazy_dma = machine.lazy_dma != 0;
  options.scalar_cache = machine.scalar_cache != 0;
  options.seed = machine.seed;
  const auto space = static_cast<Address>(workspace.get());
  const auto tiling = reinterpret_cast<Address>(&launch.tiling);
  const tidal_sim::Outcome outcome = tidal_sim::Launch(options, buffers, [&] { call(space, tiling); });
  report.tiling_key = launch.key;
  report.cores = launch.cores;
  report.workspace_bytes = launch.workspace;
  report.barriers = outcome.sync_alls;
  for (size_t i = 0; i < static_cast<size_t>(count) && i < outcome.traffic.size(); ++i) {
    const tidal_sim::Traffic& seen = outcome.traffic[i];
    report.traffic[i] = {seen.dma_read, seen.dma_written, seen.scalar_read, seen.scalar_written};
  }
  Say(outcome.error, report);
  return outcome.error.empty() ? TIDAL_DONE : TIDAL_STOPPED;
}

// The address of each tensor, as a kernel gets it.
std::vector<Address> AddressesOf(const TidalTensor* tensors, int count) {
  std::vector<Address> addresses;
  for (int i = 0; i < count; ++i) addresses.push_back(static_cast<Address>(tensors[i].data));
  return addresses;
}

}  // namespace

int tidal_gather_selection_kv_cache(const TidalTensor* tensors, int64_t selection_topk_block_size,
                                    const TidalMachine* machine, TidalReport* report) {
  *report = {};
  std::vector<tidal::host::Argument> named;
  for (int i = 0; i < TIDAL_SELECTION_TENSORS; ++i)
    named.push_back(ArgumentOf(kSelectionNames[i], tensors[i]));
  const tidal::host::SelectionArguments given{{named[0], named[1], named[5], named[6]},
                                              named[2],
                                              named[3],
                                              named[4],
                                              named[7],
                                              named[8],
                                              named[9],
                                              named[10],
                                              selection_topk_block_size};
  tidal::host::Launch<tidal::SelectionTiling> launch;
  if (const std::string error = TileSelection(given, PlatformOf(*machine), launch); !error.empty()) {
    Say(error, *report);
    return TIDAL_REFUSED_BY_HOST;
  }
  const std::vector<Address> at = AddressesOf(tensors, TIDAL_SELECTION_TENSORS);
  return Run(tensors, kSelectionNames, kSelectionWritten, TIDAL_SELECTION_TENSORS, launch, *machine, *report,
             [&](Address workspace, Address tiling) {
               gather_selection_kv_cache(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9],
                                         at[0], at[1], at[2], at[3], at[10], workspace, tiling);
             });
}

int tidal_gather_miss_rows(const TidalTensor* tensors, const TidalMachine* machine, TidalReport* report) {
  *report = {};
  std::vector<tidal::host::Argument> named;
  for (int i = 0; i < TIDAL_MISS_TENSORS; ++i) named.push_back(ArgumentOf(kMissNames[i], tensors[i]));
  const tidal::host::MissArguments given{
      {named[0], named[1], named[2], named[3]}, named[4], named[5], named[6]};
  tidal::host::Launch<tidal::MissTiling> launch;
  if (const std::string error = TileMisses(given, PlatformOf(*machine), launch); !error.empty()) {
    Say(error, *report);
    return TIDAL_REFUSED_BY_HOST;
  }
  const std::vector<Address> at = AddressesOf(tensors, TIDAL_MISS_TENSORS);
  return Run(tensors, kMissNames, kMissWritten, TIDAL_MISS_TENSORS, launch, *machine, *report,
             [&](Address workspace, Address tiling) {
               gather_miss_rows(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[0], at[1], workspace,
                                tiling);
             });
}
