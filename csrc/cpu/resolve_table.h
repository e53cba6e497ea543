// SPDX-License-Identifier: Apache-2.0
// A hash table from positions to arena rows that lives for one request and step.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#  include <emmintrin.h>
#endif

namespace tidal {

// Open addressing by buckets of kBucket cells. A bucket is compared at once, so that finding costs no branch
// that depends on the data: cell by cell, the mispredicted ones took half of the time.
class PositionTable {
 public:
  static constexpr int kBucket = 8;

  // Empties the table and makes room for `entries` positions; `extra` cells behind the table's get row -1.
  void clear(int64_t entries, int64_t extra) {
    int bits = 1;
    while ((int64_t{kBucket} << bits) < 2 * entries) ++bits;
    shift_ = 32 - bits;
    size_ = int64_t{kBucket} << bits;
    if (static_cast<int64_t>(keys_.size()) < size_ + kBucket)
      keys_.resize(static_cast<size_t>(size_ + kBucket));
    if (static_cast<int64_t>(rows_.size()) < size_ + extra + 1)
      rows_.resize(static_cast<size_t>(size_ + extra + 1));
    std::memset(keys_.data(), 0xFF, static_cast<size_t>(size_) * sizeof(int32_t));
    std::memset(rows_.data() + size_, 0xFF, static_cast<size_t>(extra) * sizeof(int32_t));
    nowhere_ = size_ + extra;
  }

  int64_t size() const { return size_; }
  int32_t& row(int32_t cell) { return rows_[static_cast<size_t>(cell)]; }
  int32_t position(int32_t cell) const { return keys_[static_cast<size_t>(cell)]; }

  // Returns the cell of a position, which is new if `added`; its row is then -1.
  int32_t insert(int32_t position, bool* added) {
    uint32_t bucket = home(position);
    for (;; bucket = next(bucket)) {
      const uint32_t same = match(bucket, position);
      const uint32_t lanes = same != 0 ? same : match(bucket, kEmpty);
      if (lanes == 0) continue;
      const auto cell = static_cast<int32_t>(bucket * kBucket + first(lanes));
      keys_[static_cast<size_t>(cell)] = position;
      rows_[static_cast<size_t>(cell)] = -1;
      *added = same == 0;
      return cell;
    }
  }

  // Notes the row of a position if it is in the table, and says whether.
  bool place(int32_t position, int32_t row) {
    uint32_t bucket = home(position);
    uint32_t same = match(bucket, position);
    while (same == 0 && keys_[bucket * kBucket + kBucket - 1] != kEmpty) {
      bucket = next(bucket);
      same = match(bucket, position);
    }
    const int64_t cell = same != 0 ? int64_t{bucket} * kBucket + first(same) : nowhere_;
    rows_[static_cast<size_t>(cell)] = row;
    return same != 0;
  }

 private:
  static constexpr int32_t kEmpty = -1;

  // Multiplication by 2^32 / golden ratio spreads runs of neighbours evenly.
  uint32_t home(int32_t position) const { return (static_cast<uint32_t>(position) * 0x9E3779B1u) >> shift_; }
  uint32_t next(uint32_t bucket) const { return (bucket + 1) & ((1u << (32 - shift_)) - 1); }

#if defined(__SSE2__)
  static uint32_t first(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)) >> 1; }
  uint32_t match(uint32_t bucket, int32_t key) const {
    const auto* const cells = reinterpret_cast<const __m128i*>(keys_.data() + bucket * kBucket);
    const __m128i wanted = _mm_set1_epi32(key);
    const __m128i low = _mm_cmpeq_epi32(_mm_loadu_si128(cells), wanted);
    const __m128i high = _mm_cmpeq_epi32(_mm_loadu_si128(cells + 1), wanted);
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi32(low, high)));
  }
#else
  static uint32_t first(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)); }
  uint32_t match(uint32_t bucket, int32_t key) const {
    const int32_t* const cells = keys_.data() + bucket * kBucket;
    uint32_t lanes = 0;
    for (int i = 0; i < kBucket; ++i) lanes |= static_cast<uint32_t>(cells[i] == key) << i;
    return lanes;
  }
#endif

  std::vector<int32_t> keys_;
  std::vector<int32_t> rows_;
  int64_t size_ = 0;
  int64_t nowhere_ = 0;
  int shift_ = 31;
};

}  // namespace tidal
