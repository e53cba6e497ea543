// SPDX-License-Identifier: Apache-2.0
// What the cores of one launch share: options, global memory, the barrier of SyncAll, and the first error.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "global_memory.h"

namespace tidal_sim {

struct Options {
  int blocks = 1;                // cores, 1 to kMostCores
  std::uint64_t tiling_key = 0;  // what TILING_KEY_IS compares with
  bool lazy_dma = false;      // strict: DMA runs late, and every access must be ordered behind earlier ones
  bool scalar_cache = false;  // strict: GetValue and SetValue of GM go through a data cache for each core
  std::uint64_t seed = 0;     // the poison, and in lazy_dma how late DMA runs (0: as late as possible)
  double deadline_s = 60;     // after which a launch is given up
};
constexpr int kMostCores = 64;

class Device {
 public:
  Device(const Options& chosen, const std::vector<Buffer>& buffers)
      : options(chosen),
        memory(buffers, chosen.lazy_dma || chosen.scalar_cache),
        traffic_(buffers.size()),
        running_(static_cast<std::size_t>(chosen.blocks), true) {}

  const Options options;
  GlobalMemory memory;

  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  // Keeps the first error and lets all other cores unwind.
  void fail(const std::string& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
    stopped_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
  }

  // SyncAll number `number` of a core: returns once all cores are here.
  void sync_all(const Caller& who, std::uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto refuse_if_one_ended = [&] {
      if (ended_core_ >= 0)
        refuse(who, "waits in SyncAll number ", number, ", but core ", ended_core_, " ended after ",
               ended_syncs_, "; every core must call SyncAll equally often");
    };
    refuse_if_one_ended();
    if (++arrived_ == options.blocks) {
      arrived_ = 0;
      ++rounds_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return rounds_ >= number || ended_core_ >= 0 || stopped(); });
    if (rounds_ >= number) return;
    if (stopped()) throw Stopped{};
    refuse_if_one_ended();
  }

  // A core reached the end of its kernel without an error.
  void ended(int core, std::uint64_t syncs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_core_ < 0) {
      ended_core_ = core;
      ended_syncs_ = syncs;
    }
    changed_.notify_all();
  }

  // The thread of a core is about to return.
  void left(int core, const std::vector<Traffic>& traffic) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < traffic.size(); ++i) {
      traffic_[i].dma_read += traffic[i].dma_read;
      traffic_[i].dma_written += traffic[i].dma_written;
      traffic_[i].scalar_read += traffic[i].scalar_read;
      traffic_[i].scalar_written += traffic[i].scalar_written;
    }
    running_[static_cast<std::size_t>(core)] = false;
    changed_.notify_all();
  }

  // The cores that still run after `seconds`; empty as soon as none does.
  std::vector<int> running_after(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto list = [&] {
      std::vector<int> cores;
      for (std::size_t i = 0; i < running_.size(); ++i)
        if (running_[i]) cores.push_back(static_cast<int>(i));
      return cores;
    };
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return list().empty(); });
    return list();
  }

  std::string error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }
  std::vector<Traffic> traffic() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return traffic_;
  }
  std::uint64_t sync_alls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return rounds_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> stopped_{false};
  std::string error_;
  int arrived_ = 0;
  std::uint64_t rounds_ = 0;
  int ended_core_ = -1;
  std::uint64_t ended_syncs_ = 0;
  std::vector<Traffic> traffic_;
  std::vector<bool> running_;
};

}  // namespace tidal_sim
