// SPDX-License-Identifier: Apache-2.0
// Global memory: bounds, read-only tensors, declared sizes, alignment.

#include "case.h"

namespace sim_cases {

RIGHT(scalars_reach_the_last_element, 1, [](const Bed& bed) { return bed.out[4095] == bed.in[4095]; }) {
  bed.Output<std::uint8_t>().SetValue(4095, bed.Input<std::uint8_t>().GetValue(4095));
  DataCacheCleanAndInvalid<std::uint8_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(
      bed.Output<std::uint8_t>()[4032]);
}

FAULT(global_get_past_end, 1, Always,
      "core 0: GlobalTensor::GetValue: buffer 'in' offset 4096: 4 bytes leave the buffer, which has 4096 "
      "bytes") {
  bed.Input<std::int32_t>().GetValue(1024);
}

FAULT(
    global_get_before_start, 1, Always,
    "core 0: GlobalTensor::GetValue: buffer 'in' offset -1: 1 bytes leave the buffer, which has 4096 bytes") {
  bed.Input<std::uint8_t>().GetValue(static_cast<std::uint64_t>(-1));
}

// 2^62 * 4 bytes wrap to 0.
FAULT(
    global_get_at_an_index_that_wraps, 1, Always,
    "core 0: GlobalTensor::GetValue: buffer 'in' offset -1: 4 bytes leave the buffer, which has 4096 bytes") {
  bed.Input<std::int32_t>().GetValue(std::uint64_t{1} << 62);
}

FAULT(
    global_get_through_a_part_that_wraps, 1, Always,
    "core 0: GlobalTensor::GetValue: buffer 'in' offset -1: 4 bytes leave the buffer, which has 4096 bytes") {
  bed.Input<std::int32_t>()[std::uint64_t{1} << 62].GetValue(0);
}

FAULT(global_set_past_end, 1, Always,
      "core 0: GlobalTensor::SetValue: buffer 'out' offset 4098: 2 bytes leave the buffer, which has 4096 "
      "bytes") {
  bed.Output<std::int16_t>()[2000].SetValue(49, 1);
}

FAULT(global_set_of_what_may_only_be_read, 1, Always,
      "core 0: GlobalTensor::SetValue: buffer 'in' offset 8: the buffer may only be read") {
  bed.Input<std::int32_t>().SetValue(2, 1);
}

FAULT(global_get_past_the_declared_size, 1, Always,
      "core 0: GlobalTensor::GetValue: buffer 'in' offset 40: 4 bytes leave the GlobalTensor, which has 32 "
      "bytes from "
      "offset 8") {
  GlobalTensor<std::int32_t> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<std::int32_t*>(bed.In()), 10);
  tensor[2].GetValue(8);
}

FAULT(global_get_of_no_buffer, 1, Always,
      "core 0: GlobalTensor::GetValue: the address of this GlobalTensor lies in no buffer of the launch "
      "(offset 0); "
      "add the buffer to the launch or check SetGlobalBuffer") {
  std::int32_t mine = 1;
  GlobalTensor<std::int32_t> tensor;
  tensor.SetGlobalBuffer(&mine);
  tensor.GetValue(0);
}

FAULT(global_get_of_half_an_element, 1, Always,
      "core 0: GlobalTensor::GetValue: buffer 'in' offset 6: the offset is no multiple of the element's 4 "
      "bytes") {
  GlobalTensor<std::int32_t> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<std::int32_t*>(bed.In() + 2));
  tensor.GetValue(1);
}

FAULT(tiling_behind_the_end, 1, Always,
      "core 0: GET_TILING_DATA_WITH_STRUCT: buffer 'in' offset 4092: 8 bytes leave the buffer, which has "
      "4096 bytes") {
  struct Tiling {
    std::int64_t rows;
  };
  REGISTER_TILING_DEFAULT(Tiling);
  GET_TILING_DATA_WITH_STRUCT(Tiling, tiling, bed.In() + 4092);
  (void)tiling;
}

RIGHT(tiling_is_copied, 1, anything) {
  struct Tiling {
    std::uint8_t first, second;
  };
  GET_TILING_DATA_WITH_STRUCT(Tiling, tiling, bed.In());
  ASSERT_MSG(GetUserWorkspace(bed.Out()) == bed.Out(), "the workspace of a launch is the kernel's own");
  ASSERT_MSG(tiling.first == bed.in[0] && tiling.second == bed.in[1], "tiling %d", tiling.first);
}

}  // namespace sim_cases
