// SPDX-License-Identifier: Apache-2.0
// What lazy_dma sees: accesses of two pipes, or of two DMA of one pipe, that nothing orders. Without it they
// pass.

#include <algorithm>

#include "case.h"

namespace sim_cases {
namespace {

struct Rig {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> ring;
  TBuf<TPosition::VECCALC> room;
  LocalTensor<std::int32_t> tensor;
  GlobalTensor<std::int32_t> in, out;
  explicit Rig(Bed& bed) {
    pipe.InitBuffer(ring, 2, 64);
    pipe.InitBuffer(room, 64);
    tensor = room.Get<std::int32_t>();
    in = bed.Input<std::int32_t>();
    out = bed.Output<std::int32_t>();
  }
};

bool copied(const Bed& bed) { return std::equal(bed.in.begin(), bed.in.begin() + 32, bed.out.begin()); }

}  // namespace

RIGHT(every_pair_of_pipes_in_order, 1, copied) {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_S>();
  const std::int32_t kept = rig.tensor.GetValue(0);
  rig.tensor.SetValue(0, kept);
  sync<HardEvent::S_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  sync<HardEvent::MTE3_S>();
  rig.tensor.SetValue(0, 0);
  sync<HardEvent::S_MTE2>();
  DataCopy(rig.tensor, rig.in[8], 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out[8], rig.tensor, 8);
  sync<HardEvent::MTE3_MTE2>();
  DataCopy(rig.tensor, rig.in, 8);
}

RIGHT(a_barrier_of_all_pipes_orders_everything, 1, copied) {
  Rig rig(bed);
  rig.tensor.SetValue(0, 1);
  PipeBarrier<PIPE_ALL>();
  DataCopy(rig.tensor, rig.in, 8);
  PipeBarrier<PIPE_ALL>();
  rig.tensor.GetValue(0);
  DataCopy(rig.out, rig.tensor, 8);
  PipeBarrier<PIPE_ALL>();
  DataCopy(rig.tensor, rig.in[8], 8);
}

RIGHT(knowledge_passes_from_pipe_to_pipe, 1, copied) {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(rig.out, rig.tensor, 8);
}

RIGHT(a_barrier_of_one_pipe_orders_its_copies, 1, copied) {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in[8], 8);
  PipeBarrier<PIPE_MTE2>();
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  PipeBarrier<PIPE_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
}

RIGHT(reads_need_no_order, 1, copied) {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  DataCopy(rig.tensor[8], rig.in, 8);
  SetFlag<HardEvent::MTE2_S>(0);
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_S>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  DataCopy(rig.out, rig.tensor, 8);
  rig.tensor.GetValue(1);
}

FAULT(scalar_read_of_what_may_not_have_arrived, 1, Lazy,
      "core 0: LocalTensor::GetValue: UB buffer 'TBuf 0' offset 4: pipe MTE2 wrote it before and may not "
      "have ended; "
      "SetFlag and WaitFlag of HardEvent::MTE2_S are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  rig.tensor.GetValue(1);
}

FAULT(scalar_read_behind_a_queue, 1, Lazy,
      "core 0: LocalTensor::GetValue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0: pipe MTE2 "
      "wrote it before "
      "and may not have ended; SetFlag and WaitFlag of HardEvent::MTE2_S are missing in between") {
  Rig rig(bed);
  auto tensor = rig.ring.AllocTensor<std::int32_t>();
  DataCopy(tensor, rig.in, 8);
  rig.ring.EnQue(tensor);
  tensor = rig.ring.DeQue<std::int32_t>();
  tensor.GetValue(0);
  rig.ring.FreeTensor(tensor);
}

FAULT(flag_set_too_early, 1, Lazy,
      "core 0: LocalTensor::GetValue: UB buffer 'TBuf 0' offset 0: pipe MTE2 wrote it before and may not "
      "have ended; "
      "SetFlag and WaitFlag of HardEvent::MTE2_S are missing in between") {
  Rig rig(bed);
  SetFlag<HardEvent::MTE2_S>(0);
  DataCopy(rig.tensor, rig.in, 8);
  WaitFlag<HardEvent::MTE2_S>(0);
  rig.tensor.GetValue(0);
}

FAULT(barrier_of_one_pipe_before_a_scalar_read, 1, Lazy,
      "core 0: LocalTensor::GetValue: UB buffer 'TBuf 0' offset 0: pipe MTE2 wrote it before and may not "
      "have ended; "
      "SetFlag and WaitFlag of HardEvent::MTE2_S are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  PipeBarrier<PIPE_MTE2>();
  rig.tensor.GetValue(0);
}

FAULT(copy_out_of_what_the_scalar_unit_wrote, 1, Lazy,
      "core 0: DataCopy UB to GM: UB buffer 'TBuf 0' offset 0: pipe S wrote it before and may not have "
      "ended; SetFlag and "
      "WaitFlag of HardEvent::S_MTE3 are missing in between") {
  Rig rig(bed);
  for (std::uint32_t i = 0; i < 8; ++i) rig.tensor.SetValue(i, 1);
  DataCopy(rig.out, rig.tensor, 8);
}

FAULT(scalar_write_behind_the_flag, 1, Lazy,
      "core 0: DataCopy UB to GM: UB buffer 'TBuf 0' offset 28: pipe S wrote it before and may not have "
      "ended; SetFlag "
      "and WaitFlag of HardEvent::S_MTE3 are missing in between") {
  Rig rig(bed);
  for (std::uint32_t i = 0; i < 7; ++i) rig.tensor.SetValue(i, 1);
  sync<HardEvent::S_MTE3>();
  rig.tensor.SetValue(7, 1);
  DataCopy(rig.out, rig.tensor, 8);
}

FAULT(copy_out_of_what_may_not_have_arrived, 1, Lazy,
      "core 0: DataCopy UB to GM: UB buffer 'TBuf 0' offset 0: pipe MTE2 wrote it before and may not have "
      "ended; SetFlag "
      "and WaitFlag of HardEvent::MTE2_MTE3 are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  DataCopy(rig.out, rig.tensor, 8);
}

FAULT(flag_for_another_pipe, 1, Lazy,
      "core 0: DataCopy UB to GM: UB buffer 'TBuf 0' offset 0: pipe MTE2 wrote it before and may not have "
      "ended; SetFlag "
      "and WaitFlag of HardEvent::MTE2_MTE3 are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_V>();
  DataCopy(rig.out, rig.tensor, 8);
}

FAULT(copy_in_over_what_is_leaving, 1, Lazy,
      "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 0: pipe MTE3 read it before and may not have "
      "ended; SetFlag "
      "and WaitFlag of HardEvent::MTE3_MTE2 are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  DataCopy(rig.tensor, rig.in, 8);
}

FAULT(scalar_write_over_what_is_leaving, 1, Lazy,
      "core 0: LocalTensor::SetValue: UB buffer 'TBuf 0' offset 8: pipe MTE3 read it before and may not have "
      "ended; "
      "SetFlag and WaitFlag of HardEvent::MTE3_S are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  rig.tensor.SetValue(2, 1);
}

FAULT(copy_in_over_what_the_scalar_unit_reads, 1, Lazy,
      "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 0: pipe S read it before and may not have ended; "
      "SetFlag and "
      "WaitFlag of HardEvent::S_MTE2 are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_S>();
  rig.tensor.GetValue(0);
  DataCopy(rig.tensor, rig.in, 8);
}

FAULT(copy_in_over_what_the_scalar_unit_wrote, 1, Lazy,
      "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 12: pipe S wrote it before and may not have "
      "ended; SetFlag and "
      "WaitFlag of HardEvent::S_MTE2 are missing in between") {
  Rig rig(bed);
  rig.tensor.SetValue(3, 1);
  DataCopy(rig.tensor, rig.in, 8);
}

FAULT(two_copies_in_to_one_place, 1, Lazy,
      "core 0: DataCopy GM to UB: UB buffer 'TBuf 0' offset 32: pipe MTE2 wrote it before and may not have "
      "ended; "
      "PipeBarrier<PIPE_MTE2> is missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 16);
  DataCopy(rig.tensor[8], rig.in, 8);
}

FAULT(two_copies_out_to_one_place, 1, Lazy,
      "core 0: DataCopy UB to GM: buffer 'out' offset 16: pipe MTE3 wrote it before and may not have ended; "
      "PipeBarrier<PIPE_MTE3> is missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  DataCopy(rig.out[4], rig.tensor, 8);
}

FAULT(copy_in_of_what_is_on_its_way_to_global, 1, Lazy,
      "core 0: DataCopy GM to UB: buffer 'out' offset 0: pipe MTE3 wrote it before and may not have ended; "
      "SetFlag and "
      "WaitFlag of HardEvent::MTE3_MTE2 are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  DataCopy(rig.tensor[8], rig.out, 8);
}

FAULT(scalar_read_of_what_is_on_its_way_to_global, 1, Lazy,
      "core 0: GlobalTensor::GetValue: buffer 'out' offset 4: pipe MTE3 wrote it before and may not have "
      "ended; SetFlag "
      "and WaitFlag of HardEvent::MTE3_S are missing in between") {
  Rig rig(bed);
  DataCopy(rig.tensor, rig.in, 8);
  sync<HardEvent::MTE2_MTE3>();
  DataCopy(rig.out, rig.tensor, 8);
  rig.out.GetValue(1);
}

// What a raw address sees: nothing checks it, but in lazy mode the bytes have really not arrived.
LAUNCH(copies_are_late_in_lazy_mode, "") {
  Bed bed;
  options.seed = 0;
  bool late = false;
  const auto outcome = tidal_sim::Launch(options, bed.buffers(), [&] {
    Rig rig(bed);
    const auto* raw = reinterpret_cast<const std::uint8_t*>(rig.tensor.GetPhyAddr());
    DataCopy(rig.tensor, rig.in, 8);
    late = !std::equal(raw, raw + 32, bed.in.begin());
    sync<HardEvent::MTE2_S>();
    ASSERT_MSG(std::equal(raw, raw + 32, bed.in.begin()), "nothing arrived at %p",
               static_cast<const void*>(raw));
  });
  if (!outcome.error.empty()) return outcome.error;
  return late == options.lazy_dma ? "" : "not as late as the mode says";
}

}  // namespace sim_cases
