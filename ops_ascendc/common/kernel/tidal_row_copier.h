// SPDX-License-Identifier: Apache-2.0
// Carries pieces of rows from the full pool, or from another place of the selection cache, into the selection
// cache. One buffer of UB holds many pieces, and there are two: while the pieces of one are written, those of
// the other come. Elements are bytes here, because nothing looks into them; offsets in global memory have 64
// bits.

#pragma once

#include "tidal_copy_tiling.h"
#include "tidal_sync.h"

namespace tidal {

// `source` is a row of the pool, or ~row for a row of the selection cache.
struct Piece {
  int64_t source;
  int64_t target;
  int64_t tokens;
};

class RowCopier {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, const CopyTiling& tiling, GM_ADDR selection_rope,
                              GM_ADDR selection_kv, GM_ADDR full_rope, GM_ADDR full_kv) {
    tiling_ = tiling;
    selection_kv_.SetGlobalBuffer((__gm__ int8_t*)selection_kv);
    selection_rope_.SetGlobalBuffer((__gm__ int8_t*)selection_rope);
    full_kv_.SetGlobalBuffer((__gm__ int8_t*)full_kv);
    full_rope_.SetGlobalBuffer((__gm__ int8_t*)full_rope);
    pipe.InitBuffer(queue_, 2, static_cast<uint32_t>(tiling_.places * tiling_.piece_bytes));
  }

  // Load() and Store() of the same pieces at the same places stand on the two sides of Turn().
  __aicore__ inline void Begin() { buffer_ = queue_.AllocTensor<int8_t>(); }

  __aicore__ inline void Load(int64_t place, const Piece& piece) {
    const auto at = static_cast<uint32_t>(place * tiling_.piece_bytes);
    const bool moved = piece.source < 0;
    const int64_t row = moved ? ~piece.source : piece.source;
    ReadArray(buffer_[at], (moved ? selection_kv_ : full_kv_)[row * tiling_.kv_bytes],
              piece.tokens * tiling_.kv_bytes);
    if (tiling_.rope_bytes == 0) return;
    ReadArray(buffer_[at + static_cast<uint32_t>(tiling_.rope_at)],
              (moved ? selection_rope_ : full_rope_)[row * tiling_.rope_bytes],
              piece.tokens * tiling_.rope_bytes);
  }

  __aicore__ inline void Turn() {
    queue_.EnQue(buffer_);
    buffer_ = queue_.DeQue<int8_t>();
  }

  __aicore__ inline void Store(int64_t place, const Piece& piece) {
    const auto at = static_cast<uint32_t>(place * tiling_.piece_bytes);
    WriteArray(selection_kv_[piece.target * tiling_.kv_bytes], buffer_[at], piece.tokens * tiling_.kv_bytes);
    if (tiling_.rope_bytes == 0) return;
    WriteArray(selection_rope_[piece.target * tiling_.rope_bytes],
               buffer_[at + static_cast<uint32_t>(tiling_.rope_at)], piece.tokens * tiling_.rope_bytes);
  }

  __aicore__ inline void End() { queue_.FreeTensor(buffer_); }

  // Two entries at once, where the second overwrites what the first reads: both are read before either is
  // written.
  __aicore__ inline void Exchange(const Piece& one, const Piece& other) {
    for (int64_t first = 0; first < tiling_.block; first += tiling_.piece_tokens) {
      const Piece a = PartOf(one, first);
      const Piece b = PartOf(other, first);
      Begin();
      if (a.tokens > 0) Load(0, a);
      if (b.tokens > 0) Load(1, b);
      Turn();
      if (a.tokens > 0) Store(0, a);
      if (b.tokens > 0) Store(1, b);
      End();
    }
  }

  // The piece of an entry that begins at its token `first`; without tokens where the entry ends before.
  __aicore__ inline Piece PartOf(const Piece& entry, int64_t first) const {
    const int64_t source = entry.source < 0 ? entry.source - first : entry.source + first;  // ~(row + first)
    return {source, entry.target + first, Smaller(tiling_.piece_tokens, entry.tokens - first)};
  }

 private:
  CopyTiling tiling_;
  AscendC::GlobalTensor<int8_t> selection_kv_;
  AscendC::GlobalTensor<int8_t> selection_rope_;
  AscendC::GlobalTensor<int8_t> full_kv_;
  AscendC::GlobalTensor<int8_t> full_rope_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> queue_;
  AscendC::LocalTensor<int8_t> buffer_;
};

}  // namespace tidal
