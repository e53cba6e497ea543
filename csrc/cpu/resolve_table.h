// SPDX-License-Identifier: Apache-2.0
// A hash table from positions to arena rows that lives for one request and step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "resolve_request.h"

namespace tidal {

// Open addressing. Whether a slot's position is selected is a toss-up, and a wrong guess costs some 20
// cycles, more than all else. So most questions are answered by one cell and without a branch: at most one
// cell of kSpare is in use, and a mark in a position's home says whether to look further, which is so for one
// question in 30. With 4 cells for each position a request that selects 2,048 of 4,097 slots took 27 us, with
// 8 it takes 22, with 16 no less.
class PositionTable {
 public:
  // An empty table for `entries` positions in the memory given. Cells [size(), size() + extra) serve rows of
  // no position in the table; their row is -1 at first.
  PositionTable(std::vector<uint32_t>& keys, std::vector<int32_t>& rows, int64_t entries, int64_t extra) {
    int bits = 4;
    while ((int64_t{1} << bits) < kSpare * entries) ++bits;
    shift_ = 32 - bits;
    last_ = (uint32_t{1} << bits) - 1;
    keys_ = room(keys, size());
    rows_ = room(rows, size() + extra);
    std::fill_n(keys_, size(), kEmpty);
    std::fill_n(rows_ + size(), extra, -1);
  }

  int64_t size() const { return int64_t{last_} + 1; }
  int32_t& row(int64_t cell) { return rows_[cell]; }
  int32_t position(int64_t cell) const { return static_cast<int32_t>(keys_[cell] & ~kMore); }

  // Returns the cell of a position, and whether it is new; then its row is -1.
  int32_t insert(int32_t position, bool* added) {
    const auto key = static_cast<uint32_t>(position);
    const uint32_t home = home_of(key);
    uint32_t cell = home;
    while (keys_[cell] != kEmpty && (keys_[cell] & ~kMore) != key) cell = (cell + 1) & last_;
    *added = keys_[cell] == kEmpty;
    if (*added) {
      keys_[cell] = key;
      rows_[cell] = -1;
      if (cell != home) keys_[home] |= kMore;
    }
    return static_cast<int32_t>(cell);
  }

  // Whether a position is in the table; if so, `cell` is its cell.
  bool find(int32_t position, int32_t* cell) const {
    const auto key = static_cast<uint32_t>(position);
    uint32_t at = home_of(key);
    uint32_t other = keys_[at] ^ key;
    if (__builtin_expect(other > kMore, 0)) {  // another position is here, and there are more
      do {
        at = (at + 1) & last_;
        other = keys_[at] ^ key;
      } while ((other & ~kMore) != 0 && keys_[at] != kEmpty);
    }
    *cell = static_cast<int32_t>(at);
    return other + other == 0;  // but for the mark they are equal
  }

 private:
  static constexpr int64_t kSpare = 8;
  static constexpr uint32_t kMore = 1u
                                    << 31;  // in a key: positions at home in its cell had to go to later ones
  static constexpr uint32_t kEmpty = kMore - 1;  // no position: those in the table are below it

  // Multiplication by 2^32 / golden ratio spreads runs of neighbours evenly.
  uint32_t home_of(uint32_t key) const { return (key * 0x9E3779B1u) >> shift_; }

  uint32_t* keys_;
  int32_t* rows_;
  uint32_t last_;
  int shift_;
};

}  // namespace tidal
