// SPDX-License-Identifier: Apache-2.0
// The copy stream of the processor: threads that work off a queue of row copies, with an event for each.
// Nothing here knows Python. Any thread may call any function.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tidal/copy.h"

namespace tidal {

// From where to where; which rows is said at each submission.
struct Move {
  SourceRows source;
  DestinationRows destination;
};

// Row numbers that all copies of a submission share: the stream's own, so that the caller may reuse its at
// once.
struct RowNumbers {
  explicit RowNumbers(int64_t room);
  void fill(const int64_t* source_rows, const int64_t* destination_rows, int64_t rows);

  const int64_t room;
  const std::unique_ptr<int64_t[]> source;
  const std::unique_ptr<int64_t[]> destination;
  int64_t count = 0;
  int64_t written = 0;  // those with a destination
  int64_t users = 0;    // copies that are not done
};

enum class Waited : int {
  kReady = 0,    // the copy was done before anybody waited
  kWaited = 1,   // another thread had begun it; the caller helped and waited
  kRan = 2,      // nobody had begun it; the caller did it
  kTimeout = 3,  // it is not done yet
};

struct StreamStatistics {
  int64_t jobs = 0;           // done
  int64_t bytes = 0;          // written by them
  double busy_seconds = 0;    // spent copying by the stream's own threads
  double stolen_seconds = 0;  // spent copying by threads that waited
  double waited_seconds = 0;  // spent neither copying nor going on, by threads that waited
  int64_t late = 0;           // waits that found their copy not done
};

class CopyStream {
 public:
  using Clock = std::chrono::steady_clock;

  // Starts threads, which sleep until something is submitted. Without any, waiters do all of the work.
  explicit CopyStream(int threads);
  // Finishes what was submitted.
  ~CopyStream();

  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // False in a process forked from the one that made the stream: its threads are not there, and a lock may be
  // held for ever. All else throws std::runtime_error then; do not destroy it, let it leak.
  bool usable() const;

  // Room for the row numbers of one submission. It is used again once that is done: fresh memory costs more
  // than filling it.
  std::shared_ptr<RowNumbers> numbers(int64_t count);

  // Queues a copy for each move, in order, and returns the ticket of the first; the others follow by ones.
  // Tickets begin at 1. None begins before every ticket up to `after` is done; apart from that, copies may
  // overtake one another. Unless `wake` is said, no thread is woken for them: whoever waits does them.
  // Indices were checked. Throws std::runtime_error after close.
  int64_t submit(const Move* moves, int64_t count, std::shared_ptr<RowNumbers> rows, int64_t after,
                 CopyPath path, bool wake);

  // Returns once the copy is done, or at the deadline. A copy that can begin is done by the caller, and one
  // that is being done is helped, because waking a sleeping thread takes longer than most copies.
  Waited wait(int64_t ticket, Clock::time_point deadline);

  // The same for every copy up to a ticket.
  Waited settle(int64_t ticket, Clock::time_point deadline);

  // Copies with at most `threads` threads, the caller among them, and returns when all is done. Threads that
  // the stream lacks are started.
  void run(const RowCopy& copy, int threads, CopyPath path);

  bool done(int64_t ticket);
  int64_t newest();  // the newest ticket
  StreamStatistics statistics();
  // Finishes what was submitted, with the caller's help, and ends the threads. A second call does nothing.
  void close();

 private:
  struct Job;
  using Lock = std::unique_lock<std::mutex>;

  Lock enter();
  Waited wait_for(int64_t first, int64_t last, Clock::time_point deadline);
  void start_threads(int count);
  void serve();
  int64_t last_issued() const { return first_ + static_cast<int64_t>(jobs_.size()) - 1; }
  std::shared_ptr<Job> pending(int64_t first, int64_t last) const;
  std::shared_ptr<Job> next_open(int64_t first, int64_t last) const;
  void work_on(const std::shared_ptr<Job>& job, Lock& lock, double& seconds);
  void finish(Job& job);

  const pid_t owner_;
  std::mutex closing_;  // held by close, so that a second close returns after the first
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable finished_;
  std::atomic<int64_t> finishes_{
      0};  // how often finished_ was signalled, for those who look before they sleep
  // What follows is guarded by mutex_.
  std::deque<std::shared_ptr<Job>> jobs_;  // from the oldest that is not done
  int64_t first_ = 1;                      // ticket of jobs_.front(); all before it are done
  bool closed_ = false;
  std::vector<std::shared_ptr<RowNumbers>> spare_;  // of submissions that are done
  StreamStatistics statistics_;
  std::vector<std::thread> threads_;
};

}  // namespace tidal
