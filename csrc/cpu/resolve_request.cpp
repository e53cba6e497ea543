// SPDX-License-Identifier: Apache-2.0

#include "resolve_request.h"

#include <algorithm>
#include <cstring>

#include "resolve_table.h"

namespace tidal {

void resolve_in_place(const Request& request, Scratch& scratch, ResolveCounts& counts) {
  const int64_t start = request.start, end = request.end(), width = request.batch.width;
  int32_t* const held = request.held;
  for (int64_t p = std::max<int64_t>(*request.length, 0); p < start; ++p) held[request.row(p)] = -1;
  int64_t filled = std::max<int64_t>(std::min<int64_t>(*request.filled, start), 0);
  const bool eager = start <= request.eager_rows;
  uint64_t* const seen = room(scratch.seen, end / 64 + 1);
  int64_t fetched = 0, misses = 0, distinct = 0;
  for (int64_t i = 0; i < request.queries; ++i) {
    const int32_t* const selected = request.selected(i);
    int32_t* const slots = request.slots + i * width;
    const uint32_t limit = request.limit(i);
    for (int64_t e = 0; e < width; ++e) {
      const int32_t p = selected[e];
      if (static_cast<uint32_t>(p) >= limit) {
        counts.invalid += p != -1;
        slots[e] = -1;
        continue;
      }
      const int32_t row = request.row(p);
      slots[e] = row;
      const uint64_t bit = uint64_t{1} << (p & 63);
      if ((seen[p >> 6] & bit) != 0) continue;
      seen[p >> 6] |= bit;
      ++distinct;
      if (p >= start || held[row] >= 0) continue;
      ++misses;
      if (eager) continue;
      held[row] = p;
      request.fetch(fetched++, p, row);
    }
  }
  for (int64_t i = 0; i < request.queries; ++i) {
    const int32_t* const selected = request.selected(i);
    const uint32_t limit = request.limit(i);
    for (int64_t e = 0; e < width; ++e)
      if (static_cast<uint32_t>(selected[e]) < limit) seen[selected[e] >> 6] = 0;
  }
  if (eager) {
    const int64_t stop = std::min(start, request.paged());
    for (int64_t p = filled; p < stop; ++p) {
      const int32_t row = request.row(p);
      if (held[row] >= 0) continue;
      held[row] = static_cast<int32_t>(p);
      request.fetch(fetched++, p, row);
    }
    filled = std::max(filled, stop);
  }
  for (int64_t p = start; p < end; ++p) {
    const int32_t row = request.row(p);
    held[row] = static_cast<int32_t>(p);
    request.written[p - start] = row;
  }
  *request.filled = static_cast<int32_t>(filled == start ? end : filled);
  *request.length = static_cast<int32_t>(end);
  counts.fetched += fetched;
  counts.hits += distinct - misses;
  counts.misses += misses;
}

namespace {

// Lists a seat that was in place: empty rows first, then by position.
void list(const Request& request, Scratch& scratch) {
  const int64_t known = std::min<int64_t>(*request.length, request.start);
  int32_t* const empty = room(scratch.empty, request.capacity);
  int32_t* const live = room(scratch.hits, request.capacity);
  int64_t empties = 0, lives = 0;
  for (int64_t slot = 0; slot < request.capacity; ++slot) {
    const int32_t row = request.row(slot);
    if (slot >= known) request.held[row] = -1;
    if (request.held[row] < 0) {
      empty[empties++] = row;
    } else {
      live[lives++] = row;
    }
  }
  int64_t slot = 0;
  request.each_extent([&](int32_t* order, int64_t count) {
    for (int64_t i = 0; i < count; ++i, ++slot)
      order[i] = slot < empties ? empty[slot] : live[slot - empties];
  });
  *request.listed = 1;
  *request.filled = 0;
}

// Writes the entries of `order` one part after the other.
class OrderWriter {
 public:
  explicit OrderWriter(const Request& request) : request_(request) {}
  void add(const int32_t* rows, int64_t count) {
    const int64_t size = request_.extent_rows.by();
    while (count > 0) {
      const int64_t extent = request_.extent_rows.of(slot_), offset = slot_ - extent * size;
      const int64_t part = std::min(count, size - offset);
      std::memcpy(request_.order + request_.extents[extent] * size + offset, rows,
                  static_cast<size_t>(part) * sizeof(int32_t));
      rows += part;
      slot_ += part;
      count -= part;
    }
  }

 private:
  const Request& request_;
  int64_t slot_ = 0;
};

// Distinct positions that a request selected.
struct Selected {
  int64_t before;   // those before the step: so many cells of the table
  int64_t written;  // those of the step
};

// Puts the positions before the step into the table, their cells in the order of first occurrence into
// `distinct`, and the cell of each entry into `cells`. Behind the table follow the cells of the step's own
// positions, and then one for all that is invalid.
Selected tabulate(const Request& request, PositionTable& table, int32_t* cells, int32_t* distinct,
                  ResolveCounts& counts) {
  const int64_t width = request.batch.width;
  const auto start = static_cast<int32_t>(request.start);
  const auto own = static_cast<int32_t>(table.size()), none = own + static_cast<int32_t>(request.queries);
  int64_t before = 0, written = 0, invalid = 0;
  for (int64_t i = 0; i < request.queries; ++i, cells += width) {
    const int32_t* const selected = request.selected(i);
    const uint32_t limit = request.limit(i);
    for (int64_t e = 0; e < width; ++e) {
      const int32_t p = selected[e];
      if (static_cast<uint32_t>(p) >= limit) {
        invalid += p != -1;
        cells[e] = none;
      } else if (p >= start) {
        const int32_t cell = own + p - start;
        written += table.row(cell) < 0;
        table.row(cell) = 0;
        cells[e] = cell;
      } else {
        bool added;
        const int32_t cell = table.insert(p, &added);
        cells[e] = cell;
        distinct[before] = cell;
        before += added;
      }
    }
  }
  counts.invalid += invalid;
  return {before, written};
}

// Rows of a seat, oldest first: those that may be taken, of which the first `empty` hold nothing, and those
// selected.
struct Scan {
  const int32_t* victims;
  int64_t available;
  int64_t empty;
  const int32_t* hits;
  int64_t hit;
};

// Goes through the rows of a seat and notes the rows of selected positions in the table.
Scan scan(const Request& request, PositionTable& table, Scratch& scratch) {
  int32_t* const held = request.held;
  int32_t* const empty = room(scratch.empty, request.capacity + 1);
  // The old rows are written first; the empty ones, which come before them, fit into the room that is left.
  int32_t* const old = room(scratch.victims, 2 * request.capacity + 1) + request.capacity;
  int32_t* const hits = room(scratch.hits, request.capacity + 1);
  int32_t* const cells = room(scratch.hit_cells, request.capacity + 1);
  const auto start = static_cast<uint32_t>(request.start);
  int64_t empties = 0, olds = 0, hit = 0;
  request.each_extent([&](const int32_t* order, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t row = order[i], p = held[row];
      if (static_cast<uint32_t>(p) >= start) {  // none, or one that is written anew
        held[row] = -1;
        empty[empties++] = row;
        continue;
      }
      // Written to both lists, counted in one: no branch.
      const bool found = table.find(p, &cells[hit]);
      hits[hit] = row;
      old[olds] = row;
      hit += found;
      olds += !found;
    }
  });
  for (int64_t i = 0; i < hit; ++i) table.row(cells[i]) = hits[i];
  int32_t* const victims = old - empties;
  std::copy_n(empty, empties, victims);
  return {victims, empties + olds, empties, hits, hit};
}

// Whether the order of a seat stays inside the arena.
bool is_sound(const Request& request) {
  const auto last = static_cast<int32_t>(request.arena_rows - 1);
  int32_t signs = 0;
  request.each_extent([&](const int32_t* order, int64_t count) {
    for (int64_t i = 0; i < count; ++i) signs |= order[i] | (last - order[i]);
  });
  return signs >= 0;
}

}  // namespace

bool resolve_listed(const Request& request, Scratch& scratch, ResolveCounts& counts) {
  if (*request.listed == 0) list(request, scratch);
  if (!is_sound(request)) return false;
  const int64_t queries = request.queries, entries = queries * request.batch.width;
  const auto start = static_cast<int32_t>(request.start);
  PositionTable table(scratch.keys, scratch.rows, entries, queries + 1);
  int32_t* const cells = room(scratch.cells, entries);
  int32_t* const distinct = room(scratch.distinct, entries + 1);
  const Selected selected = tabulate(request, table, cells, distinct, counts);
  const Scan rows = scan(request, table, scratch);

  int32_t* const absent = distinct;
  int64_t misses = 0;
  for (int64_t i = 0; i < selected.before; ++i) {
    const int32_t cell = distinct[i];
    absent[misses] = cell;
    misses += table.row(cell) < 0;
  }
  const int64_t taken = queries + misses;
  if (taken > rows.available) return false;
  for (int64_t i = 0; i < queries; ++i) {
    const int32_t row = rows.victims[i];
    request.held[row] = start + static_cast<int32_t>(i);
    request.written[i] = row;
    table.row(table.size() + i) = row;
  }
  for (int64_t i = 0; i < misses; ++i) {
    const int32_t row = rows.victims[queries + i], p = table.position(absent[i]);
    table.row(absent[i]) = row;
    request.held[row] = p;
    request.fetch(i, p, row);
  }
  for (int64_t e = 0; e < entries; ++e) request.slots[e] = table.row(cells[e]);
  OrderWriter order(request);
  order.add(rows.victims + taken, rows.available - taken);
  order.add(rows.hits, rows.hit);
  order.add(rows.victims + queries, misses);
  order.add(rows.victims, queries);
  *request.length = static_cast<int32_t>(request.end());
  counts.fetched += misses;
  counts.misses += misses;
  counts.hits += selected.before - misses + selected.written;
  counts.evictions += std::max<int64_t>(0, taken - rows.empty);
  return true;
}

}  // namespace tidal
