// SPDX-License-Identifier: Apache-2.0
// Several cores: SyncAll, races between cores, failing, hanging; and the launch itself.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "case.h"

namespace sim_cases {
namespace {

constexpr std::uint32_t kPart = 512;

// Copies part `from` of a tensor to part `to` of the output.
void copy_part(const GlobalTensor<std::uint8_t>& source, std::uint64_t from, Bed& bed, std::uint64_t to) {
  TPipe pipe;
  TBuf<> room;
  pipe.InitBuffer(room, kPart);
  const auto tensor = room.Get<std::uint8_t>();
  DataCopy(tensor, source[from * kPart], kPart);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(bed.Output<std::uint8_t>()[to * kPart], tensor, kPart);
}

bool second_half_follows(const Bed& bed) {
  return std::equal(bed.in.begin(), bed.in.begin() + 4 * kPart, bed.out.begin() + 4 * kPart);
}

}  // namespace

RIGHT(cores_share_the_work, 8, same) {
  ASSERT_MSG(GetBlockNum() == 8, "%ld cores", static_cast<long>(GetBlockNum()));
  const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
  copy_part(bed.Input<std::uint8_t>(), mine, bed, mine);
}

RIGHT(sync_all_orders_the_cores, 4, second_half_follows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
  copy_part(bed.Input<std::uint8_t>(), mine, bed, mine);
  SyncAll<true>();
  const std::uint64_t other = (mine + 1) % 4;
  copy_part(bed.Output<std::uint8_t>(), other, bed, other + 4);
}

RIGHT(only_vector_cores_run, 2, anything) {
  if ASCEND_IS_AIC
    ASSERT_MSG(false, "a cube core");
  ASSERT_MSG(ASCEND_IS_AIV && g_coreType != AIC, "core type %d", static_cast<int>(g_coreType));
}

RIGHT(the_tiling_key_chooses, 1, anything) {
  if (TILING_KEY_IS(1)) {
    ASSERT_MSG(false, "key 1");
  } else if (TILING_KEY_IS(0)) {
    ASSERT_MSG(true, "key 0");
  }
}

FAULT(no_tiling_key_is_known, 1, Always,
      "core 0: end of the kernel: no TILING_KEY_IS knows the key 0 of this launch") {
  if (TILING_KEY_IS(1) || TILING_KEY_IS(2)) return;
}

FAULT(assertion_of_a_kernel, 1, Always, "core 0: ASSERT_MSG: page 7 of 3 (page < 3, line *)") {
  const int page = 7;
  ASSERT_MSG(page < 3, "page %d of %d", page, 3);
}

FAULT(sync_all_without_the_type, 2, Always,
      "core *: SyncAll: needs KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0) in the kernel") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  SyncAll();
}

// Core 2 leaves after one round: the others must neither wait for ever nor go on.
FAULT(a_core_leaves_out_a_sync_all, 4, Always,
      "core *: SyncAll: waits in SyncAll number 2, but core 2 ended after 1; every core must call SyncAll "
      "equally often") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  SyncAll();
  if (GetBlockIdx() != 2) SyncAll();
}

// The others wait in SyncAll for the core that fails.
FAULT(a_core_fails_while_others_wait, 4, Always, "core 3: ASSERT_MSG: stop (GetBlockIdx() != 3, line *)") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  if (GetBlockIdx() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_MSG(GetBlockIdx() != 3, "stop");
  SyncAll();
}

FAULT(a_core_fails_while_others_run, 2, Always, "core 1: ASSERT_MSG: stop (GetBlockIdx() == 0, line *)") {
  ASSERT_MSG(GetBlockIdx() == 0, "stop");
  for (;;) GetBlockIdx();
}

FAULT(a_kernel_throws, 1, Always, "core 0: kernel: threw out of range") {
  throw std::out_of_range("out of range");
}

FAULT(a_kernel_throws_a_number, 1, Always, "core 0: kernel: threw what is no std::exception") { throw 7; }

FAULT(two_cores_write_one_place, 2, LazyOrCache,
      "core *: DataCopy UB to GM: buffer 'out' offset 1024: core * wrote it since the last SyncAll; a "
      "SyncAll is missing "
      "in between") {
  copy_part(bed.Input<std::uint8_t>(), 1, bed, 2);
}

FAULT(a_core_reads_what_another_writes, 2, LazyOrCache,
      "core *: DataCopy * to *: buffer 'out' offset *: core * since the last SyncAll; a SyncAll is missing "
      "in between") {
  if (GetBlockIdx() == 0)
    copy_part(bed.Input<std::uint8_t>(), 0, bed, 0);
  else
    copy_part(bed.Output<std::uint8_t>(), 0, bed, 1);
}

// A reader that is not the last one to have read is remembered too.
FAULT(a_core_writes_what_several_read, 3, LazyOrCache,
      "core *: DataCopy * to *: buffer 'out' offset *: *core* since the last SyncAll; a SyncAll is missing "
      "in between") {
  const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
  if (mine == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  copy_part(mine == 2 ? bed.Input<std::uint8_t>() : bed.Output<std::uint8_t>(), 0, bed,
            mine == 2 ? 0 : mine + 1);
}

LAUNCH(traffic_is_counted, "") {
  Bed bed;
  options.blocks = 2;
  const auto outcome = tidal_sim::Launch(options, bed.buffers(), [&] {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    TPipe pipe;
    TBuf<> room;
    pipe.InitBuffer(room, 96);
    const auto tensor = room.Get<std::uint8_t>();
    const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
    DataCopyPad(tensor, bed.Input<std::uint8_t>(), DataCopyExtParams(3, 7, 0, 0, 0), no_pad<std::uint8_t>());
    sync<HardEvent::MTE2_MTE3>();
    DataCopyPad(bed.Output<std::uint8_t>()[mine * 8], tensor, block(5));
    SyncAll();
    bed.Input<std::int32_t>().GetValue(1);
    bed.Output<std::int16_t>().SetValue(512 + mine * 32, 1);
    DataCacheCleanAndInvalid<std::int16_t, CacheLine::ENTIRE_DATA_CACHE>(bed.Output<std::int16_t>());
    SyncAll();
  });
  if (!outcome.error.empty()) return outcome.error;
  const auto& in = outcome.traffic.at(0);
  const auto& out = outcome.traffic.at(1);
  const bool right = in.dma_read == 42 && in.dma_written == 0 && in.scalar_read == 8 &&
                     in.scalar_written == 0 && out.dma_read == 0 && out.dma_written == 10 &&
                     out.scalar_read == 0 && out.scalar_written == 4 && outcome.sync_alls == 2;
  return right ? "" : "wrong counts";
}

LAUNCH(no_cores, "launch: blocks = 0, expected 1 to 64") {
  options.blocks = 0;
  return tidal_sim::Launch(options, {}, [] {}).error;
}

LAUNCH(a_buffer_without_memory, "launch: buffer 'rows' has 4 bytes but no address") {
  return tidal_sim::Launch(options, {{"rows", nullptr, 4, true}}, [] {}).error;
}

LAUNCH(buffers_overlap,
       "launch: buffers 'all' and 'part' overlap; give memory that is both input and output once, writable") {
  std::array<std::uint8_t, 8> memory{};
  return tidal_sim::Launch(options, {{"all", memory.data(), 8, true}, {"part", memory.data() + 7, 1, true}},
                           [] {})
      .error;
}

LAUNCH(empty_buffers_and_neighbours_do_not_overlap, "") {
  std::array<std::uint8_t, 8> memory{};
  return tidal_sim::Launch(options,
                           {{"first", memory.data(), 4, true},
                            {"second", memory.data() + 4, 4, true},
                            {"empty", memory.data() + 2, 0, false},
                            {"none", nullptr, 0, false}},
                           [&] {
                             GlobalTensor<std::uint8_t> tensor;
                             tensor.SetGlobalBuffer(memory.data() + 4);
                             tensor.GetValue(3);
                           })
      .error;
}

LAUNCH(an_api_outside_of_a_launch, "GetBlockIdx: called outside of a launch; use tidal_sim::Launch") {
  try {
    GetBlockIdx();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

LAUNCH(a_kernel_that_never_ends,
       "launch: the deadline of 0.3 s is over, and core * still runs; does a loop of the kernel end?") {
  options.blocks = 2;
  options.deadline_s = 0.3;
  return tidal_sim::Launch(options, {},
                           [] {
                             for (;;) GetBlockIdx();
                           })
      .error;
}

// A core that calls nothing cannot be stopped, but it keeps nobody waiting.
LAUNCH(a_kernel_that_calls_nothing,
       "launch: the deadline of 0.3 s is over, and core * still runs; does a loop of the kernel end?") {
  if (options.lazy_dma || options.scalar_cache ||
      options.seed != 0)  // a second of waiting, the same in every mode
    return "launch: the deadline of 0.3 s is over, and core * still runs; does a loop of the kernel end?";
  options.blocks = 2;
  options.deadline_s = 0.3;
  const auto held = std::make_shared<std::atomic<bool>>(true);
  const std::string error = tidal_sim::Launch(options, {}, [held] {
                              while (GetBlockIdx() == 1 && *held) {
                                while (*held) std::this_thread::yield();
                              }
                            }).error;
  *held = false;
  while (held.use_count() > 1) std::this_thread::yield();  // until the thread that was left behind is gone
  return error;
}

LAUNCH(launches_side_by_side, "") {
  std::array<std::string, 3> errors;
  std::array<std::thread, 3> threads;
  for (std::size_t i = 0; i < 3; ++i)
    threads[i] = std::thread([&error = errors[i], options]() mutable {
      Bed bed;
      options.blocks = 4;
      error = tidal_sim::Launch(options, bed.buffers(), [&] {
                KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
                const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
                copy_part(bed.Input<std::uint8_t>(), mine, bed, mine);
                SyncAll();
              }).error;
    });
  for (auto& thread : threads) thread.join();
  return errors[0] + errors[1] + errors[2];
}

}  // namespace sim_cases
