// SPDX-License-Identifier: Apache-2.0
// The four caches of an operator, checked against one another, and the part of the tiling that follows from
// them.

#pragma once

#include <algorithm>
#include <string>

#include "tidal_arguments.h"
#include "tidal_copy_tiling.h"

namespace tidal {
namespace host {

constexpr int64_t kMostKvElements = 656;
constexpr int64_t kMostRopeElements = 64;
constexpr int64_t kMostRows = 2147483647;  // a row number is an int32
constexpr int64_t kPieceBytes =
    16384;  // of a block that are carried at once, so that cores can share a block
constexpr int64_t kMostPlaces = 32;
// The last 256 bytes of UB are the system's, and some calls of the library use 8 KB before them.
constexpr int64_t kReservedUb = 8192 + 256;

struct Caches {
  Argument selection_rope;
  Argument selection_kv;
  Argument full_rope;
  Argument full_kv;
};

inline bool HasNoRope(const Argument& rope) { return rope.dims == std::vector<int64_t>{0}; }

inline std::string CheckSide(const Argument& kv, const Argument& rope) {
  if (kv.dims.size() != 3 || kv.dims[1] < 1 || kv.dims[2] < 1 || kv.dims[2] > kMostKvElements) {
    return ShapeError(kv, "[blocks, block size, 1 to " + std::to_string(kMostKvElements) + " elements]");
  }
  if (!HasNoRope(rope) &&
      (rope.dims.size() != 3 || rope.dims[0] != kv.dims[0] || rope.dims[1] != kv.dims[1] ||
       rope.dims[2] < 1 || rope.dims[2] > kMostRopeElements)) {
    return ShapeError(rope, "[" + std::to_string(kv.dims[0]) + ", " + std::to_string(kv.dims[1]) + ", 1 to " +
                                std::to_string(kMostRopeElements) + " elements] as " + kv.name +
                                ", or [0] for none");
  }
  if (kv.dims[0] > kMostRows / kv.dims[1]) {
    return ShapeError(kv, "fewer than 2^31 rows");
  }
  return "";
}

inline std::string CheckCaches(const Caches& caches) {
  const Element element = caches.full_kv.element;
  if (element == Element::kInt32 || element == Element::kOther) {
    return std::string(caches.full_kv.name) + ": " + NameOf(element) + ": expected float16, bfloat16 or int8";
  }
  for (const Argument* each : {&caches.selection_rope, &caches.selection_kv, &caches.full_rope}) {
    if (each->element != element) {
      return std::string(each->name) + ": " + NameOf(each->element) + ": expected " + NameOf(element) +
             ", the type of " + caches.full_kv.name;
    }
  }
  for (const std::string& error :
       {CheckSide(caches.selection_kv, caches.selection_rope), CheckSide(caches.full_kv, caches.full_rope)}) {
    if (!error.empty()) return error;
  }
  if (caches.selection_kv.dims[2] != caches.full_kv.dims[2]) {
    return ShapeError(caches.selection_kv, "rows of " + std::to_string(caches.full_kv.dims[2]) +
                                               " elements as " + caches.full_kv.name);
  }
  const int64_t rope = HasNoRope(caches.full_rope) ? 0 : caches.full_rope.dims[2];
  if ((HasNoRope(caches.selection_rope) ? 0 : caches.selection_rope.dims[2]) != rope) {
    return ShapeError(caches.selection_rope,
                      rope == 0
                          ? "[0], because " + std::string(caches.full_rope.name) + " is empty"
                          : "rows of " + std::to_string(rope) + " elements as " + caches.full_rope.name);
  }
  return "";
}

// Fills in the tiling of checked caches. `taken`: bytes of UB that the kernel needs for everything else.
inline std::string TileCopies(const Caches& caches, int64_t block, const Platform& platform, int64_t taken,
                              CopyTiling& tiling) {
  const int64_t element = BytesOf(caches.full_kv.element);
  tiling.kv_bytes = caches.full_kv.dims[2] * element;
  tiling.rope_bytes = HasNoRope(caches.full_rope) ? 0 : caches.full_rope.dims[2] * element;
  tiling.full_rows = caches.full_kv.dims[0] * caches.full_kv.dims[1];
  tiling.selection_rows = caches.selection_kv.dims[0] * caches.selection_kv.dims[1];
  tiling.block = block;
  const int64_t row_bytes = tiling.kv_bytes + tiling.rope_bytes;
  tiling.piece_tokens = std::min(block, std::max<int64_t>(1, kPieceBytes / row_bytes));
  tiling.pieces = Divided(block, tiling.piece_tokens);
  tiling.rope_at = RoundedUp(tiling.piece_tokens * tiling.kv_bytes, kUbBlock);
  tiling.piece_bytes = tiling.rope_at + RoundedUp(tiling.piece_tokens * tiling.rope_bytes, kUbBlock);
  const int64_t room = platform.ub_bytes - kReservedUb - taken - kCountTile * kUbBlock -
                       3 * kListTile * static_cast<int64_t>(sizeof(int32_t));
  tiling.places = std::min(kMostPlaces, room / 2 / tiling.piece_bytes);
  if (tiling.places < 2) {  // an exchange needs two
    return "UB: " + std::to_string(platform.ub_bytes) + " bytes: expected at least " +
           std::to_string(platform.ub_bytes - room + 4 * tiling.piece_bytes) +
           " for two buffers of two pieces of " + std::to_string(tiling.piece_tokens) + " rows";
  }
  return "";
}

// As many cores as there are pieces, if the platform has them.
inline int64_t CoresFor(int64_t entries, const CopyTiling& tiling, const Platform& platform) {
  return std::max<int64_t>(std::min(entries * tiling.pieces, platform.cores), 1);
}

}  // namespace host
}  // namespace tidal
