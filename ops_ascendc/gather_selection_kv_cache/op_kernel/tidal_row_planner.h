// SPDX-License-Identifier: Apache-2.0
// Plans one row: which slot each id gets, and what has to be copied for it. Writes the workspace and nothing
// else. A row is planned by one core, in four passes over at most 2,048 ids; the hash table makes each pass
// linear. Counted, not measured: some 100,000 scalar instructions for 2,048 ids.

#pragma once

#include "tidal_held_slots.h"
#include "tidal_plan_memory.h"

namespace tidal {

// kByBlocks: at most 32 ids, each a block of tokens of which the newest may be incomplete.
template <bool kByBlocks>
class RowPlanner {
 public:
  __aicore__ inline void Init(AscendC::TPipe& pipe, const SelectionTiling& tiling,
                              const PlanArguments& arguments) {
    tiling_ = tiling;
    memory_.Init(pipe, tiling, arguments);
    held_.Init(memory_.status, memory_.heads, memory_.next, tiling.buckets, tiling.bucket_shift);
  }

  __aicore__ inline void Plan(int64_t row) {
    row_ = row;
    request_ = row / tiling_.queries;
    count_ = 0;
    exchange_ = {0, -1, 0, 0};
    const int64_t written = memory_.Load(row_, request_);
    length_ = written - (tiling_.queries - 1 - row % tiling_.queries);
    stable_ = written - tiling_.queries;
    const bool seen = length_ > 0;
    int64_t held = 0;
    if (seen) {
      const int64_t room = tiling_.full_pages * tiling_.full_page_tokens;
      ASSERT_MSG(
          written <= room,
          "full_kv_actual_seq[%ld] = %ld: expected at most %ld, the tokens in a row of full_kv_block_table\n",
          request_, written, room);
      const int32_t used = Choose();
      Assign(used);
      if constexpr (kByBlocks) ListBlocks(used);
      held = Held(used);
      memory_.fresh.SetValue(static_cast<uint32_t>(tiling_.topk), static_cast<int32_t>(held));
      memory_.Store(row, count_);
    }
    memory_.StoreHead(row, count_, seen, held, exchange_);
  }

 private:
  // Gathers the valid ids at the front, and beside each the slot where it was found and can be trusted.
  __aicore__ inline int32_t Choose() {
    const auto topk = static_cast<uint32_t>(tiling_.topk);
    const int64_t block = tiling_.copy.block;
    const int64_t last = (length_ - 1) / block;
    // Whole blocks of the last call. The partial one, if any, was its last.
    const int64_t whole = kByBlocks ? memory_.status.GetValue(topk) / block : topk;
    held_.Fill(topk);
    for (uint32_t slot = 0; slot < topk; ++slot) memory_.fresh.SetValue(slot, static_cast<int32_t>(-1));
    uint32_t used = 0;
    for (uint32_t i = 0; i < topk; ++i) {
      const int32_t id = memory_.ids.GetValue(i);
      if (kByBlocks && id < 0) break;
      if (id < 0 || id > last) continue;
      int32_t slot = held_.Take(id);
      // What this step wrote, rejected drafts of the last one among it, the copy does not have.
      if (slot >= whole || (id + static_cast<int64_t>(1)) * block > stable_) slot = -1;
      memory_.ids.SetValue(used, id);
      memory_.found.SetValue(used, static_cast<int16_t>(slot));
      if (slot >= 0) memory_.fresh.SetValue(static_cast<uint32_t>(slot), id);
      ++used;
    }
    return static_cast<int32_t>(used);
  }

  // Hits below `used` stay. The others take the free slots there in ascending order: sources of moves are at
  // or past `used` and targets below, so that no move overwrites what another reads, on whichever core.
  __aicore__ inline void Assign(int32_t used) {
    uint32_t free = 0;
    for (uint32_t i = 0; i < static_cast<uint32_t>(used); ++i) {
      const int32_t slot = memory_.found.GetValue(i);
      if (slot >= 0 && slot < used) {
        if constexpr (kByBlocks)
          memory_.origin.SetValue(static_cast<uint32_t>(slot), static_cast<int16_t>(slot));
        continue;
      }
      const int32_t id = memory_.ids.GetValue(i);
      while (memory_.fresh.GetValue(free) >= 0) ++free;
      memory_.fresh.SetValue(free, id);
      if (slot >= 0) memory_.fresh.SetValue(static_cast<uint32_t>(slot), static_cast<int32_t>(-1));
      if constexpr (kByBlocks) {
        memory_.origin.SetValue(free, static_cast<int16_t>(slot));
      } else {
        List(slot, id, free);
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
      if (memory_.fresh.GetValue(slot) > memory_.fresh.GetValue(at)) at = slot;
    }
    Swap(at, end);
    const bool leaves_end = at != end && memory_.origin.GetValue(at) == static_cast<int16_t>(end);
    const bool leaves_at = at != end && memory_.origin.GetValue(end) == static_cast<int16_t>(at);
    const bool exchanged = leaves_end || leaves_at;
    if (exchanged) PlanExchange(leaves_end ? end : at, leaves_end ? at : end);
    for (uint32_t slot = 0; slot <= end; ++slot) {
      const int16_t origin = memory_.origin.GetValue(slot);
      const bool stays = origin == static_cast<int16_t>(slot);
      if (!stays && !(exchanged && (slot == at || slot == end)))
        List(origin, memory_.fresh.GetValue(slot), slot);
    }
  }

  __aicore__ inline void Swap(uint32_t one, uint32_t other) {
    const int32_t id = memory_.fresh.GetValue(one);
    const int16_t origin = memory_.origin.GetValue(one);
    memory_.fresh.SetValue(one, memory_.fresh.GetValue(other));
    memory_.origin.SetValue(one, memory_.origin.GetValue(other));
    memory_.fresh.SetValue(other, id);
    memory_.origin.SetValue(other, origin);
  }

  // The bytes in slot `from` go to slot `to`, and those of the id that now belongs to `from` take their
  // place.
  __aicore__ inline void PlanExchange(uint32_t from, uint32_t to) {
    const int32_t id = memory_.fresh.GetValue(from);
    exchange_ = {SelectionRow(from), SelectionRow(to), SourceOf(memory_.origin.GetValue(from), id),
                 static_cast<int32_t>(TokensOf(id))};
  }

  __aicore__ inline void List(int32_t origin, int32_t id, uint32_t slot) {
    memory_.sources.SetValue(count_, SourceOf(origin, id));
    memory_.targets.SetValue(count_, SelectionRow(slot));
    if constexpr (kByBlocks) memory_.tokens.SetValue(count_, static_cast<int32_t>(TokensOf(id)));
    ++count_;
  }

  // As Piece::source.
  __aicore__ inline int32_t SourceOf(int32_t origin, int32_t id) const {
    return origin >= 0 ? ~SelectionRow(static_cast<uint32_t>(origin)) : PoolRow(id);
  }

  // 32-bit divisions: a slot's first token and an id's are below 2^31.
  __aicore__ inline int32_t SelectionRow(uint32_t slot) const {
    const auto start = slot * static_cast<uint32_t>(tiling_.copy.block);
    const auto size = static_cast<uint32_t>(tiling_.selection_page_tokens);
    const uint32_t column = start / size;
    const int64_t page = memory_.selection_table.GetValue(column);
    ASSERT_MSG(page >= 0 && page < tiling_.selection_blocks,
               "selection_kv_block_table[%ld, %u] = %ld: expected a page in [0, %ld)\n", row_, column, page,
               tiling_.selection_blocks);
    return static_cast<int32_t>(page * size + (start - column * size));
  }

  __aicore__ inline int32_t PoolRow(int32_t id) const {
    const auto start = static_cast<uint32_t>(id) * static_cast<uint32_t>(tiling_.copy.block);
    const auto size = static_cast<uint32_t>(tiling_.full_page_tokens);
    const uint32_t column = start / size;
    const int64_t page = memory_.FullPage(request_, column);
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
    for (uint32_t slot = 0; slot < static_cast<uint32_t>(used); ++slot) {
      held += TokensOf(memory_.fresh.GetValue(slot));
    }
    return held;
  }

  SelectionTiling tiling_;
  PlanMemory<kByBlocks> memory_;
  HeldSlots held_;
  int64_t row_ = 0;
  int64_t request_ = 0;
  int64_t length_ = 0;  // tokens that the row sees
  int64_t stable_ = 0;  // tokens of the request before those of this step
  uint32_t count_ = 0;  // entries listed
  Exchange exchange_ = {0, -1, 0, 0};
};

}  // namespace tidal
