// SPDX-License-Identifier: Apache-2.0
// Launch: runs a kernel once for each core, each on a thread of its own, and says what went wrong first.
// May be called from several threads at once. Include it where kernels are started; kernels themselves need
// kernel_operator.h only.

#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core.h"

namespace tidal_sim {

struct Outcome {
  std::string error;             // empty: all cores ended well
  std::vector<Traffic> traffic;  // of each buffer
  std::uint64_t sync_alls = 0;   // that all cores passed
};

inline void run_core(const std::shared_ptr<Device>& device, int id, const std::function<void()>& kernel) {
  Core core(*device, id);
  core_of_this_thread() = &core;
  try {
    kernel();
    core.finish();
    device->ended(id, core.sync_alls);
  } catch (const Stopped&) {
  } catch (const Fault& fault) {
    device->fail(fault.what());
  } catch (const std::exception& error) {
    device->fail(text("core ", id, ": kernel: threw ", error.what()));
  } catch (...) {
    device->fail(text("core ", id, ": kernel: threw what is no std::exception"));
  }
  core_of_this_thread() = nullptr;
  device->left(id, core.traffic);
}

// A core that calls nothing of the simulation any more cannot be stopped; its thread is left behind, and with
// it what it holds. Everything else ends within the deadline and this.
constexpr double kGraceSeconds = 2;

inline std::string list_of(const std::vector<int>& cores) {
  std::string list;
  for (const int core : cores) list += (list.empty() ? "" : ", ") + std::to_string(core);
  return list;
}

inline Outcome Launch(const Options& options, const std::vector<Buffer>& buffers,
                      const std::function<void()>& kernel) {
  if (options.blocks < 1 || options.blocks > kMostCores)
    return {text("launch: blocks = ", options.blocks, ", expected 1 to ", kMostCores), {}, 0};
  std::shared_ptr<Device> device;
  try {
    device = std::make_shared<Device>(options, buffers);
  } catch (const Fault& fault) {
    return {fault.what(), {}, 0};
  }
  std::vector<std::thread> cores;
  for (int id = 0; id < options.blocks; ++id)
    cores.emplace_back([device, id, kernel] { run_core(device, id, kernel); });
  std::vector<int> running = device->running_after(options.deadline_s);
  if (!running.empty()) {
    device->fail(text("launch: the deadline of ", options.deadline_s, " s is over, and core ",
                      list_of(running), " still runs; does a loop of the kernel end?"));
    running = device->running_after(kGraceSeconds);
  }
  for (const int id : running) cores[static_cast<std::size_t>(id)].detach();
  for (std::thread& core : cores)
    if (core.joinable()) core.join();
  return {device->error(), device->traffic(), device->sync_alls()};
}

}  // namespace tidal_sim
