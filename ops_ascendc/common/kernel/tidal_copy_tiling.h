// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernels about rows of a cache: sizes in bytes and the shape of their UB buffers.
// Plain numbers, so that host tiling, kernels, simulation and tests share one definition.

#pragma once

#include <cstdint>

namespace tidal {

// A row is one token: its kv part and, unless rope_bytes is 0, its rope part in a tensor of its own.
// A list entry is a block of `block` tokens that lie behind one another; it is copied in pieces of
// `piece_tokens`.
struct CopyTiling {
  int64_t kv_bytes;
  int64_t rope_bytes;
  int64_t full_rows;  // below 2^31, so that a row number is an int32
  int64_t selection_rows;
  int64_t block;
  int64_t piece_tokens;
  int64_t pieces;       // of an entry
  int64_t rope_at;      // where the rope part of a piece begins in its place in UB
  int64_t piece_bytes;  // of a place in UB, a multiple of 32
  int64_t places;       // in one of the two buffers
};

constexpr int64_t kListTile = 512;   // entries of a list that are in UB at once
constexpr int64_t kCountTile = 256;  // rows whose counts are in UB at once
constexpr int64_t kUbBlock = 32;     // bytes; every UB address of a DMA is a multiple
constexpr int64_t kCacheLine = 64;   // bytes; what a scalar write to global memory owns

}  // namespace tidal
