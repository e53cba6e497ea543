// SPDX-License-Identifier: Apache-2.0
// One request of a batch: its part of the state, its part of the results, and what a worker needs for it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tidal/resolve.h"

namespace tidal {

// Grows memory that is kept between uses to `count` elements at least.
template <class T>
T* room(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
  return memory.data();
}

// Divides 31-bit numbers by a number that is known late: a multiplication instead of some 10 cycles.
class Divisor {
 public:
  explicit Divisor(int64_t by)
      : by_(by), inverse_(by > 1 ? ~uint64_t{0} / static_cast<uint64_t>(by) + 1 : 0) {}
  int64_t of(int64_t number) const {
    if (inverse_ == 0) return number;
    return static_cast<int64_t>((static_cast<unsigned __int128>(inverse_) * static_cast<uint64_t>(number)) >>
                                64);
  }
  int64_t by() const { return by_; }

 private:
  int64_t by_;
  uint64_t inverse_;
};

// Memory that a worker keeps between requests.
struct Scratch {
  std::vector<uint32_t> keys;     // of the table
  std::vector<int32_t> rows;      // of the table
  std::vector<int32_t> cells;     // of each selected entry
  std::vector<int32_t> distinct;  // cells in the order of first occurrence
  std::vector<int32_t> empty, victims, hits, hit_cells;
  std::vector<uint64_t> seen;  // a bit for each position of a request in place; all zero between requests
};

// One request of the batch, with its part of the state and of the results.
struct Request {
  const SelectionBatch& batch;
  int32_t* held;
  int32_t* order;
  int64_t arena_rows;
  const int32_t* extents;
  const Divisor& extent_rows;
  const Divisor& page_tokens;
  const int32_t* pages;
  int64_t capacity;
  int64_t first;
  int64_t queries;
  int64_t start;
  int64_t eager_rows;
  uint8_t* listed;
  int32_t* filled;
  int32_t* length;
  int32_t* slots;
  int32_t* written;
  int64_t* miss_rows;
  int64_t* miss_slots;

  int64_t end() const { return start + queries; }
  int64_t paged() const { return batch.page_count * page_tokens.by(); }
  // Entries of query i below this are valid.
  uint32_t limit(int64_t i) const { return static_cast<uint32_t>(std::min(start + i + 1, paged())); }
  const int32_t* selected(int64_t i) const { return batch.selected + (first + i) * batch.selected_stride; }
  int32_t row(int64_t slot) const {
    const int64_t at = extent_rows.of(slot);
    return static_cast<int32_t>(slot + (extents[at] - at) * extent_rows.by());
  }
  void fetch(int64_t index, int64_t position, int32_t to) const {
    const int64_t page = page_tokens.of(position);
    miss_rows[index] = position + (pages[page] - page) * page_tokens.by();
    miss_slots[index] = to;
  }
  // Calls visit(order entries, count) for each extent in turn.
  template <class Visit>
  void each_extent(Visit visit) const {
    for (int64_t slot = 0, at = 0; slot < capacity; slot += extent_rows.by(), ++at)
      visit(order + extents[at] * extent_rows.by(), std::min(capacity - slot, extent_rows.by()));
  }
};

// Resolve a request in place, or in order of use; false if its state contradicts itself. Both add to the
// counts.
void resolve_in_place(const Request& request, Scratch& scratch, ResolveCounts& counts);
bool resolve_listed(const Request& request, Scratch& scratch, ResolveCounts& counts);

}  // namespace tidal
