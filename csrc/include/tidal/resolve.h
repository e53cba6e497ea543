// SPDX-License-Identifier: Apache-2.0
// Which selected rows are on the device, which are fetched, and which rows make room for them.
// tidal_connector/ops/resolve_reference.py is the definition; ops/slots.py explains seats and their state.

#pragma once

#include <cstdint>

namespace tidal {

// Seats of running requests: slot s of a seat is arena row extents[seat][s / extent_rows] * extent_rows +
// s % extent_rows.
struct Seats {
  const int32_t* capacity;
  const int32_t* extents;
  int64_t count;
  int64_t max_extents;
  int64_t extent_rows;
};

// What the slots of one index group hold. `held` and `order` have `arena_rows` entries, the others one per
// seat.
struct SlotState {
  int32_t* held;
  int32_t* order;
  uint8_t* listed;
  int32_t* filled;
  int32_t* length;
  int64_t arena_rows;
  int64_t seats;
};

// What the indexer selected in one step: `width` entries for each of `queries`, of `requests` in turn.
// Strides are elements.
struct SelectionBatch {
  const int32_t* selected;
  int64_t selected_stride;
  int64_t queries;
  int64_t width;
  const int32_t* query_start;
  const int32_t* seat;
  const int32_t* start;
  int64_t requests;
  const int32_t* pages;
  int64_t pages_stride;
  int64_t page_count;
  int64_t page_tokens;
};

// Where the plan goes: slots [queries][width], written [queries], miss_start [requests + 1], and room for
// `miss_room` misses.
struct ResolveOutput {
  int32_t* slots;
  int32_t* written;
  int32_t* miss_start;
  int64_t* miss_rows;
  int64_t* miss_slots;
  int64_t miss_room;
};

enum class ResolveStatus : int {
  kDone = 0,
  kRefused = 1,  // the batch does not fit the state or the seats; nothing was changed
  kNoRoom = 2,   // `fetched` misses may come; nothing was changed
  kBroken = 3,   // the state of a seat contradicts itself; requests before it may have been resolved
};

struct ResolveCounts {
  int64_t fetched;
  int64_t hits;
  int64_t misses;
  int64_t evictions;
  int64_t invalid;
};

struct Resolution {
  ResolveStatus status;
  ResolveCounts counts;
};

// Resolves a batch. Requests in place whose start is at most `eager_rows` fetch all of their context.
// `threads` workers share the requests (the caller is one of them); small batches use fewer.
Resolution resolve(const SlotState& state, const Seats& seats, const SelectionBatch& batch,
                   const ResolveOutput& out, int64_t eager_rows, int threads);

}  // namespace tidal
