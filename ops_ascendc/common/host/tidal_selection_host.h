// SPDX-License-Identifier: Apache-2.0
// Host tiling of GatherSelectionKvCache: the checks of its arguments, and the numbers that its kernel works
// with.

#pragma once

#include <string>

#include "tidal_cache_checks.h"
#include "tidal_selection_tiling.h"

namespace tidal {
namespace host {

constexpr int64_t kDefaultBlock = 64;
constexpr int64_t kMostIds = 2048;
constexpr int64_t kMostBlocks = 32;  // more ids than this come only as single tokens
constexpr int64_t kMostQueries = 7;
constexpr int64_t kMostCachedPages = 4096;

struct SelectionArguments {
  Caches caches;
  Argument selection_table;
  Argument status;
  Argument ids;
  Argument full_table;
  Argument full_lengths;
  Argument query_lengths;
  Argument actual;
  int64_t block;  // the attribute selection_topk_block_size as it was given; below 1 stands for 64
};

struct Batch {
  int64_t requests = 0;
  int64_t queries = 0;
  int64_t topk = 0;
};

inline std::string CheckBatch(const SelectionArguments& given, int64_t block, Batch& batch) {
  const Argument& ids = given.ids;
  if (ids.dims.size() != 3 && ids.dims.size() != 4) {
    return ShapeError(ids, "[requests, queries, 1, ids] or [requests * queries, 1, ids]");
  }
  if (given.full_table.dims.size() != 2) return ShapeError(given.full_table, "[requests, pages]");
  batch.requests = given.full_table.dims[0];
  batch.topk = ids.dims.back();
  const bool bsnd = ids.dims.size() == 4;
  if (bsnd && ids.dims[0] != batch.requests) {
    return ShapeError(given.full_table, std::to_string(ids.dims[0]) + " rows, one for each request");
  }
  const int64_t tokens = bsnd ? ids.dims[0] * ids.dims[1] : ids.dims[0];
  if (batch.requests == 0 ? tokens != 0 : tokens % batch.requests != 0) {
    return ShapeError(
        ids, "a multiple of " + std::to_string(batch.requests) + " rows, those of " + given.full_table.name);
  }
  batch.queries = batch.requests == 0 ? 0 : tokens / batch.requests;
  if (batch.queries > kMostQueries) {
    return ShapeError(ids, "at most " + std::to_string(kMostQueries) + " queries for each request");
  }
  if (ids.dims[ids.dims.size() - 2] != 1) return ShapeError(ids, "1 head");
  if (batch.topk < 1 || batch.topk > kMostIds) {
    return ShapeError(ids, "1 to " + std::to_string(kMostIds) + " ids in a row");
  }
  if (batch.topk > kMostBlocks && block != 1) {
    return "selection_topk_block_size = " + std::to_string(block) + ": expected 1 for more than " +
           std::to_string(kMostBlocks) + " ids in a row (" + std::to_string(batch.topk) + ")";
  }
  std::vector<int64_t> status = ids.dims;
  ++status.back();
  if (given.status.dims != status) return ShapeError(given.status, Text(status));
  for (const Argument* lengths : {&given.full_lengths, &given.query_lengths}) {
    if (lengths->dims != std::vector<int64_t>{batch.requests}) {
      return ShapeError(*lengths, Text({batch.requests}) + ", one for each request");
    }
  }
  return "";
}

inline std::string CheckSelection(const SelectionArguments& given, int64_t block, Batch& batch) {
  std::string error = CheckCaches(given.caches);
  if (!error.empty()) return error;
  for (const Argument* each : {&given.selection_table, &given.status, &given.ids, &given.full_table,
                               &given.full_lengths, &given.query_lengths, &given.actual}) {
    error = CheckInt32(*each);
    if (!error.empty()) return error;
  }
  for (const Argument* kv : {&given.caches.selection_kv, &given.caches.full_kv}) {
    if (kv->dims[1] % block != 0) {
      return ShapeError(*kv, "a block size that is a multiple of " + std::to_string(block) +
                                 " tokens (selection_topk_block_size)");
    }
  }
  error = CheckBatch(given, block, batch);
  if (!error.empty()) return error;
  const Argument& table = given.selection_table;
  const Argument& kv = given.caches.selection_kv;
  const int64_t rows = batch.requests * batch.queries;
  const int64_t pages = Divided(batch.topk * block, kv.dims[1]);
  if (table.dims.size() != 2 || table.dims[0] < rows || table.dims[1] < pages) {
    return ShapeError(table, "at least " + Text({rows, pages}) + " for " + std::to_string(rows) +
                                 " rows of " + std::to_string(batch.topk) + " ids");
  }
  if (kv.dims[0] < rows * table.dims[1]) {
    return ShapeError(kv, "at least " + std::to_string(rows * table.dims[1]) + " blocks, " +
                              std::to_string(table.dims[1]) + " for each of " + std::to_string(rows) +
                              " rows");
  }
  if (given.actual.dims != std::vector<int64_t>{table.dims[0]}) {
    return ShapeError(given.actual, Text({table.dims[0]}) + ", one for each row of " + table.name);
  }
  return "";
}

// Lays areas out one behind the other, each at a multiple of `unit`.
class Layout {
 public:
  Layout(int64_t begin, int64_t unit) : at_(RoundedUp(begin, unit)), unit_(unit) {}

  int64_t Take(int64_t bytes) {
    const int64_t at = at_;
    at_ += RoundedUp(bytes, unit_);
    return at;
  }

  int64_t end() const { return at_; }

 private:
  int64_t at_;
  int64_t unit_;
};

inline PlanAreas AreasOf(const SelectionTiling& tiling, bool by_blocks) {
  const int64_t ids = tiling.topk * 4;
  const int64_t slots = tiling.topk * 2;
  Layout ub(0, kUbBlock);
  PlanAreas areas{};
  areas.ids = ub.Take(ids);
  areas.status = ub.Take(ids + 4);
  areas.fresh = ub.Take(ids + 4);
  areas.sources = ub.Take(ids);
  areas.targets = ub.Take(ids);
  areas.tokens = ub.Take(by_blocks ? ids : kUbBlock);
  areas.found = ub.Take(slots);
  areas.origin = ub.Take(by_blocks ? slots : kUbBlock);
  areas.next = ub.Take(slots);
  areas.heads = ub.Take(tiling.buckets * 2);
  areas.selection_table = ub.Take(tiling.used_pages * 4);
  areas.full_table = ub.Take(std::max<int64_t>(tiling.cached_pages, 1) * 4);
  areas.word = ub.Take(kUbBlock);
  areas.bytes = ub.end();
  return areas;
}

inline PlanStore StoreOf(const SelectionTiling& tiling, bool by_blocks) {
  PlanStore store{};
  store.pitch = RoundedUp(tiling.topk, 8);
  store.status_pitch = RoundedUp(tiling.topk + 1, 8);
  const int64_t rows =
      std::max<int64_t>(tiling.rows, 1);  // SyncAll wants a workspace, whatever there is to do
  Layout workspace(0, kCacheLine);
  store.heads = workspace.Take(rows * kHeadWords * 4);
  store.status = workspace.Take(rows * store.status_pitch * 4);
  store.sources = workspace.Take(rows * store.pitch * 4);
  store.targets = workspace.Take(rows * store.pitch * 4);
  store.tokens = workspace.Take(by_blocks ? rows * store.pitch * 4 : 0);
  store.bytes = workspace.end();
  return store;
}

// Returns an empty text and fills in `launch`, or returns what is wrong.
inline std::string TileSelection(const SelectionArguments& given, const Platform& platform,
                                 Launch<SelectionTiling>& launch) {
  const int64_t block = given.block < 1 ? kDefaultBlock : given.block;
  Batch batch;
  std::string error = CheckSelection(given, block, batch);
  if (!error.empty()) return error;
  const bool by_blocks = batch.topk <= kMostBlocks;
  SelectionTiling& tiling = launch.tiling;
  tiling.queries = std::max<int64_t>(batch.queries, 1);
  tiling.rows = batch.requests * batch.queries;
  tiling.topk = batch.topk;
  tiling.table_rows = given.selection_table.dims[0];
  tiling.selection_pages = given.selection_table.dims[1];
  tiling.selection_blocks = given.caches.selection_kv.dims[0];
  tiling.selection_page_tokens = given.caches.selection_kv.dims[1];
  tiling.used_pages = Divided(batch.topk * block, tiling.selection_page_tokens);
  tiling.full_pages = given.full_table.dims[1];
  tiling.full_blocks = given.caches.full_kv.dims[0];
  tiling.full_page_tokens = given.caches.full_kv.dims[1];
  tiling.cached_pages = std::min(tiling.full_pages, kMostCachedPages);
  int64_t bits = 4;  // whole blocks of UB
  while ((int64_t{1} << bits) < batch.topk) ++bits;
  tiling.buckets = int64_t{1} << bits;
  tiling.bucket_shift = 32 - bits;
  tiling.areas = AreasOf(tiling, by_blocks);
  tiling.store = StoreOf(tiling, by_blocks);
  const int64_t taken = tiling.areas.bytes + tiling.store.status_pitch * 4 + kUbBlock;
  error = TileCopies(given.caches, block, platform, taken, tiling.copy);
  if (!error.empty()) return error;
  launch.key = by_blocks ? kKeyBlocks : kKeyTokens;
  launch.cores = CoresFor(tiling.rows * batch.topk, tiling.copy, platform);
  launch.workspace = platform.system_workspace + tiling.store.bytes;
  return "";
}

}  // namespace host
}  // namespace tidal
