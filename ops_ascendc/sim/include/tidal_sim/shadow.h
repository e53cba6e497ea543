// SPDX-License-Identifier: Apache-2.0
// Who touched each byte of a memory last, so that two accesses which nothing orders are found whatever the
// moment at which they happened to run. Used in the strict modes only: 32 bytes for each byte that is
// touched.

#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "clock.h"

namespace tidal_sim {

struct Mark {
  std::uint64_t epoch : 20;  // 0: nobody was here
  std::uint64_t core : 7;
  std::uint64_t pipe : 2;
  std::uint64_t cached : 1;  // written, and still only in the data cache of the core
  std::uint64_t number : 34;
};
constexpr int kSeveralCores = 127;

// Two accesses to one byte, one of which writes, and the earlier of which may still run.
struct Conflict {
  std::size_t offset;
  Mark earlier;
  bool wrote;
};

inline Mark mark_of(const Moment& moment, bool cached = false) {
  Mark mark;
  mark.epoch = moment.epoch;
  mark.core = static_cast<std::uint64_t>(moment.core);
  mark.pipe = index_of(moment.pipe);
  mark.cached = cached;
  mark.number = moment.number;
  return mark;
}

inline bool ordered(const Mark& earlier, const Moment& later) {
  if (earlier.epoch < later.epoch) return true;
  return earlier.core == static_cast<std::uint64_t>(later.core) &&
         earlier.number <= later.known[static_cast<Pipe>(earlier.pipe)];
}

class Shadow {
 public:
  explicit Shadow(std::size_t bytes)
      : cells_(static_cast<Cell*>(std::calloc(bytes + 1, sizeof(Cell)))) {  // untouched pages stay unbacked
    if (cells_ == nullptr) throw std::bad_alloc();
  }

  std::optional<Conflict> read(std::size_t offset, std::size_t length, const Moment& moment) {
    const Mark mine = mark_of(moment);
    for (std::size_t i = offset; i < offset + length; ++i) {
      Cell& cell = cells_.get()[i];
      if (!ordered(cell.write, moment)) return Conflict{i, cell.write, true};
      Mark& read = cell.read[reader(moment.pipe)];
      const bool another = read.epoch == mine.epoch && read.core != mine.core;
      read = mine;
      if (another) read.core = kSeveralCores;
    }
    return std::nullopt;
  }

  std::optional<Conflict> write(std::size_t offset, std::size_t length, const Moment& moment,
                                bool cached = false) {
    for (std::size_t i = offset; i < offset + length; ++i) {
      Cell& cell = cells_.get()[i];
      for (const Mark& read : cell.read)  // first: mostly behind the write, so waiting for it waits for both
        if (!ordered(read, moment)) return Conflict{i, read, false};
      if (!ordered(cell.write, moment)) return Conflict{i, cell.write, true};
      cell.write = mark_of(moment, cached);
    }
    return std::nullopt;
  }

  // A byte that was written before, into a cache, reaches the memory now.
  void settle(std::size_t offset, const Moment& moment) { cells_.get()[offset].write = mark_of(moment); }

  const Mark& written(std::size_t offset) const { return cells_.get()[offset].write; }

 private:
  // MTE2 reads only GM and MTE3 only UB, so they share a place.
  static std::size_t reader(Pipe pipe) { return std::min<std::size_t>(index_of(pipe), 2); }

  struct Cell {
    Mark write;
    Mark read[3];
  };
  struct Free {
    void operator()(Cell* cells) const { std::free(cells); }
  };
  std::unique_ptr<Cell, Free> cells_;
};

// How to mend a conflict, for the end of a message.
inline std::string remedy(const Conflict& conflict, const Moment& later) {
  const Pipe from = static_cast<Pipe>(conflict.earlier.pipe);
  const char* did = conflict.wrote ? " wrote" : " read";
  if (conflict.earlier.core != static_cast<std::uint64_t>(later.core)) {
    const std::string who = conflict.earlier.core == kSeveralCores
                                ? "another core"
                                : "core " + std::to_string(static_cast<int>(conflict.earlier.core));
    return who + did + " it since the last SyncAll; a SyncAll is missing in between";
  }
  const std::string head = std::string("pipe ") + name_of(from) + did + " it before and may not have ended; ";
  if (from == later.pipe) return head + "PipeBarrier<PIPE_" + name_of(from) + "> is missing in between";
  return head + "SetFlag and WaitFlag of HardEvent::" + name_of(from) + "_" + name_of(later.pipe) +
         " are missing in between";
}

}  // namespace tidal_sim
