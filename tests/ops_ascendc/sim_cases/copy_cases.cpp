// SPDX-License-Identifier: Apache-2.0
// DataCopy and DataCopyPad: what they move, and the limits of their parameters.

#include <algorithm>

#include "case.h"

namespace sim_cases {
namespace {

struct Rig {
  TPipe pipe;
  TBuf<TPosition::VECCALC> room;
  explicit Rig(std::uint32_t length = 1024) { pipe.InitBuffer(room, length); }
};

bool equal(const Bed& bed, std::size_t out, std::size_t in, std::size_t count) {
  return std::equal(bed.in.begin() + in, bed.in.begin() + in + count, bed.out.begin() + out);
}

bool untouched(const Bed& bed, std::size_t first, std::size_t last) {
  return std::all_of(bed.out.begin() + first, bed.out.begin() + last,
                     [](std::uint8_t byte) { return byte == 0; });
}

}  // namespace

RIGHT(copy_rounds_down, 1, [](const Bed& bed) { return equal(bed, 0, 0, 64) && untouched(bed, 64, 4096); }) {
  Rig rig;
  const auto tensor = rig.room.Get<std::uint8_t>();
  DataCopy(tensor, bed.Input<std::uint8_t>(), 128);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(bed.Output<std::uint8_t>(), tensor, 95);
}

RIGHT(copy_of_less_than_a_block_is_nothing, 1, [](const Bed& bed) { return untouched(bed, 0, 4096); }) {
  Rig rig;
  DataCopy(bed.Output<half>(), rig.room.Get<half>(), 15);
}

RIGHT(copy_of_blocks_with_gaps, 1, [](const Bed& bed) {
  return equal(bed, 0, 64, 32) && untouched(bed, 32, 96) && equal(bed, 96, 192, 32) &&
         untouched(bed, 128, 4096);
}) {
  Rig rig;
  const auto tensor = rig.room.Get<half>();
  DataCopy(tensor, bed.Input<half>()[32], DataCopyParams(2, 1, 3, 4));
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(bed.Output<half>(), tensor, DataCopyParams(2, 1, 4, 2));
}

RIGHT(pad_of_blocks_with_gaps, 1, [](const Bed& bed) {
  return equal(bed, 0, 3, 10) && untouched(bed, 10, 15) && equal(bed, 15, 20, 10) && untouched(bed, 25, 4096);
}) {
  Rig rig;
  const auto tensor = rig.room.Get<std::int8_t>();
  DataCopyPad(tensor, bed.Input<std::int8_t>()[3], DataCopyExtParams(2, 10, 7, 1, 0), no_pad<std::int8_t>());
  sync<HardEvent::MTE2_MTE3>();
  DataCopyPad(bed.Output<std::int8_t>(), tensor, DataCopyExtParams(2, 10, 1, 5, 0));
}

RIGHT(pad_fills_what_it_is_told_to, 1, [](const Bed& bed) {
  const auto* out = reinterpret_cast<const std::int32_t*>(bed.out.data());
  return out[0] == -7 && out[1] == -7 && equal(bed, 8, 0, 12) && out[5] == -7 && untouched(bed, 24, 4096);
}) {
  Rig rig;
  const auto tensor = rig.room.Get<std::int32_t>();
  DataCopyPad(tensor, bed.Input<std::int32_t>(), block(12),
              DataCopyPadExtParams<std::int32_t>(true, 2, 1, -7));
  sync<HardEvent::MTE2_MTE3>();
  DataCopyPad(bed.Output<std::int32_t>(), tensor, block(24));
}

RIGHT(pad_of_nothing_is_nothing, 1, [](const Bed& bed) { return untouched(bed, 0, 4096); }) {
  Rig rig;
  const auto tensor = rig.room.Get<half>();
  DataCopyPad(tensor, bed.Input<half>(), DataCopyExtParams(0, 2, 0, 0, 0), no_pad<half>());
  DataCopyPad(bed.Output<half>(), tensor, DataCopyExtParams(1, 0, 0, 0, 0));
}

RIGHT(pad_takes_16_bit_numbers, 1, [](const Bed& bed) { return equal(bed, 0, 2, 2); }) {
  Rig rig;
  const auto tensor = rig.room.Get<bfloat16_t>();
  DataCopyPad(tensor, bed.Input<bfloat16_t>()[1], block(2), no_pad<bfloat16_t>());
  sync<HardEvent::MTE2_S>();
  const bfloat16_t value = tensor.GetValue(0);
  tensor.SetValue(1, value);
  sync<HardEvent::S_MTE3>();
  DataCopyPad(bed.Output<bfloat16_t>(), tensor[0], block(4));
}

RIGHT(a_dma_uses_the_last_block_of_a_tensor_whole, 1, [](const Bed& bed) { return equal(bed, 0, 0, 36); }) {
  Rig rig(36);
  const auto tensor = rig.room.Get<std::uint8_t>(36);
  DataCopyPad(tensor, bed.Input<std::uint8_t>(), block(36), no_pad<std::uint8_t>());
  sync<HardEvent::MTE2_MTE3>();
  DataCopyPad(bed.Output<std::uint8_t>(), tensor, block(36));
}

FAULT(copy_in_past_the_end_of_global, 1, Always,
      "core 0: DataCopy GM to UB: buffer 'in' offset 4064: 64 bytes leave the buffer, which has 4096 bytes") {
  Rig rig;
  DataCopy(rig.room.Get<half>(), bed.Input<half>()[2032], 32);
}

FAULT(
    second_block_past_the_end_of_global, 1, Always,
    "core 0: DataCopyPad GM to UB: buffer 'in' offset 4095: 2 bytes leave the buffer, which has 4096 bytes") {
  Rig rig;
  DataCopyPad(rig.room.Get<std::uint8_t>(), bed.Input<std::uint8_t>(), DataCopyExtParams(2, 2, 4093, 0, 0),
              no_pad<std::uint8_t>());
}

FAULT(copy_out_past_the_end_of_global, 1, Always,
      "core 0: DataCopyPad UB to GM: buffer 'out' offset 4092: 6 bytes leave the buffer, which has 4096 "
      "bytes") {
  Rig rig;
  DataCopyPad(bed.Output<half>()[2046], rig.room.Get<half>(), block(6));
}

FAULT(copy_out_to_what_may_only_be_read, 1, Always,
      "core 0: DataCopy UB to GM: buffer 'in' offset 64: the buffer may only be read") {
  Rig rig;
  DataCopy(bed.Input<half>()[32], rig.room.Get<half>(), 16);
}

FAULT(copy_of_a_page_below_zero, 1, Always,
      "core 0: DataCopy GM to UB: buffer 'in' offset -1: 32 bytes leave the buffer, which has 4096 bytes") {
  Rig rig;
  const std::int32_t page = -1;
  DataCopy(rig.room.Get<half>(), bed.Input<half>()[static_cast<std::uint64_t>(page) * 64], 16);
}

FAULT(
    copy_in_past_the_end_of_a_tensor, 1, Always,
    "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 32: 64 bytes leave the tensor, which ends at 64") {
  Rig rig;
  DataCopy(rig.room.Get<std::uint8_t>(64)[32], bed.Input<std::uint8_t>(), 64);
}

FAULT(copy_out_past_the_end_of_a_tensor, 1, Always,
      "core 0: DataCopy UB to GM: UB buffer 'TBuf 0' offset 0: 96 bytes leave the tensor, which ends at 64") {
  Rig rig;
  DataCopy(bed.Output<std::uint8_t>(), rig.room.Get<std::uint8_t>(64), 96);
}

FAULT(padding_past_the_end_of_a_tensor, 1, Always,
      "core 0: DataCopyPad GM to UB: UB buffer 'TBuf 0' offset 992: 64 bytes leave the tensor, which ends at "
      "1024") {
  Rig rig;
  DataCopyPad(rig.room.Get<std::uint8_t>()[992], bed.Input<std::uint8_t>(), block(32),
              DataCopyPadExtParams<std::uint8_t>(true, 0, 1, 0));
}

FAULT(copy_in_to_the_middle_of_a_block, 1, Always,
      "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 16: a DMA needs a multiple of 32 bytes here") {
  Rig rig;
  DataCopy(rig.room.Get<half>()[8], bed.Input<half>(), 16);
}

FAULT(copy_out_of_the_middle_of_a_block, 1, Always,
      "core 0: DataCopyPad UB to GM: UB buffer 'TBuf 0' offset 2: a DMA needs a multiple of 32 bytes here") {
  Rig rig;
  DataCopyPad(bed.Output<half>(), rig.room.Get<half>()[1], block(2));
}

FAULT(copy_out_of_padding, 1, Always,
      "core 0: DataCopyPad UB to GM: UB buffer 'TBuf 0' offset 10: nobody has written this byte") {
  Rig rig;
  const auto tensor = rig.room.Get<std::uint8_t>();
  DataCopyPad(tensor, bed.Input<std::uint8_t>(), block(10), no_pad<std::uint8_t>());
  sync<HardEvent::MTE2_MTE3>();
  DataCopyPad(bed.Output<std::uint8_t>(), tensor, block(11));
}

FAULT(more_blocks_than_a_copy_takes, 1, Always,
      "core 0: DataCopy GM to UB: blockCount 4096 is more than 4095") {
  Rig rig;
  DataCopy(rig.room.Get<half>(), bed.Input<half>(), DataCopyParams(4096, 1, 0, 0));
}

FAULT(more_blocks_than_a_pad_takes, 1, Always,
      "core 0: DataCopyPad UB to GM: blockCount 5000 is more than 4095") {
  Rig rig;
  DataCopyPad(bed.Output<half>(), rig.room.Get<half>(), DataCopyExtParams(5000, 2, 0, 0, 0));
}

FAULT(longer_block_than_a_pad_takes, 1, Always,
      "core 0: DataCopyPad GM to UB: blockLen 2097152 is more than 2097151 bytes") {
  Rig rig;
  DataCopyPad(rig.room.Get<half>(), bed.Input<half>(), block(2097152), no_pad<half>());
}

FAULT(block_of_half_an_element, 1, Always,
      "core 0: DataCopyPad GM to UB: blockLen 6 is no multiple of the element's 4 bytes") {
  Rig rig;
  DataCopyPad(rig.room.Get<std::int32_t>(), bed.Input<std::int32_t>(), block(6), no_pad<std::int32_t>());
}

FAULT(too_much_padding, 1, Always,
      "core 0: DataCopyPad GM to UB: padding of 36 and 0 bytes; each may have 32") {
  Rig rig;
  DataCopyPad(rig.room.Get<std::int32_t>(), bed.Input<std::int32_t>(), block(4),
              DataCopyPadExtParams<std::int32_t>(true, 9, 0, 0));
}

FAULT(padding_that_is_not_switched_on, 1, Always,
      "core 0: DataCopyPad GM to UB: padding of 0 and 4 bytes is undefined without isPad; set it, or pad "
      "nothing") {
  Rig rig;
  DataCopyPad(rig.room.Get<std::int32_t>(), bed.Input<std::int32_t>(), block(4),
              DataCopyPadExtParams<std::int32_t>(false, 0, 1, 0));
}

}  // namespace sim_cases
