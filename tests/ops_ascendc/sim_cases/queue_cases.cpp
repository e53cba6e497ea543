// SPDX-License-Identifier: Apache-2.0
// UB: cutting it up, the rounds of queues, and tensors that are used at the wrong time.

#include "case.h"

namespace sim_cases {
namespace {

using Ring = TQueBind<TPosition::VECIN, TPosition::VECOUT, 1>;

struct Rig {
  TPipe pipe;
  Ring ring;
  TBuf<TPosition::VECCALC> room;
  explicit Rig(std::uint8_t buffers = 1) {
    pipe.InitBuffer(ring, buffers, 64);
    pipe.InitBuffer(room, 64);
  }
};

}  // namespace

RIGHT(queues_go_round, 1, [](const Bed& bed) { return same(bed); }) {
  TPipe pipe;
  Ring ring;
  pipe.InitBuffer(ring, 2, 128);
  const auto in = bed.Input<std::uint8_t>(), out = bed.Output<std::uint8_t>();
  for (std::uint32_t i = 0; i < Bed::kBytes; i += 128) {
    auto tensor = ring.AllocTensor<std::uint8_t>();
    DataCopy(tensor, in[i], 128);
    ring.EnQue(tensor);
    tensor = ring.DeQue<std::uint8_t>();
    DataCopy(out[i], tensor, 128);
    ring.FreeTensor(tensor);
  }
}

RIGHT(two_tensors_lie_in_a_queue_of_depth_two, 1, same) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> ring;
  pipe.InitBuffer(ring, 3, 1024);
  const auto in = bed.Input<half>(), out = bed.Output<half>();
  const auto fetch = [&](std::uint32_t i) {
    auto tensor = ring.AllocTensor<half>();
    DataCopy(tensor, in[i * 512], 512);
    ring.EnQue(tensor);
  };
  fetch(0);
  for (std::uint32_t i = 0; i < 4; ++i) {
    if (i + 1 < 4) fetch(i + 1);
    auto tensor = ring.DeQue<half>();
    DataCopy(out[i * 512], tensor, 512);
    ring.FreeTensor(tensor);
  }
}

RIGHT(queues_of_one_side, 1,
      [](const Bed& bed) { return bed.out[0] == bed.in[0] && bed.out[31] == bed.in[31]; }) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> arriving;
  TQue<TPosition::VECOUT, 1> leaving;
  pipe.InitBuffer(arriving, 1, 32);
  pipe.InitBuffer(leaving, 1, 32);
  auto from = arriving.AllocTensor<std::uint8_t>();
  DataCopy(from, bed.Input<std::uint8_t>(), 32);
  arriving.EnQue(from);
  from = arriving.DeQue<std::uint8_t>();
  sync<HardEvent::MTE2_S>();
  auto to = leaving.AllocTensor<std::uint8_t>();
  for (std::uint32_t i = 0; i < 32; ++i) to.SetValue(i, from.GetValue(i));
  arriving.FreeTensor(from);
  leaving.EnQue(to);
  to = leaving.DeQue<std::uint8_t>();
  sync<HardEvent::S_MTE3>();
  DataCopy(bed.Output<std::uint8_t>(), to, 32);
  leaving.FreeTensor(to);
}

RIGHT(ub_is_used_to_the_last_byte, 1, anything) {
  TPipe pipe;
  TBuf<> all;
  pipe.InitBuffer(all, 192 * 1024 - 256);
  ASSERT_MSG(all.Get<std::int32_t>().GetSize() == 49088, "%u", all.Get<std::int32_t>().GetSize());
  ASSERT_MSG(all.Get<std::uint8_t>().GetPhyAddr() == all.Get<half>(3).GetPhyAddr(), "Get moved");
}

FAULT(ub_is_exhausted, 1, Always,
      "core 0: InitBuffer: TBuf 0 needs 196256 bytes at UB offset 128, but UB has 196352; make the buffers "
      "smaller") {
  TPipe pipe;
  Ring ring;
  TBuf<> room;
  pipe.InitBuffer(ring, 2, 33);
  pipe.InitBuffer(room, 196352 - 96);
}

FAULT(nine_buffers_at_one_position, 1, Always,
      "core 0: InitBuffer: queue 1 (VECIN): 9 buffers at its position, of which a device has 8") {
  TPipe pipe;
  Ring ring;
  TQue<TPosition::VECIN, 1> queue;
  pipe.InitBuffer(ring, 8, 32);
  pipe.InitBuffer(queue, 1, 32);
}

FAULT(buffers_twice, 1, Always, "core 0: InitBuffer: queue 1 (VECIN to VECOUT) has buffers already") {
  Rig rig;
  rig.pipe.InitBuffer(rig.ring, 1, 32);
}

FAULT(room_twice, 1, Always, "core 0: InitBuffer: TBuf 1 has memory already") {
  Rig rig;
  rig.pipe.InitBuffer(rig.room, 32);
}

FAULT(no_buffers, 1, Always, "core 0: InitBuffer: queue 0 (VECIN to VECOUT) needs at least 1 buffer") {
  TPipe pipe;
  Ring ring;
  pipe.InitBuffer(ring, 0, 32);
}

FAULT(no_bytes, 1, Always,
      "core 0: InitBuffer: queue 0 (VECIN to VECOUT) buffer 0 has no bytes; give a length of at least 1") {
  TPipe pipe;
  Ring ring;
  pipe.InitBuffer(ring, 1, 0);
}

FAULT(two_pipes, 1, Always, "core 0: TPipe: the kernel has a TPipe already") {
  TPipe first;
  TPipe second;
}

FAULT(no_pipe, 1, Always, "core 0: GetTPipePtr: the kernel has no TPipe") { GetTPipePtr(); }

FAULT(queue_without_buffers, 1, Always,
      "core 0: AllocTensor: this queue has no buffers; call TPipe::InitBuffer first") {
  Ring ring;
  ring.AllocTensor<half>();
}

FAULT(room_without_memory, 1, Always,
      "core 0: TBuf::Get: this TBuf has no memory; call TPipe::InitBuffer first") {
  TBuf<> room;
  room.Get<half>();
}

FAULT(more_of_a_room_than_there_is, 1, Always,
      "core 0: TBuf::Get: UB buffer 'TBuf 0' offset 0: 68 bytes asked, but it has 64") {
  Rig rig;
  rig.room.Get<std::int32_t>(17);
}

FAULT(alloc_with_none_idle, 1, Always,
      "core 0: AllocTensor: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0 is allocated and no "
      "other of its "
      "queue is idle; a FreeTensor must come first") {
  Rig rig(2);
  rig.ring.AllocTensor<half>();
  rig.ring.AllocTensor<half>();
  rig.ring.AllocTensor<half>();
}

FAULT(enque_past_depth, 1, Always,
      "core 0: EnQue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 1' offset 0: the queue holds 1 tensors "
      "already, which "
      "is its depth; a DeQue must come first") {
  Rig rig(2);
  rig.ring.EnQue(rig.ring.AllocTensor<half>());
  rig.ring.EnQue(rig.ring.AllocTensor<half>());
}

FAULT(enque_twice, 1, Always,
      "core 0: EnQue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0 is queued, not allocated") {
  Rig rig;
  const auto tensor = rig.ring.AllocTensor<half>();
  rig.ring.EnQue(tensor);
  rig.ring.EnQue(tensor);
}

FAULT(deque_of_an_empty_queue, 1, Always,
      "core 0: DeQue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0: nothing lies in its queue; an "
      "EnQue is "
      "missing") {
  Rig rig;
  rig.ring.DeQue<half>();
}

FAULT(free_twice, 1, Always,
      "core 0: FreeTensor: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0: the tensor was given to "
      "FreeTensor "
      "before") {
  Rig rig;
  auto tensor = rig.ring.AllocTensor<half>();
  rig.ring.FreeTensor(tensor);
  rig.ring.FreeTensor(tensor);
}

FAULT(free_while_queued, 1, Always,
      "core 0: FreeTensor: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0 still lies in its queue; "
      "a DeQue "
      "must come first") {
  Rig rig;
  auto tensor = rig.ring.AllocTensor<half>();
  rig.ring.EnQue(tensor);
  rig.ring.FreeTensor(tensor);
}

FAULT(free_of_a_stranger, 1, Always,
      "core 0: FreeTensor: UB buffer 'TBuf 0' offset 0: the tensor is not of this queue, that of 'queue 0 "
      "(VECIN to "
      "VECOUT) buffer 0'") {
  Rig rig;
  auto tensor = rig.room.Get<half>();
  rig.ring.FreeTensor(tensor);
}

FAULT(tensor_never_freed, 1, Always,
      "core 0: end of the kernel: UB buffer 'queue 0 (VECIN to VECOUT) buffer 1' at UB offset 64 is still "
      "dequeued; a "
      "FreeTensor is missing") {
  Rig rig(2);
  auto tensor = rig.ring.AllocTensor<half>();
  rig.ring.FreeTensor(tensor);
  rig.ring.EnQue(rig.ring.AllocTensor<half>());
  rig.ring.DeQue<half>();
}

FAULT(used_after_free, 1, Always,
      "core 0: LocalTensor::SetValue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 6: the tensor "
      "was given to "
      "FreeTensor") {
  Rig rig;
  const auto old = rig.ring.AllocTensor<std::int16_t>();
  auto tensor = old;
  rig.ring.FreeTensor(tensor);
  rig.ring.AllocTensor<std::int16_t>();
  old.SetValue(3, 1);
}

FAULT(used_while_queued, 1, Always,
      "core 0: DataCopy GM to UB: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0: the tensor lies "
      "in its "
      "queue; take it out with DeQue first") {
  Rig rig;
  const auto tensor = rig.ring.AllocTensor<std::uint8_t>();
  rig.ring.EnQue(tensor);
  DataCopy(tensor, bed.Input<std::uint8_t>(), 64);
}

FAULT(tensor_of_nothing, 1, Always,
      "core 0: LocalTensor::GetValue: this LocalTensor has no memory; get it from a queue or a TBuf") {
  LocalTensor<half>().GetValue(0);
}

FAULT(local_get_past_end, 1, Always,
      "core 0: LocalTensor::GetValue: UB buffer 'TBuf 0' offset 12: 4 bytes leave the tensor, which ends at "
      "12") {
  Rig rig;
  rig.room.Get<std::int32_t>(3).GetValue(3);
}

FAULT(local_set_past_end, 1, Always,
      "core 0: LocalTensor::SetValue: UB buffer 'TBuf 0' offset 64: 8 bytes leave the tensor, which ends at "
      "64") {
  Rig rig;
  rig.room.Get<half>()[4].ReinterpretCast<std::int64_t>().SetValue(7, 1);
}

FAULT(local_part_past_end, 1, Always,
      "core 0: LocalTensor::operator[]: UB buffer 'TBuf 0' offset 66: behind the tensor, which ends at 64") {
  Rig rig;
  rig.room.Get<half>()[33];
}

FAULT(local_get_of_what_nobody_wrote, 1, Always,
      "core 0: LocalTensor::GetValue: UB buffer 'TBuf 0' offset 5: nobody has written this byte") {
  Rig rig;
  rig.room.Get<std::uint8_t>().SetValue(4, 1);
  rig.room.Get<std::int16_t>().GetValue(2);
}

FAULT(old_bytes_of_a_queue, 1, Always,
      "core 0: LocalTensor::GetValue: UB buffer 'queue 0 (VECIN to VECOUT) buffer 0' offset 0: nobody has "
      "written this "
      "byte") {
  Rig rig;
  auto tensor = rig.ring.AllocTensor<std::int32_t>();
  tensor.SetValue(0, 1);
  rig.ring.FreeTensor(tensor);
  rig.ring.AllocTensor<std::int32_t>().GetValue(0);
}

}  // namespace sim_cases
