// SPDX-License-Identifier: Apache-2.0
// The pipes of one core: what was issued to each, what each knows to have ended, and in lazy mode the DMA
// that has not run yet. Flags and barriers hand knowledge from one pipe to another; nothing else does.

#pragma once

#include <deque>
#include <functional>
#include <random>
#include <utility>

#include "clock.h"

namespace tidal_sim {

class Pipes {
 public:
  // Lazy: a DMA runs as late as what waits for it allows; with a seed, at some moment up to then.
  Pipes(int core, bool lazy, std::uint64_t seed)
      : core_(core), lazy_(lazy), random_(seed + static_cast<std::uint64_t>(core)), hasty_(seed != 0) {}

  // The scalar unit reads or writes now.
  Moment scalar() const { return {core_, Pipe::S, scalar_[Pipe::S], epoch_, scalar_}; }

  // A DMA is given to its pipe. Being issued later than a scalar access does not order it behind that access:
  // the access may still be on its way when the pipe begins.
  Moment issue(Pipe pipe) {
    if (!lazy_) barrier_all();
    Clock known = begin_[index_of(pipe)];
    Clock issuer = scalar_;
    issuer[Pipe::S] = 0;
    known.join(issuer);
    const Moment moment{core_, pipe, ++issued_[pipe], epoch_, known};
    if (!lazy_) barrier_all();
    return moment;
  }

  // Runs the data movement of a DMA that was issued: at once, or when somebody waits for it.
  template <class Move>
  void submit(const Moment& moment, Move&& move) {
    if (!lazy_) return move();
    waiting_[index_of(moment.pipe)].push_back({moment, std::forward<Move>(move)});
    if (!hasty_) return;
    for (const Pipe pipe : {Pipe::MTE2, Pipe::MTE3})
      if (!queue(pipe).empty() && random_() % 4 == 0) run(pipe, queue(pipe).front().moment.number);
  }

  // What whoever waits for a flag that `from` sets now will know.
  Clock set_flag(Pipe from) {
    Clock clock = scalar_;
    if (from == Pipe::S) {
      ++scalar_[Pipe::S];
      return clock;
    }
    clock[Pipe::S] = 0;
    clock.join(begin_[index_of(from)]);
    clock[from] = issued_[from];
    return clock;
  }

  void wait_flag(Pipe to, const Clock& clock) {
    if (to == Pipe::S) {
      scalar_.join(clock);
      run_until(clock);
    } else {
      begin_[index_of(to)].join(clock);
    }
  }

  void barrier(Pipe pipe) { begin_[index_of(pipe)][pipe] = issued_[pipe]; }

  void barrier_all() {
    for (const Pipe pipe : {Pipe::V, Pipe::MTE2, Pipe::MTE3}) scalar_[pipe] = issued_[pipe];
    for (Clock& begin : begin_) begin = scalar_;
    ++scalar_[Pipe::S];
    run_until(scalar_);
  }

  // Behind a SyncAll.
  void next_epoch() { ++epoch_; }

  // Runs what a pipe still has to do before the instructions that know `clock`.
  void run_until(const Clock& clock) {
    for (const Pipe pipe : {Pipe::MTE2, Pipe::MTE3}) run(pipe, clock[pipe]);
  }

 private:
  struct Waiting {
    Moment moment;
    std::function<void()> move;
  };

  std::deque<Waiting>& queue(Pipe pipe) { return waiting_[index_of(pipe)]; }

  // An instruction knows only of earlier ones, so this ends.
  void run(Pipe pipe, std::uint64_t last) {
    while (!queue(pipe).empty() && queue(pipe).front().moment.number <= last) {
      const Waiting next = std::move(queue(pipe).front());
      queue(pipe).pop_front();
      run_until(next.moment.known);
      next.move();
    }
  }

  int core_;
  bool lazy_;
  std::mt19937_64 random_;
  bool hasty_;
  std::uint64_t epoch_ = 1;
  Clock issued_;
  Clock scalar_ = first();
  std::array<Clock, kPipes> begin_;  // what an instruction of this pipe knows when it begins
  std::array<std::deque<Waiting>, kPipes> waiting_;

  static Clock first() {
    Clock clock;
    clock[Pipe::S] = 1;
    return clock;
  }
};

}  // namespace tidal_sim
