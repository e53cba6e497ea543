// SPDX-License-Identifier: Apache-2.0
// Flags and their ids: pairs, ranges, who has reserved what.

#include "case.h"

namespace sim_cases {

RIGHT(flags_in_pairs, 1, anything) {
  TPipe pipe;
  SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
  SetFlag<HardEvent::MTE2_S>(EVENT_ID5);
  SetFlag<HardEvent::S_MTE2>(EVENT_ID0);
  WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
  WaitFlag<HardEvent::MTE2_S>(EVENT_ID5);
  WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
}

RIGHT(ids_are_reserved_until_released, 1, anything) {
  TPipe pipe;
  const TEventID first = pipe.AllocEventID<HardEvent::V_S>();
  ASSERT_MSG(GetTPipePtr()->AllocEventID<HardEvent::V_S>() == 1 && first == 0, "first %d", first);
  ASSERT_MSG(pipe.FetchEventID(HardEvent::V_S) == 2 && pipe.FetchEventID<HardEvent::V_S>() == 2,
             "fetched twice");
  ASSERT_MSG(pipe.FetchEventID(HardEvent::S_V) == 0, "ids of another event");
  pipe.ReleaseEventID<HardEvent::V_S>(first);
  ASSERT_MSG(pipe.FetchEventID(HardEvent::V_S) == 0, "released");
}

FAULT(flag_set_twice, 1, Always,
      "core 0: SetFlag: flag 3 of HardEvent::MTE3_S is set already, perhaps by a queue; its WaitFlag must "
      "come first, or "
      "take an id from AllocEventID") {
  SetFlag<HardEvent::MTE3_S>(3);
  SetFlag<HardEvent::MTE3_S>(3);
}

FAULT(flag_of_a_queue, 1, Always,
      "core 0: EnQue: flag 0 of HardEvent::MTE2_MTE3 is set already, perhaps by a queue; its WaitFlag must "
      "come first, "
      "or take an id from AllocEventID") {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> ring;
  pipe.InitBuffer(ring, 1, 32);
  SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  ring.EnQue(ring.AllocTensor<half>());
}

FAULT(
    flag_never_set, 1, Always,
    "core 0: WaitFlag: flag 0 of HardEvent::MTE2_S was never set, so a device waits for ever; set it first") {
  WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
}

FAULT(flag_never_waited_for, 1, Always,
      "core 0: end of the kernel: flag 2 of HardEvent::S_MTE3 is still set; a WaitFlag is missing") {
  SetFlag<HardEvent::S_MTE3>(2);
}

FAULT(flag_with_a_reserved_id, 1, Always,
      "core 0: SetFlag: event id 6 of HardEvent::MTE2_S is reserved; take 0 to 5") {
  SetFlag<HardEvent::MTE2_S>(EVENT_ID6);
}

FAULT(flag_with_no_id, 1, Always,
      "core 0: SetFlag: event id -1 of HardEvent::MTE2_S does not exist; take 0 to 5") {
  SetFlag<HardEvent::MTE2_S>(-1);
}

FAULT(wait_with_no_id, 1, Always,
      "core 0: WaitFlag: event id 8 of HardEvent::MTE2_S does not exist; take 0 to 5") {
  WaitFlag<HardEvent::MTE2_S>(8);
}

FAULT(ids_run_out, 1, Always,
      "core 0: AllocEventID: no event id of HardEvent::V_MTE2 is free below 6; release some, or use fewer "
      "buffers") {
  TPipe pipe;
  for (int i = 0; i < 7; ++i) pipe.AllocEventID<HardEvent::V_MTE2>();
}

FAULT(release_of_what_was_not_reserved, 1, Always,
      "core 0: ReleaseEventID: event id 1 of HardEvent::S_V is not reserved") {
  TPipe pipe;
  pipe.ReleaseEventID<HardEvent::S_V>(1);
}

FAULT(release_of_what_is_set, 1, Always,
      "core 0: ReleaseEventID: flag 0 of HardEvent::S_V is still set; wait for it first") {
  TPipe pipe;
  const TEventID id = pipe.AllocEventID<HardEvent::S_V>();
  SetFlag<HardEvent::S_V>(id);
  pipe.ReleaseEventID<HardEvent::S_V>(id);
}

}  // namespace sim_cases
