// SPDX-License-Identifier: Apache-2.0
// What scalar_cache sees: old values, lost writes, and lines that were never cleaned.

#include "case.h"

namespace sim_cases {
namespace {

constexpr auto kLine = CacheLine::SINGLE_CACHE_LINE;
constexpr auto kOut = DcciDst::CACHELINE_OUT;

void clean(const GlobalTensor<std::int32_t>& tensor) {
  DataCacheCleanAndInvalid<std::int32_t, kLine, kOut>(tensor);
}

bool cores_wrote(const Bed& bed) {
  const auto* out = reinterpret_cast<const std::int32_t*>(bed.out.data());
  return out[0] == 10 && out[16] == 11 && out[32] == 12;
}

}  // namespace

RIGHT(each_core_writes_a_line_of_its_own, 3, cores_wrote) {
  auto out = bed.Output<std::int32_t>();
  const auto mine = static_cast<std::uint64_t>(GetBlockIdx()) * 16;
  out.SetValue(mine, static_cast<std::int32_t>(10 + GetBlockIdx()));
  ASSERT_MSG(out.GetValue(mine) == 10 + GetBlockIdx(), "own value");
  clean(out[mine]);
}

RIGHT(a_core_reads_what_another_wrote, 2, anything) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  auto out = bed.Output<std::int32_t>();
  for (std::int32_t round = 1; round < 5; ++round) {
    if (GetBlockIdx() == 0) {
      out.SetValue(3, round);
      clean(out);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
      clean(out);
      ASSERT_MSG(out.GetValue(3) == round, "%d in round %d", out.GetValue(3), round);
    }
    SyncAll();
  }
}

RIGHT(all_lines_are_cleaned_at_once, 1,
      [](const Bed& bed) { return bed.out[0] == 1 && bed.out[4092] == 2; }) {
  auto out = bed.Output<std::int32_t>();
  out.SetValue(0, 1);
  out.SetValue(1023, 2);
  DataCacheCleanAndInvalid<std::int32_t, CacheLine::ENTIRE_DATA_CACHE, kOut>(out);
}

FAULT(line_never_cleaned, 1, Cache,
      "core 0: end of the kernel: buffer 'out' offset 20: SetValue wrote it into the data cache only; "
      "DataCacheCleanAndInvalid is missing") {
  bed.Output<std::int32_t>().SetValue(5, 1);
}

FAULT(another_line_cleaned, 1, Cache,
      "core 0: end of the kernel: buffer 'out' offset 60: SetValue wrote it into the data cache only; "
      "DataCacheCleanAndInvalid is missing") {
  bed.Output<std::int32_t>().SetValue(15, 1);
  clean(bed.Output<std::int32_t>()[16]);
}

FAULT(part_of_a_line_cleaned, 1, Always,
      "core 0: DataCacheCleanAndInvalid: buffer 'out' offset 8: only the rest of the 64-byte line would be "
      "cleaned; begin at a multiple of 64") {
  auto out = bed.Output<std::int32_t>();
  out.SetValue(1, 1);
  clean(out[2]);
}

FAULT(old_value_of_another_core, 2, Cache,
      "core 1: GlobalTensor::GetValue: buffer 'out' offset 12: the data cache holds an older value; "
      "DataCacheCleanAndInvalid is missing before the read") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  auto out = bed.Output<std::int32_t>();
  if (GetBlockIdx() == 1) out.GetValue(0);  // brings in the line
  SyncAll();
  if (GetBlockIdx() == 0) {
    out.SetValue(3, 7);
    clean(out);
  }
  SyncAll();
  if (GetBlockIdx() == 1) out.GetValue(3);
}

FAULT(old_value_behind_an_own_copy, 1, Cache,
      "core 0: GlobalTensor::GetValue: buffer 'out' offset 4: the data cache holds an older value; "
      "DataCacheCleanAndInvalid is missing before the read") {
  TPipe pipe;
  TBuf<> room;
  pipe.InitBuffer(room, 32);
  auto out = bed.Output<std::int32_t>();
  out.GetValue(0);
  const auto tensor = room.Get<std::int32_t>();
  DataCopy(tensor, bed.Input<std::int32_t>(), 8);
  sync<HardEvent::MTE2_MTE3>();
  sync<HardEvent::S_MTE3>();
  DataCopy(out, tensor, 8);
  sync<HardEvent::MTE3_S>();
  out.GetValue(1);
}

FAULT(value_still_in_the_cache_of_another_core, 2, Cache,
      "core 1: GlobalTensor::GetValue: buffer 'out' offset 12: SetValue on core 0 wrote it into the data "
      "cache only; "
      "DataCacheCleanAndInvalid is missing there") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  auto out = bed.Output<std::int32_t>();
  if (GetBlockIdx() == 0) out.SetValue(3, 7);
  SyncAll();
  if (GetBlockIdx() == 1) out.GetValue(3);
  SyncAll();
  clean(out);
}

FAULT(
    copy_of_what_is_still_in_the_cache, 1, Cache,
    "core 0: DataCopy GM to UB: buffer 'out' offset 8: SetValue on core 0 wrote it into the data cache only; "
    "DataCacheCleanAndInvalid is missing there") {
  TPipe pipe;
  TBuf<> room;
  pipe.InitBuffer(room, 32);
  auto out = bed.Output<std::int32_t>();
  out.SetValue(2, 7);
  sync<HardEvent::S_MTE2>();
  DataCopy(room.Get<std::int32_t>(), out, 8);
  clean(out);
}

// Both cores write an element of their own, in one line: whoever cleans last undoes the other's.
FAULT(
    two_cores_write_one_line, 2, Cache,
    "core *: DataCacheCleanAndInvalid: buffer 'out' offset *: writing the 64-byte line back undoes what was "
    "written "
    "there since the line was loaded; let no two cores write to one line, and clean it before others write") {
  auto out = bed.Output<std::int32_t>();
  const auto mine = static_cast<std::uint64_t>(GetBlockIdx());
  out.SetValue(mine, 7);
  clean(out);
}

FAULT(
    line_written_back_too_late, 2, Cache,
    "core 0: DataCacheCleanAndInvalid: buffer 'out' offset 4: writing the 64-byte line back undoes what was "
    "written "
    "there since the line was loaded; let no two cores write to one line, and clean it before others write") {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  auto out = bed.Output<std::int32_t>();
  if (GetBlockIdx() == 0) out.SetValue(0, 1);
  SyncAll();
  if (GetBlockIdx() == 1) {
    out.SetValue(1, 2);
    clean(out);
  }
  SyncAll();
  if (GetBlockIdx() == 0) clean(out);
}

}  // namespace sim_cases
