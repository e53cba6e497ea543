// SPDX-License-Identifier: Apache-2.0
// Lists of entries to copy, one list for each row of a batch, and this core's share of all of them.
// The lists are in global memory: int32 arrays of sources and targets, `pitch` apart from row to row, and
// counts. All entries of all rows form one sequence, of which each core takes an equal part; so a single row
// keeps all busy.

#pragma once

#include "tidal_row_copier.h"

namespace tidal {

// kGiven: the lists were made elsewhere. Then a negative source or target means "nothing here", and numbers
// that are too large stop the kernel. Otherwise they come from a plan of this kernel: checked, and ~row names
// a selection row.
template <bool kGiven>
class RowLists {
 public:
  // tokens: of each entry, or null where an entry is one token. counts: one word each `count_pitch` bytes.
  __aicore__ inline void Init(AscendC::TPipe& pipe, const CopyTiling& tiling, GM_ADDR sources,
                              GM_ADDR targets, GM_ADDR tokens, GM_ADDR counts, int64_t count_pitch,
                              int64_t rows, int64_t pitch) {
    tiling_ = tiling;
    rows_ = rows;
    pitch_ = pitch;
    has_tokens_ = tokens != nullptr;
    sources_.SetGlobalBuffer((__gm__ int32_t*)sources);
    targets_.SetGlobalBuffer((__gm__ int32_t*)targets);
    tokens_.SetGlobalBuffer((__gm__ int32_t*)tokens);
    counts_.SetGlobalBuffer((__gm__ int32_t*)counts);
    count_words_ = count_pitch / static_cast<int64_t>(sizeof(int32_t));
    pipe.InitBuffer(count_buffer_, kCountTile * kUbBlock);
    pipe.InitBuffer(list_buffer_, 3 * kListTile * sizeof(int32_t));
    ub_counts_ = count_buffer_.Get<int32_t>();
    ub_sources_ = list_buffer_.Get<int32_t>();
    ub_targets_ = ub_sources_[kListTile];
    ub_tokens_ = ub_sources_[2 * kListTile];
  }

  __aicore__ inline void CopyShare(RowCopier& copier) {
    int64_t total = 0;
    for (int64_t row = 0; row < rows_; ++row) total += CountOf(row) * tiling_.pieces;
    const int64_t cores = AscendC::GetBlockNum();
    const int64_t core = AscendC::GetBlockIdx();
    const int64_t begin = total * core / cores;
    const int64_t end = total * (core + 1) / cores;
    int64_t at = 0;
    for (int64_t row = 0; row < rows_ && at < end; ++row) {
      const int64_t size = CountOf(row) * tiling_.pieces;
      const int64_t first = Larger(begin - at, 0);
      const int64_t last = Smaller(end - at, size);
      if (first < last) CopyRow(copier, row, first, last);
      at += size;
    }
  }

 private:
  // The pieces [first, last) of a row's list; whole tiles of entries, which begin and end with a part of one.
  __aicore__ inline void CopyRow(RowCopier& copier, int64_t row, int64_t first, int64_t last) {
    const int64_t pieces = tiling_.pieces;
    while (first < last) {
      const int64_t entry = first / pieces;
      const int64_t entries = Smaller((last + pieces - 1) / pieces - entry, kListTile);
      LoadLists(row * pitch_ + entry, entries);
      const int64_t end = Smaller(last, (entry + entries) * pieces);
      for (int64_t at = first; at < end; at += tiling_.places) {
        CopyPieces(copier, at - entry * pieces, Smaller(at + tiling_.places, end) - entry * pieces);
      }
      first = end;
      Handshake<AscendC::HardEvent::S_MTE2>();  // the next lists come where these were read
    }
  }

  __aicore__ inline void CopyPieces(RowCopier& copier, int64_t first, int64_t last) {
    Piece piece;
    copier.Begin();
    for (int64_t at = first; at < last; ++at) {
      if (PieceAt(copier, at, piece)) copier.Load(at - first, piece);
    }
    copier.Turn();
    for (int64_t at = first; at < last; ++at) {
      if (PieceAt(copier, at, piece)) copier.Store(at - first, piece);
    }
    copier.End();
  }

  __aicore__ inline bool PieceAt(const RowCopier& copier, int64_t at, Piece& piece) const {
    const int64_t entry = tiling_.pieces == 1 ? at : at / tiling_.pieces;
    const auto index = static_cast<uint32_t>(entry);
    const Piece whole{ub_sources_.GetValue(index), ub_targets_.GetValue(index),
                      has_tokens_ ? ub_tokens_.GetValue(index) : 1};
    if constexpr (kGiven) {
      if (whole.source < 0 || whole.target < 0) return false;
      ASSERT_MSG(whole.source < tiling_.full_rows, "miss_rows: row %ld: expected one below %ld\n",
                 whole.source, tiling_.full_rows);
      ASSERT_MSG(whole.target < tiling_.selection_rows, "miss_slots: row %ld: expected one below %ld\n",
                 whole.target, tiling_.selection_rows);
    }
    piece = copier.PartOf(whole, (at - entry * tiling_.pieces) * tiling_.piece_tokens);
    return piece.tokens > 0;
  }

  __aicore__ inline void LoadLists(int64_t at, int64_t entries) {
    ReadArray(ub_sources_, sources_[at], entries);
    ReadArray(ub_targets_, targets_[at], entries);
    if (has_tokens_) ReadArray(ub_tokens_, tokens_[at], entries);
    Handshake<AscendC::HardEvent::MTE2_S>();
  }

  // Counts come in tiles; each takes a block of UB, because a strided DMA pads each word to one.
  __aicore__ inline int64_t CountOf(int64_t row) {
    const int64_t tile = row / kCountTile * kCountTile;
    if (tile != count_tile_) {
      count_tile_ = tile;
      Handshake<AscendC::HardEvent::S_MTE2>();
      const AscendC::DataCopyExtParams shape{
          static_cast<uint16_t>(Smaller(rows_ - tile, kCountTile)), sizeof(int32_t),
          static_cast<uint32_t>((count_words_ - 1) * sizeof(int32_t)), 0, 0};
      AscendC::DataCopyPad(ub_counts_, counts_[tile * count_words_], shape,
                           AscendC::DataCopyPadExtParams<int32_t>{false, 0, 0, 0});
      Handshake<AscendC::HardEvent::MTE2_S>();
    }
    constexpr int64_t kStep = kUbBlock / static_cast<int64_t>(sizeof(int32_t));
    const int64_t count = ub_counts_.GetValue(static_cast<uint32_t>((row - tile) * kStep));
    if constexpr (kGiven) {
      ASSERT_MSG(count <= pitch_, "miss_count[%ld] = %ld: expected at most %ld\n", row, count, pitch_);
    }
    return Larger(count, 0);
  }

  CopyTiling tiling_;
  int64_t rows_ = 0;
  int64_t pitch_ = 0;
  int64_t count_words_ = 1;
  int64_t count_tile_ = -1;
  bool has_tokens_ = false;
  AscendC::GlobalTensor<int32_t> sources_;
  AscendC::GlobalTensor<int32_t> targets_;
  AscendC::GlobalTensor<int32_t> tokens_;
  AscendC::GlobalTensor<int32_t> counts_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> count_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> list_buffer_;
  AscendC::LocalTensor<int32_t> ub_counts_;
  AscendC::LocalTensor<int32_t> ub_sources_;
  AscendC::LocalTensor<int32_t> ub_targets_;
  AscendC::LocalTensor<int32_t> ub_tokens_;
};

}  // namespace tidal
