// SPDX-License-Identifier: Apache-2.0
// What a row's leader does once every row is planned: the exchange of two blocks, and writing down what the
// row holds. Nobody but the leader reads or writes its rows' status, so that it need not wait for the copies
// of others.

#pragma once

#include "tidal_row_copier.h"
#include "tidal_selection_tiling.h"
#include "tidal_sync.h"

namespace tidal {

class RowCommit {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, const SelectionTiling& tiling, GM_ADDR status,
                              GM_ADDR actual, GM_ADDR workspace) {
    tiling_ = tiling;
    status_.SetGlobalBuffer((__gm__ int32_t*)status);
    actual_.SetGlobalBuffer((__gm__ int32_t*)actual);
    heads_.SetGlobalBuffer((__gm__ int32_t*)(workspace + tiling_.store.heads));
    fresh_.SetGlobalBuffer((__gm__ int32_t*)(workspace + tiling_.store.status));
    pipe.InitBuffer(buffer_, static_cast<uint32_t>(tiling_.store.status_pitch * sizeof(int32_t) + kUbBlock));
    word_ = buffer_.Get<int32_t>();
    row_ = word_[kUbBlock / sizeof(int32_t)];
  }

  // The other cores copy what touches neither of the two slots.
  __aicore__ inline void Exchange(RowCopier& copier, int64_t row) {
    const int64_t head = row * kHeadWords;
    const int64_t to = heads_.GetValue(head + kHeadTo);
    if (to < 0) return;
    const int64_t from = heads_.GetValue(head + kHeadFrom);
    copier.Exchange({~from, to, tiling_.copy.block},
                    {heads_.GetValue(head + kHeadOther), from, heads_.GetValue(head + kHeadTokens)});
  }

  // Rows of the table past those of the batch hold nothing.
  __aicore__ inline void Commit(int64_t row) {
    int32_t held = 0;
    if (row < tiling_.rows && heads_.GetValue(row * kHeadWords + kHeadSeen) != 0) {
      held = heads_.GetValue(row * kHeadWords + kHeadHeld);
      ReadArray(row_, fresh_[row * tiling_.store.status_pitch], tiling_.topk + 1);
      Handshake<AscendC::HardEvent::MTE2_MTE3>();
      WriteArray(status_[row * (tiling_.topk + 1)], row_, tiling_.topk + 1);
    }
    word_.SetValue(0, held);
    Handshake<AscendC::HardEvent::S_MTE3>();
    WriteArray(actual_[row], word_, 1);
    Handshake<AscendC::HardEvent::MTE3_S>();  // the next row's come where these are read
  }

 private:
  SelectionTiling tiling_;
  AscendC::GlobalTensor<int32_t> status_;
  AscendC::GlobalTensor<int32_t> actual_;
  AscendC::GlobalTensor<int32_t> heads_;
  AscendC::GlobalTensor<int32_t> fresh_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<int32_t> word_;
  AscendC::LocalTensor<int32_t> row_;
};

}  // namespace tidal
