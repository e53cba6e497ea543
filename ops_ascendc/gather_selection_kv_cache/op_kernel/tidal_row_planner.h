// SPDX-License-Identifier: Apache-2.0
// Plans one row: which slot each id gets, and what has to be copied for it. Writes the workspace and nothing
// else. A row is planned by one core, in four passes over at most 2,048 ids; the hash table makes each pass
// linear. Counted, not measured: some 100,000 scalar instructions for 2,048 ids.

#pragma once

#include "tidal_held_slots.h"
#include "tidal_selection_tiling.h"
#include "tidal_sync.h"

namespace tidal {

// The tensors that a plan is made of, and the workspace that takes it.
struct PlanMemory {
  GM_ADDR selection_table;
  GM_ADDR status;
  GM_ADDR ids;
  GM_ADDR full_table;
  GM_ADDR lengths;
  GM_ADDR workspace;
};

// kByBlocks: at most 32 ids, each a block of tokens of which the newest may be incomplete.
template <bool kByBlocks>
class RowPlanner {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, const SelectionTiling& tiling, const PlanMemory& memory) {
    tiling_ = tiling;
    gm_ids_.SetGlobalBuffer((__gm__ int32_t*)memory.ids);
    gm_status_.SetGlobalBuffer((__gm__ int32_t*)memory.status);
    gm_lengths_.SetGlobalBuffer((__gm__ int32_t*)memory.lengths);
    gm_selection_table_.SetGlobalBuffer((__gm__ int32_t*)memory.selection_table);
    gm_full_table_.SetGlobalBuffer((__gm__ int32_t*)memory.full_table);
    const PlanStore& store = tiling_.store;
    gm_heads_.SetGlobalBuffer((__gm__ int32_t*)(memory.workspace + store.heads));
    gm_fresh_.SetGlobalBuffer((__gm__ int32_t*)(memory.workspace + store.status));
    gm_sources_.SetGlobalBuffer((__gm__ int32_t*)(memory.workspace + store.sources));
    gm_targets_.SetGlobalBuffer((__gm__ int32_t*)(memory.workspace + store.targets));
    gm_tokens_.SetGlobalBuffer((__gm__ int32_t*)(memory.workspace + store.tokens));
    pipe.InitBuffer(buffer_, static_cast<uint32_t>(tiling_.areas.bytes));
    const AscendC::LocalTensor<int8_t> all = buffer_.Get<int8_t>();
    const PlanAreas& areas = tiling_.areas;
    ids_ = Area<int32_t>(all, areas.ids);
    status_ = Area<int32_t>(all, areas.status);
    fresh_ = Area<int32_t>(all, areas.fresh);
    sources_ = Area<int32_t>(all, areas.sources);
    targets_ = Area<int32_t>(all, areas.targets);
    tokens_ = Area<int32_t>(all, areas.tokens);
    found_ = Area<int16_t>(all, areas.found);
    origin_ = Area<int16_t>(all, areas.origin);
    selection_table_ = Area<int32_t>(all, areas.selection_table);
    full_table_ = Area<int32_t>(all, areas.full_table);
    word_ = Area<int32_t>(all, areas.word);
    held_.Init(status_, Area<int16_t>(all, areas.heads), Area<int16_t>(all, areas.next), tiling_.buckets,
               tiling_.bucket_shift);
  }

  __aicore__ inline void Plan(int64_t row) {
    Load(row);
    const int64_t request = row / tiling_.queries;
    const int64_t written = word_.GetValue(0);  // with the tokens of this step
    length_ = written - (tiling_.queries - 1 - row % tiling_.queries);
    stable_ = written - tiling_.queries;
    count_ = 0;
    target_of_exchange_ = -1;
    const bool seen = length_ > 0;
    int64_t held = 0;
    if (seen) {
      ASSERT_MSG(
          written <= tiling_.full_pages * tiling_.full_page_tokens,
          "full_kv_actual_seq[%ld] = %ld: expected at most %ld, the tokens in a row of full_kv_block_table\n",
          request, written, tiling_.full_pages * tiling_.full_page_tokens);
      row_ = row;
      request_ = request;
      const int32_t used = Choose();
      Assign(used);
      if constexpr (kByBlocks) ListBlocks(used);
      held = Held(used);
      fresh_.SetValue(static_cast<uint32_t>(tiling_.topk), static_cast<int32_t>(held));
      Store(row);
    }
    WriteHead(row, seen, held);
    Handshake<AscendC::HardEvent::S_MTE2>();  // the next row comes where this one was read
  }

 private:
  template <typename T>
  __aicore__ inline AscendC::LocalTensor<T> Area(const AscendC::LocalTensor<int8_t>& all, int64_t at) {
    return all[static_cast<uint32_t>(at)].template ReinterpretCast<T>();
  }

  __aicore__ inline void Load(int64_t row) {
    const int64_t request = row / tiling_.queries;
    ReadArray(word_, gm_lengths_[request], 1);
    ReadArray(ids_, gm_ids_[row * tiling_.topk], tiling_.topk);
    ReadArray(status_, gm_status_[row * (tiling_.topk + 1)], tiling_.topk + 1);
    ReadArray(selection_table_, gm_selection_table_[row * tiling_.selection_pages], tiling_.used_pages);
    ReadArray(full_table_, gm_full_table_[request * tiling_.full_pages], tiling_.cached_pages);
    Handshake<AscendC::HardEvent::MTE2_S>();
  }

  // Gathers the valid ids at the front of ids_, and beside each the slot where it was found and can be
  // trusted.
  __aicore__ inline int32_t Choose() {
    const auto topk = static_cast<uint32_t>(tiling_.topk);
    const int64_t last = (length_ - 1) / tiling_.copy.block;
    const int64_t whole =
        status_.GetValue(topk) / tiling_.copy.block;  // the partial block, if any, was the last
    held_.Fill(topk);
    for (uint32_t slot = 0; slot < topk; ++slot) fresh_.SetValue(slot, static_cast<int32_t>(-1));
    uint32_t used = 0;
    for (uint32_t i = 0; i < topk; ++i) {
      const int32_t id = ids_.GetValue(i);
      if (id < 0) {
        if constexpr (kByBlocks) break;
        continue;
      }
      if (id > last) continue;
      int32_t slot = held_.Take(id);
      // What this step wrote, rejected drafts of the last one among it, the copy does not have.
      if ((id + static_cast<int64_t>(1)) * tiling_.copy.block > stable_) slot = -1;
      if constexpr (kByBlocks) {
        if (slot >= whole) slot = -1;
      }
      ids_.SetValue(used, id);
      found_.SetValue(used, static_cast<int16_t>(slot));
      if (slot >= 0) fresh_.SetValue(static_cast<uint32_t>(slot), id);
      ++used;
    }
    return static_cast<int32_t>(used);
  }

  // Hits below `used` stay. The others take the free slots there in ascending order: sources of moves are at
  // or past `used` and targets below, so that no move overwrites what another reads, on whichever core.
  __aicore__ inline void Assign(int32_t used) {
    uint32_t free = 0;
    for (uint32_t i = 0; i < static_cast<uint32_t>(used); ++i) {
      const int32_t slot = found_.GetValue(i);
      if (slot >= 0 && slot < used) {
        if constexpr (kByBlocks) origin_.SetValue(static_cast<uint32_t>(slot), static_cast<int16_t>(slot));
        continue;
      }
      while (fresh_.GetValue(free) >= 0) ++free;
      fresh_.SetValue(free, ids_.GetValue(i));
      if (slot >= 0) fresh_.SetValue(static_cast<uint32_t>(slot), static_cast<int32_t>(-1));
      if constexpr (kByBlocks) {
        origin_.SetValue(free, static_cast<int16_t>(slot));
      } else {
        List(slot, ids_.GetValue(i), free);
      }
    }
  }

  // The largest id changes places with the last used slot, so that a partial block is the last of the row. If
  // one of the two stayed in its slot until then, its bytes have to leave before the other's arrive: that is
  // the exchange, which the row's leader does alone.
  __aicore__ inline void ListBlocks(int32_t used) {
    if (used == 0) return;
    const auto end = static_cast<uint32_t>(used - 1);
    uint32_t at = 0;
    for (uint32_t slot = 1; slot <= end; ++slot) {
      if (fresh_.GetValue(slot) > fresh_.GetValue(at)) at = slot;
    }
    Swap(at, end);
    uint32_t skipped_one = end + 1;
    if (at != end && (origin_.GetValue(at) == static_cast<int16_t>(end) ||
                      origin_.GetValue(end) == static_cast<int16_t>(at))) {
      skipped_one = at;
      const bool comes_from_end = origin_.GetValue(at) == static_cast<int16_t>(end);
      PlanExchange(comes_from_end ? end : at, comes_from_end ? at : end);
    }
    for (uint32_t slot = 0; slot <= end; ++slot) {
      const int16_t origin = origin_.GetValue(slot);
      if (origin == static_cast<int16_t>(slot)) continue;
      if (skipped_one <= end && (slot == skipped_one || slot == end)) continue;
      List(origin, fresh_.GetValue(slot), slot);
    }
  }

  __aicore__ inline void Swap(uint32_t one, uint32_t other) {
    const int32_t id = fresh_.GetValue(one);
    const int16_t origin = origin_.GetValue(one);
    fresh_.SetValue(one, fresh_.GetValue(other));
    origin_.SetValue(one, origin_.GetValue(other));
    fresh_.SetValue(other, id);
    origin_.SetValue(other, origin);
  }

  // The bytes in slot `from` go to slot `to`, and those of the id that now belongs to `from` take their
  // place.
  __aicore__ inline void PlanExchange(uint32_t from, uint32_t to) {
    const int32_t id = fresh_.GetValue(from);
    const int32_t origin = origin_.GetValue(from);
    from_of_exchange_ = SelectionRow(from);
    target_of_exchange_ = SelectionRow(to);
    other_of_exchange_ = SourceOf(origin, id);
    tokens_of_exchange_ = static_cast<int32_t>(TokensOf(id));
  }

  __aicore__ inline void List(int32_t origin, int32_t id, uint32_t slot) {
    sources_.SetValue(count_, SourceOf(origin, id));
    targets_.SetValue(count_, SelectionRow(slot));
    if constexpr (kByBlocks) tokens_.SetValue(count_, static_cast<int32_t>(TokensOf(id)));
    ++count_;
  }

  __aicore__ inline int32_t SourceOf(int32_t origin, int32_t id) const {
    return origin >= 0 ? ~SelectionRow(static_cast<uint32_t>(origin)) : PoolRow(id);
  }

  // 32-bit divisions: a slot's first token and an id's are below 2^31.
  __aicore__ inline int32_t SelectionRow(uint32_t slot) const {
    const auto start = slot * static_cast<uint32_t>(tiling_.copy.block);
    const auto size = static_cast<uint32_t>(tiling_.selection_page_tokens);
    const uint32_t column = start / size;
    const int64_t page = selection_table_.GetValue(column);
    ASSERT_MSG(page >= 0 && page < tiling_.selection_blocks,
               "selection_kv_block_table[%ld, %u] = %ld: expected a page in [0, %ld)\n", row_, column, page,
               tiling_.selection_blocks);
    return static_cast<int32_t>(page * size + (start - column * size));
  }

  __aicore__ inline int32_t PoolRow(int32_t id) const {
    const auto start = static_cast<uint32_t>(id) * static_cast<uint32_t>(tiling_.copy.block);
    const auto size = static_cast<uint32_t>(tiling_.full_page_tokens);
    const uint32_t column = start / size;
    // A table too long for UB is read word by word past its beginning; nobody writes it during the call.
    const int64_t page = column < tiling_.cached_pages
                             ? full_table_.GetValue(column)
                             : gm_full_table_.GetValue(request_ * tiling_.full_pages + column);
    ASSERT_MSG(page >= 0 && page < tiling_.full_blocks,
               "full_kv_block_table[%ld, %u] = %ld: expected a page in [0, %ld) for id %d of row %ld\n",
               request_, column, page, tiling_.full_blocks, id, row_);
    return static_cast<int32_t>(page * size + (start - column * size));
  }

  // A block, or what there is of the last one.
  __aicore__ inline int64_t TokensOf(int32_t id) const {
    return Smaller(tiling_.copy.block, length_ - id * tiling_.copy.block);
  }

  __aicore__ inline int64_t Held(int32_t used) const {
    if constexpr (!kByBlocks) return used;
    int64_t held = 0;
    for (uint32_t slot = 0; slot < static_cast<uint32_t>(used); ++slot)
      held += TokensOf(fresh_.GetValue(slot));
    return held;
  }

  __aicore__ inline void Store(int64_t row) {
    Handshake<AscendC::HardEvent::S_MTE3>();
    WriteArray(gm_fresh_[row * tiling_.store.status_pitch], fresh_, tiling_.topk + 1);
    if (count_ > 0) {
      WriteArray(gm_sources_[row * tiling_.store.pitch], sources_, count_);
      WriteArray(gm_targets_[row * tiling_.store.pitch], targets_, count_);
      if constexpr (kByBlocks) WriteArray(gm_tokens_[row * tiling_.store.pitch], tokens_, count_);
    }
    Handshake<AscendC::HardEvent::MTE3_S>();  // the next row is written where this one is read
  }

  // A few words and the cleaning of their line cost less than a block in UB with two handshakes. The line is
  // the row's own, so that no other core can write an old copy of it back.
  __aicore__ inline void WriteHead(int64_t row, bool seen, int64_t held) {
    const int64_t at = row * kHeadWords;
    gm_heads_.SetValue(at + kHeadCount, static_cast<int32_t>(count_));
    gm_heads_.SetValue(at + kHeadSeen, static_cast<int32_t>(seen));
    gm_heads_.SetValue(at + kHeadHeld, static_cast<int32_t>(held));
    gm_heads_.SetValue(at + kHeadTo, target_of_exchange_);
    if (target_of_exchange_ >= 0) {
      gm_heads_.SetValue(at + kHeadFrom, from_of_exchange_);
      gm_heads_.SetValue(at + kHeadOther, other_of_exchange_);
      gm_heads_.SetValue(at + kHeadTokens, tokens_of_exchange_);
    }
    AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                      AscendC::DcciDst::CACHELINE_OUT>(gm_heads_[at]);
  }

  SelectionTiling tiling_;
  HeldSlots held_;
  int64_t row_ = 0;
  int64_t request_ = 0;
  int64_t length_ = 0;  // tokens that the row sees
  int64_t stable_ = 0;  // tokens of the request before those of this step
  uint32_t count_ = 0;  // entries listed
  int32_t from_of_exchange_ = 0;
  int32_t target_of_exchange_ = -1;
  int32_t other_of_exchange_ = 0;
  int32_t tokens_of_exchange_ = 0;
  AscendC::GlobalTensor<int32_t> gm_ids_;
  AscendC::GlobalTensor<int32_t> gm_status_;
  AscendC::GlobalTensor<int32_t> gm_lengths_;
  AscendC::GlobalTensor<int32_t> gm_selection_table_;
  AscendC::GlobalTensor<int32_t> gm_full_table_;
  AscendC::GlobalTensor<int32_t> gm_heads_;
  AscendC::GlobalTensor<int32_t> gm_fresh_;
  AscendC::GlobalTensor<int32_t> gm_sources_;
  AscendC::GlobalTensor<int32_t> gm_targets_;
  AscendC::GlobalTensor<int32_t> gm_tokens_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<int32_t> ids_;
  AscendC::LocalTensor<int32_t> status_;
  AscendC::LocalTensor<int32_t> fresh_;
  AscendC::LocalTensor<int32_t> sources_;
  AscendC::LocalTensor<int32_t> targets_;
  AscendC::LocalTensor<int32_t> tokens_;
  AscendC::LocalTensor<int16_t> found_;
  AscendC::LocalTensor<int16_t> origin_;
  AscendC::LocalTensor<int32_t> selection_table_;
  AscendC::LocalTensor<int32_t> full_table_;
  AscendC::LocalTensor<int32_t> word_;
};

}  // namespace tidal
