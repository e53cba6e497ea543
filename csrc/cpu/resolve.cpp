// SPDX-License-Identifier: Apache-2.0

#include "tidal/resolve.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "resolve_table.h"

namespace tidal {
namespace {

// Entries and slots that a worker has to look at for its thread to pay.
constexpr int64_t kWorkPerThread = 16384;

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
  PositionTable table;
  std::vector<int32_t> cells;     // of each selected entry
  std::vector<int32_t> distinct;  // cells in the order of first occurrence
  std::vector<int32_t> empty, victims, hits;
  std::vector<uint64_t> seen;  // a bit for each position of a request in place; all zero between requests
};

template <class T>
T* room(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
  return memory.data();
}

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

// Puts the selected positions into the table; notes the cell of each entry.
// Positions from `start` on get cells of their own behind the table's, invalid ones the last of all.
struct Selected {
  int64_t distinct = 0;
  int64_t written = 0;  // distinct ones among those of this step
};

Selected tabulate(const Request& request, Scratch& scratch, ResolveCounts& counts) {
  const int64_t width = request.batch.width, start = request.start;
  PositionTable& table = scratch.table;
  table.clear(request.queries * width, request.queries + 1);
  int32_t* cells = room(scratch.cells, request.queries * width);
  int32_t* const distinct = room(scratch.distinct, request.queries * width + 1);
  const auto fresh = static_cast<int32_t>(table.size());
  const auto none = static_cast<int32_t>(fresh + request.queries);
  Selected found;
  for (int64_t i = 0; i < request.queries; ++i, cells += width) {
    const int32_t* const selected = request.selected(i);
    const uint32_t limit = request.limit(i);
    for (int64_t e = 0; e < width; ++e) {
      const int32_t p = selected[e];
      if (static_cast<uint32_t>(p) >= limit) {
        counts.invalid += p != -1;
        cells[e] = none;
      } else if (p >= start) {
        cells[e] = fresh + static_cast<int32_t>(p - start);
        found.written += table.row(cells[e]) < 0;
        table.row(cells[e]) = 0;
      } else {
        bool added;
        const int32_t cell = table.insert(p, &added);
        cells[e] = cell;
        distinct[found.distinct] = cell;
        found.distinct += added;
      }
    }
  }
  return found;
}

bool resolve_listed(const Request& request, Scratch& scratch, ResolveCounts& counts) {
  if (*request.listed == 0) list(request, scratch);
  const Selected chosen = tabulate(request, scratch, counts);
  PositionTable& table = scratch.table;
  int32_t* const held = request.held;
  // Victims are the empty rows and then the old ones; the old ones are written first, so they leave room
  // before them.
  int32_t* const empty = room(scratch.empty, request.capacity + 1);
  int32_t* const old = room(scratch.victims, 2 * request.capacity + 1) + request.capacity;
  int32_t* const hits = room(scratch.hits, request.capacity + 1);
  int64_t empties = 0, olds = 0, hit = 0;
  bool broken = false;
  const auto arena = static_cast<uint32_t>(request.arena_rows);
  const auto start = static_cast<int32_t>(request.start);
  request.each_extent([&](const int32_t* order, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t row = order[i];
      if (static_cast<uint32_t>(row) >= arena) {
        broken = true;
        continue;
      }
      const int32_t p = held[row];
      if (p < 0 || p >= start) {
        held[row] = -1;
        empty[empties++] = row;
        continue;
      }
      const bool found = table.place(p, row);
      hits[hit] = row;
      old[olds] = row;
      hit += found;
      olds += !found;
    }
  });
  if (broken) return false;
  int32_t* const victims = old - empties;
  std::memcpy(victims, empty, static_cast<size_t>(empties) * sizeof(int32_t));
  const int64_t queries = request.queries;
  int64_t taken = queries;
  const int64_t available = empties + olds;
  if (queries + chosen.distinct - hit > available) return false;
  for (int64_t i = 0; i < queries; ++i) {
    held[victims[i]] = start + static_cast<int32_t>(i);
    request.written[i] = victims[i];
    table.row(static_cast<int32_t>(table.size() + i)) = victims[i];
  }
  const int32_t* const distinct = scratch.distinct.data();
  for (int64_t i = 0; i < chosen.distinct; ++i) {
    int32_t& row = table.row(distinct[i]);
    if (row >= 0) continue;
    if (taken >= available) return false;
    row = victims[taken];
    const int32_t p = table.position(distinct[i]);
    held[row] = p;
    request.fetch(taken - queries, p, row);
    ++taken;
  }
  table.row(static_cast<int32_t>(table.size() + queries)) = -1;
  const int32_t* const cells = scratch.cells.data();
  const int64_t entries = queries * request.batch.width;
  for (int64_t e = 0; e < entries; ++e) request.slots[e] = table.row(cells[e]);
  OrderWriter order(request);
  order.add(victims + taken, available - taken);
  order.add(hits, hit);
  order.add(victims + queries, taken - queries);
  order.add(victims, queries);
  *request.length = static_cast<int32_t>(request.end());
  const int64_t misses = taken - queries;
  counts.fetched += misses;
  counts.misses += misses;
  counts.hits += chosen.distinct - misses + chosen.written;
  counts.evictions += std::max<int64_t>(0, taken - empties);
  return true;
}

// The whole call.
class Step {
 public:
  Step(const SlotState& state, const Seats& seats, const SelectionBatch& batch, const ResolveOutput& out,
       int64_t eager_rows)
      : state_(state),
        seats_(seats),
        batch_(batch),
        out_(out),
        eager_rows_(eager_rows),
        extent_rows_(seats.extent_rows),
        page_tokens_(batch.page_tokens) {}

  // Whether nothing in the batch leads outside the memory at hand. Also notes where misses may go.
  bool accepts(std::vector<uint8_t>& taken) {
    if (batch_.query_start[0] != 0 || batch_.query_start[batch_.requests] != batch_.queries) return false;
    room(taken, seats_.count);
    int64_t checked = 0;
    bool fine = true;
    for (; checked < batch_.requests && fine; ++checked) fine = accepts(checked, taken.data());
    for (int64_t i = 0; i < checked; ++i) {
      const int32_t seat = batch_.seat[i];
      if (seat >= 0 && seat < seats_.count) taken[static_cast<size_t>(seat)] = 0;
    }
    return fine;
  }

  // Most misses that a request may have.
  int64_t most_misses(int64_t i) const {
    const int64_t seat = batch_.seat[i], start = batch_.start[i];
    const int64_t entries = (batch_.query_start[i + 1] - batch_.query_start[i]) * batch_.width;
    if (is_listed(i) || start > eager_rows_) return std::min(entries, start);
    return start - std::min<int64_t>(std::max(state_.filled[seat], 0), start);
  }

  // Entries and slots that a request makes one look at.
  int64_t work(int64_t i) const {
    const int64_t entries = (batch_.query_start[i + 1] - batch_.query_start[i]) * batch_.width;
    return is_listed(i) ? entries + seats_.capacity[batch_.seat[i]] : std::max(entries, most_misses(i));
  }

  // Resolves requests [first, end); their misses go from `at` on. Counts the misses of i in miss_start[i +
  // 1].
  bool run(int64_t first, int64_t end, int64_t at, Scratch& scratch, ResolveCounts& counts) const {
    for (int64_t i = first; i < end; ++i) {
      const int64_t seat = batch_.seat[i], query = batch_.query_start[i], before = counts.fetched;
      const Request request{batch_,
                            state_.held,
                            state_.order,
                            state_.arena_rows,
                            seats_.extents + seat * seats_.max_extents,
                            extent_rows_,
                            page_tokens_,
                            batch_.pages + i * batch_.pages_stride,
                            seats_.capacity[seat],
                            query,
                            batch_.query_start[i + 1] - query,
                            batch_.start[i],
                            eager_rows_,
                            state_.listed + seat,
                            state_.filled + seat,
                            state_.length + seat,
                            out_.slots + query * batch_.width,
                            out_.written + query,
                            out_.miss_rows + at + before,
                            out_.miss_slots + at + before};
      if (!is_listed(i)) {
        resolve_in_place(request, scratch, counts);
      } else if (!resolve_listed(request, scratch, counts)) {
        return false;
      }
      out_.miss_start[i + 1] = static_cast<int32_t>(counts.fetched - before);
    }
    return true;
  }

 private:
  bool is_listed(int64_t i) const {
    const int64_t seat = batch_.seat[i];
    const int64_t queries = batch_.query_start[i + 1] - batch_.query_start[i];
    return state_.listed[seat] != 0 || batch_.start[i] + queries > seats_.capacity[seat];
  }

  bool accepts(int64_t i, uint8_t* taken) const {
    const int64_t seat = batch_.seat[i], start = batch_.start[i];
    const int64_t queries = int64_t{batch_.query_start[i + 1]} - batch_.query_start[i];
    if (seat < 0 || seat >= seats_.count || taken[seat] != 0) return false;
    taken[seat] = 1;
    if (queries < 0 || batch_.query_start[i + 1] > batch_.queries || start < 0 || start + queries > INT32_MAX)
      return false;
    const int64_t capacity = seats_.capacity[seat];
    const int64_t extents = (capacity + seats_.extent_rows - 1) / seats_.extent_rows;
    if (capacity < 0 || extents > seats_.max_extents) return false;
    const auto limit = static_cast<uint32_t>(state_.arena_rows / seats_.extent_rows);
    const int32_t* const own = seats_.extents + seat * seats_.max_extents;
    bool inside = true;
    for (int64_t e = 0; e < extents; ++e) inside &= static_cast<uint32_t>(own[e]) < limit;
    return inside && (!is_listed(i) || queries * (batch_.width + 1) <= capacity);
  }

  const SlotState& state_;
  const Seats& seats_;
  const SelectionBatch& batch_;
  const ResolveOutput& out_;
  const int64_t eager_rows_;
  const Divisor extent_rows_;
  const Divisor page_tokens_;
};

// Requests of one worker.
struct Part {
  int64_t first;
  int64_t end;
  int64_t misses_at;
  ResolveCounts counts{};
  bool fine = true;
};

// Cuts the batch into as many parts of about equal work.
std::vector<Part> split(const Step& step, int64_t requests, int64_t work, int64_t workers) {
  std::vector<Part> parts;
  if (requests == 0) return {Part{0, 0, 0}};
  int64_t first = 0, done = 0, misses = 0, misses_at = 0;
  for (int64_t i = 0; i < requests; ++i) {
    done += step.work(i);
    misses += step.most_misses(i);
    const auto cut = static_cast<int64_t>(parts.size()) + 1;
    if (i + 1 < requests && (cut == workers || done * workers < work * cut)) continue;
    parts.push_back(Part{first, i + 1, misses_at});
    first = i + 1;
    misses_at = misses;
  }
  return parts;
}

// What the calling thread keeps between calls.
struct Workplace {
  std::vector<uint8_t> taken;  // a mark for each seat; all zero between calls
  std::vector<Scratch> scratch;
};

}  // namespace

Resolution resolve(const SlotState& state, const Seats& seats, const SelectionBatch& batch,
                   const ResolveOutput& out, int64_t eager_rows, int threads) {
  static thread_local Workplace place;
  Step step(state, seats, batch, out, eager_rows);
  Resolution result{ResolveStatus::kRefused, {}};
  if (!step.accepts(place.taken)) return result;
  int64_t work = 0, misses = 0;
  for (int64_t i = 0; i < batch.requests; ++i) {
    work += step.work(i);
    misses += step.most_misses(i);
  }
  if (misses > out.miss_room) {
    result.status = ResolveStatus::kNoRoom;
    result.counts.fetched = misses;
    return result;
  }
  const int64_t workers =
      std::max<int64_t>(1, std::min({int64_t{threads}, batch.requests, work / kWorkPerThread}));
  if (static_cast<int64_t>(place.scratch.size()) < workers)
    place.scratch.resize(static_cast<size_t>(workers));
  std::vector<Part> parts = split(step, batch.requests, work, workers);
  std::vector<std::thread> others;
  for (size_t w = 1; w < parts.size(); ++w) {
    others.emplace_back([&step, &part = parts[w], &scratch = place.scratch[w]] {
      part.fine = step.run(part.first, part.end, part.misses_at, scratch, part.counts);
    });
  }
  parts[0].fine = step.run(parts[0].first, parts[0].end, 0, place.scratch[0], parts[0].counts);
  for (std::thread& other : others) other.join();
  result.status = ResolveStatus::kDone;
  for (const Part& part : parts) {
    if (!part.fine) result.status = ResolveStatus::kBroken;
    // The misses of the parts close up.
    const auto bytes = static_cast<size_t>(part.counts.fetched) * sizeof(int64_t);
    std::memmove(out.miss_rows + result.counts.fetched, out.miss_rows + part.misses_at, bytes);
    std::memmove(out.miss_slots + result.counts.fetched, out.miss_slots + part.misses_at, bytes);
    result.counts.fetched += part.counts.fetched;
    result.counts.hits += part.counts.hits;
    result.counts.misses += part.counts.misses;
    result.counts.evictions += part.counts.evictions;
    result.counts.invalid += part.counts.invalid;
  }
  out.miss_start[0] = 0;
  for (int64_t i = 0; i < batch.requests; ++i) out.miss_start[i + 1] += out.miss_start[i];
  return result;
}

}  // namespace tidal
