// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernel gather_selection_kv_cache: sizes, the areas of UB, the layout of the
// workspace.

#pragma once

#include "tidal_copy_tiling.h"

namespace tidal {

// Where the arrays of a plan begin in UB, in bytes.
struct PlanAreas {
  int64_t ids;              // int32[topk]: the row's ids, then the valid ones
  int64_t status;           // int32[topk + 1] as the last call left it
  int64_t fresh;            // int32[topk + 1] as this call leaves it
  int64_t sources;          // int32[topk], the list that is being made
  int64_t targets;          // int32[topk]
  int64_t tokens;           // int32[topk], for blocks alone
  int64_t found;            // int16[topk]: the slot in which a valid id was found, or -1
  int64_t origin;           // int16[topk], for blocks alone: where the bytes of a used slot come from
  int64_t next;             // int16[topk]: the next slot of the same bucket
  int64_t heads;            // int16[buckets]: the first slot of a bucket
  int64_t selection_table;  // int32[used_pages]
  int64_t full_table;       // int32[cached_pages]
  int64_t word;             // int32[8]
  int64_t bytes;            // of all
};

// Byte offsets in the part of the workspace that is the kernel's own.
struct PlanStore {
  int64_t heads;    // a cache line for each row, see Head
  int64_t status;   // int32[rows][status_pitch]
  int64_t sources;  // int32[rows][pitch]
  int64_t targets;  // int32[rows][pitch]
  int64_t tokens;   // int32[rows][pitch], for blocks alone
  int64_t bytes;    // of all
  int64_t pitch;
  int64_t status_pitch;
};

// Row r is query r % queries of request r / queries.
struct SelectionTiling {
  CopyTiling copy;
  PlanAreas areas;
  PlanStore store;
  int64_t queries;
  int64_t rows;
  int64_t topk;
  int64_t table_rows;       // of the selection block table, at least `rows`
  int64_t selection_pages;  // in a row of that table
  int64_t selection_page_tokens;
  int64_t selection_blocks;
  int64_t used_pages;  // of those in a row
  int64_t full_pages;  // in a row of the full block table
  int64_t full_page_tokens;
  int64_t full_blocks;
  int64_t cached_pages;  // of those in a row, kept in UB while the row is planned
  int64_t buckets;       // of the hash table, a power of two
  int64_t bucket_shift;  // 32 - log2(buckets)
};

constexpr uint64_t kKeyBlocks = 1;  // at most 32 ids in a row, of any block size
constexpr uint64_t kKeyTokens = 2;  // more ids, each a single token

// The words of a row's head. It fills a cache line, so that the row's leader can write it word by word.
enum Head : uint32_t {
  kHeadCount,   // entries in the row's list
  kHeadSeen,    // 0: the row sees no token and is left as it is
  kHeadHeld,    // tokens that the row holds after the call
  kHeadFrom,    // the exchange: the bytes of this selection row ...
  kHeadTo,      // ... go to this one (-1: no exchange), ...
  kHeadOther,   // ... and those of this source (as Piece::source) take their place, ...
  kHeadTokens,  // ... so many tokens
  kHeadWords = 16,
};

}  // namespace tidal
