// SPDX-License-Identifier: Apache-2.0
// The memory that a row is planned in: its ids, old status and tables on the way into UB, its plan on the way
// out.

#pragma once

#include "tidal_selection_tiling.h"
#include "tidal_sync.h"

namespace tidal {

struct PlanArguments {
  GM_ADDR selection_table;
  GM_ADDR status;
  GM_ADDR ids;
  GM_ADDR full_table;
  GM_ADDR lengths;
  GM_ADDR workspace;
};

// Two blocks of which one takes the other's place; see Head.
struct Exchange {
  int32_t from;
  int32_t to;  // -1: there is none
  int32_t other;
  int32_t tokens;
};

template <bool kByBlocks>
class PlanMemory {
 public:
  // int32 but for found and origin; see PlanAreas.
  AscendC::LocalTensor<int32_t> ids, status, fresh, sources, targets, tokens, selection_table, full_table;
  AscendC::LocalTensor<int16_t> found, origin, next, heads;

  __aicore__ inline void Init(AscendC::TPipe& pipe, const SelectionTiling& tiling,
                              const PlanArguments& arguments) {
    tiling_ = tiling;
    gm_ids_.SetGlobalBuffer((__gm__ int32_t*)arguments.ids);
    gm_status_.SetGlobalBuffer((__gm__ int32_t*)arguments.status);
    gm_lengths_.SetGlobalBuffer((__gm__ int32_t*)arguments.lengths);
    gm_selection_table_.SetGlobalBuffer((__gm__ int32_t*)arguments.selection_table);
    gm_full_table_.SetGlobalBuffer((__gm__ int32_t*)arguments.full_table);
    const PlanStore& store = tiling_.store;
    gm_heads_.SetGlobalBuffer((__gm__ int32_t*)(arguments.workspace + store.heads));
    gm_fresh_.SetGlobalBuffer((__gm__ int32_t*)(arguments.workspace + store.status));
    gm_sources_.SetGlobalBuffer((__gm__ int32_t*)(arguments.workspace + store.sources));
    gm_targets_.SetGlobalBuffer((__gm__ int32_t*)(arguments.workspace + store.targets));
    gm_tokens_.SetGlobalBuffer((__gm__ int32_t*)(arguments.workspace + store.tokens));
    pipe.InitBuffer(buffer_, static_cast<uint32_t>(tiling_.areas.bytes));
    const PlanAreas& areas = tiling_.areas;
    ids = Area<int32_t>(areas.ids);
    status = Area<int32_t>(areas.status);
    fresh = Area<int32_t>(areas.fresh);
    sources = Area<int32_t>(areas.sources);
    targets = Area<int32_t>(areas.targets);
    tokens = Area<int32_t>(areas.tokens);
    selection_table = Area<int32_t>(areas.selection_table);
    full_table = Area<int32_t>(areas.full_table);
    found = Area<int16_t>(areas.found);
    origin = Area<int16_t>(areas.origin);
    next = Area<int16_t>(areas.next);
    heads = Area<int16_t>(areas.heads);
    word_ = Area<int32_t>(areas.word);
  }

  // Brings what a row is planned from. Returns the tokens of its request, those of this step included.
  __aicore__ inline int64_t Load(int64_t row, int64_t request) {
    ReadArray(word_, gm_lengths_[request], 1);
    ReadArray(ids, gm_ids_[row * tiling_.topk], tiling_.topk);
    ReadArray(status, gm_status_[row * (tiling_.topk + 1)], tiling_.topk + 1);
    ReadArray(selection_table, gm_selection_table_[row * tiling_.selection_pages], tiling_.used_pages);
    ReadArray(full_table, gm_full_table_[request * tiling_.full_pages], tiling_.cached_pages);
    Handshake<AscendC::HardEvent::MTE2_S>();
    return word_.GetValue(0);
  }

  // A table too long for UB is read word by word past its beginning; nobody writes it during the call.
  __aicore__ inline int32_t FullPage(int64_t request, uint32_t column) const {
    if (column < tiling_.cached_pages) return full_table.GetValue(column);
    return gm_full_table_.GetValue(request * tiling_.full_pages + column);
  }

  // Takes the new status and the row's list to the workspace.
  __aicore__ inline void Store(int64_t row, int64_t count) {
    Handshake<AscendC::HardEvent::S_MTE3>();
    WriteArray(gm_fresh_[row * tiling_.store.status_pitch], fresh, tiling_.topk + 1);
    if (count > 0) {
      WriteArray(gm_sources_[row * tiling_.store.pitch], sources, count);
      WriteArray(gm_targets_[row * tiling_.store.pitch], targets, count);
      if constexpr (kByBlocks) WriteArray(gm_tokens_[row * tiling_.store.pitch], tokens, count);
    }
    Handshake<AscendC::HardEvent::MTE3_S>();  // the next row is written where this one is read
  }

  // A few words and the cleaning of their line cost less than a block in UB with two handshakes. The line is
  // the row's own, so that no other core can write an old copy of it back.
  __aicore__ inline void StoreHead(int64_t row, int64_t count, bool seen, int64_t held,
                                   const Exchange& exchange) {
    const int64_t at = row * kHeadWords;
    gm_heads_.SetValue(at + kHeadCount, static_cast<int32_t>(count));
    gm_heads_.SetValue(at + kHeadSeen, static_cast<int32_t>(seen));
    gm_heads_.SetValue(at + kHeadHeld, static_cast<int32_t>(held));
    gm_heads_.SetValue(at + kHeadFrom, exchange.from);
    gm_heads_.SetValue(at + kHeadTo, exchange.to);
    gm_heads_.SetValue(at + kHeadOther, exchange.other);
    gm_heads_.SetValue(at + kHeadTokens, exchange.tokens);
    AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                      AscendC::DcciDst::CACHELINE_OUT>(gm_heads_[at]);
    Handshake<AscendC::HardEvent::S_MTE2>();  // the next row comes where this one was read
  }

 private:
  template <typename T>
  __aicore__ inline AscendC::LocalTensor<T> Area(int64_t at) {
    return buffer_.Get<int8_t>()[static_cast<uint32_t>(at)].template ReinterpretCast<T>();
  }

  SelectionTiling tiling_;
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
  AscendC::LocalTensor<int32_t> word_;
};

}  // namespace tidal
