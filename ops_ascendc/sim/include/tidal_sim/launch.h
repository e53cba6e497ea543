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

inline void run_core(Core& core, const std::function<void()>& kernel) {
  Device& device = core.device;
  core_of_this_thread() = &core;
  try {
    kernel();
    core.finish();
    device.ended(core.id, core.sync_alls);
  } catch (const Stopped&) {
  } catch (const Fault& fault) {
    device.fail(fault.what());
  } catch (const std::exception& error) {
    device.fail(text("core ", core.id, ": kernel: threw ", error.what()));
  } catch (...) {
    device.fail(text("core ", core.id, ": kernel: threw what is no std::exception"));
  }
  core_of_this_thread() = nullptr;
  device.left(core.id, core.traffic);
}

// A core that calls nothing of the simulation any more cannot be stopped; after this its thread is left
// behind, and with it what it holds. Every other core has ended by then.
constexpr double kGraceSeconds = 1;

inline std::string list_of(const std::vector<int>& cores) {
  std::string list;
  for (const int core : cores) list += (list.empty() ? "" : ", ") + std::to_string(core);
  return list;
}

// Starts a thread for each core and waits for their end, for the deadline and the grace at most.
inline void run_cores(const std::shared_ptr<Device>& device, const std::function<void()>& kernel) {
  std::vector<std::thread> threads;
  try {
    for (int id = 0; id < device->options.blocks; ++id) {
      const auto core = std::make_shared<Core>(*device, id);
      threads.emplace_back([device, core, kernel] { run_core(*core, kernel); });
    }
  } catch (const std::exception& error) {
    const int first = static_cast<int>(threads.size());
    device->fail(text("launch: no thread or memory for core ", first, ": ", error.what()));
    for (int id = first; id < device->options.blocks; ++id) device->left(id, {});
  }
  std::vector<int> running = device->running_after(device->options.deadline_s);
  if (!running.empty()) {
    device->fail(text("launch: the deadline of ", device->options.deadline_s, " s is over, and core ",
                      list_of(running), " still runs; does a loop of the kernel end?"));
    running = device->running_after(kGraceSeconds);
  }
  for (const int id : running) threads[static_cast<std::size_t>(id)].detach();
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
}

// Throws nothing; each error is a line in the outcome.
inline Outcome Launch(const Options& options, const std::vector<Buffer>& buffers,
                      const std::function<void()>& kernel) {
  if (options.blocks < 1 || options.blocks > kMostCores)
    return {text("launch: blocks = ", options.blocks, ", expected 1 to ", kMostCores), {}, 0};
  try {
    const auto device = std::make_shared<Device>(options, buffers);
    run_cores(device, kernel);
    return {device->error(), device->traffic(), device->sync_alls()};
  } catch (const std::exception& error) {
    return {error.what(), {}, 0};
  }
}

}  // namespace tidal_sim
