// SPDX-License-Identifier: Apache-2.0
// The CANN operator GatherSelectionKvCache on the CPU. tidal_connector/ops/gather_selection.py describes it,
// and gather_selection_reference.py defines it.

#pragma once

#include <cstdint>

#include "tidal/copy.h"

namespace tidal {

// A selection cache or a full pool, and the rope part beside it (row_bytes 0: there is none).
template <class Rows>
struct SelectionRows {
  Rows kv;
  Rows rope;
};

// One call. Row r of requests * queries rows is query r % queries of request r / queries. All sizes fit one
// another, and the pages of `selection_table` that active rows use are inside the selection cache and differ.
struct SelectionCall {
  SelectionRows<DestinationRows> selection;
  SelectionRows<SourceRows> full;
  const int32_t* selection_table;  // [rows, selection_pages]
  const int32_t* full_table;       // [requests, full_pages]
  const int32_t* lengths;          // [requests], tokens with those of this step
  const int32_t* ids;              // [rows, topk]
  int32_t* status;                 // [rows, topk + 1]: id in each slot or -1, then valid tokens
  int32_t* actual;                 // [rows], valid tokens; rows that see no token are left as they are
  int64_t requests;
  int64_t queries;
  int64_t topk;
  int64_t block;  // tokens of an id
  int64_t selection_pages;
  int64_t full_pages;
  bool by_blocks;  // the rules for few ids (a negative id ends the row; the largest id goes last)
};

// What a call did, in ids and (fetched_rows) tokens. wrong_row >= 0: id wrong_id of that row has to be
// fetched from a page outside the full pool, and nothing was written.
struct SelectionCounts {
  int64_t hits = 0;
  int64_t moved = 0;
  int64_t fetched = 0;
  int64_t fetched_rows = 0;
  int64_t wrong_row = -1;
  int64_t wrong_id = -1;
};

SelectionCounts gather_selection(const SelectionCall& call, int threads, CopyPath path);

}  // namespace tidal
