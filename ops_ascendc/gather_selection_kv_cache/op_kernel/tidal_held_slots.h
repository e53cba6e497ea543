// SPDX-License-Identifier: Apache-2.0
// Where each id of a row's old status is: a hash table in UB, chained through the slots themselves.
// It takes 2 bytes a bucket and 2 a slot (8 KB for 2,048 ids), because the ids stay in the status array. With
// at least as many buckets as slots a look-up visits between one and two slots, whatever the ids are; a
// vectorised compare of each id with all slots would visit 2,048. Counted, not measured: about 30 scalar
// instructions for an id.

#pragma once

#include "kernel_operator.h"

namespace tidal {

class HeldSlots {
 public:
  __aicore__ inline void Init(const AscendC::LocalTensor<int32_t>& status,
                              const AscendC::LocalTensor<int16_t>& heads,
                              const AscendC::LocalTensor<int16_t>& next, int64_t buckets, int64_t shift) {
    status_ = status;
    heads_ = heads;
    heads_wide_ = heads.ReinterpretCast<int64_t>();
    next_ = next;
    buckets_ = static_cast<uint32_t>(buckets);
    shift_ = static_cast<uint32_t>(shift);
  }

  // Takes in the first slot of each id in status[0, slots). What is below 0 is no id.
  __aicore__ inline void Fill(uint32_t slots) {
    for (uint32_t i = 0; i < buckets_ / 4; ++i) heads_wide_.SetValue(i, static_cast<int64_t>(-1));
    for (uint32_t slot = 0; slot < slots; ++slot) {
      const int32_t id = status_.GetValue(slot);
      if (id < 0) continue;
      const uint32_t bucket = BucketOf(id);
      const int16_t head = heads_.GetValue(bucket);
      if (Find(head, id) >= 0) continue;
      next_.SetValue(slot, head);
      heads_.SetValue(bucket, static_cast<int16_t>(slot));
    }
  }

  // The slot of an id, or -1. The second time there is none, so that an id given twice gets two slots.
  __aicore__ inline int32_t Take(int32_t id) {
    const int32_t slot = Find(heads_.GetValue(BucketOf(id)), id);
    if (slot >= 0) status_.SetValue(static_cast<uint32_t>(slot), static_cast<int32_t>(-1));
    return slot;
  }

 private:
  __aicore__ inline uint32_t BucketOf(int32_t id) const {
    return (static_cast<uint32_t>(id) * 2654435769u) >> shift_;  // 2^32 / golden ratio spreads neighbours
  }

  __aicore__ inline int32_t Find(int16_t slot, int32_t id) const {
    while (slot >= 0 && status_.GetValue(static_cast<uint32_t>(slot)) != id) {
      slot = next_.GetValue(static_cast<uint32_t>(slot));
    }
    return slot;
  }

  AscendC::LocalTensor<int32_t> status_;
  AscendC::LocalTensor<int16_t> heads_;
  AscendC::LocalTensor<int64_t> heads_wide_;
  AscendC::LocalTensor<int16_t> next_;
  uint32_t buckets_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace tidal
