// SPDX-License-Identifier: Apache-2.0

#include "tidal/stream.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace tidal {
namespace {

using Clock = CopyStream::Clock;

// Rows that a thread takes at once. Few enough that one which is pushed off its core keeps the others waiting
// for little, and that whoever joins late finds something to do.
constexpr int64_t kSmallestPart = 64;
constexpr int64_t kLargestPart = 256;
constexpr int kAnyNumber = 1 << 20;
constexpr size_t kSpares = 8;         // row numbers kept for later submissions
constexpr int64_t kLeastRoom = 2048;  // of which each has room for so many at least
// How long a waiter looks before it sleeps: sleeping and waking cost it more than that.
constexpr auto kSpin = std::chrono::microseconds(20);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads that help are for idle cores: one that wakes must not push the thread that woke it off its core,
// which would make a submission take as long as the copies. Failing is harmless.
void be_patient() {
#if defined(__linux__)
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
#endif
}

}  // namespace

RowNumbers::RowNumbers(int64_t room)
    : room(room),
      source(new int64_t[static_cast<size_t>(room)]),
      destination(new int64_t[static_cast<size_t>(room)]) {}

void RowNumbers::fill(const int64_t* source_rows, const int64_t* destination_rows, int64_t rows) {
  count = rows;
  std::copy_n(source_rows, rows, source.get());
  uint64_t skipped = 0;
  for (int64_t i = 0; i < rows; ++i) {
    destination[static_cast<size_t>(i)] = destination_rows[i];
    skipped += static_cast<uint64_t>(destination_rows[i]) >> 63;
  }
  written = rows - static_cast<int64_t>(skipped);
}

// A copy that any number of threads can join: each takes rows that nobody has taken until none are left.
struct CopyStream::Job {
  RowCopy copy;
  CopyPath path;
  std::shared_ptr<RowNumbers> rows;  // none where the caller of run() keeps them
  int64_t after = 0;
  int64_t bytes = 0;
  int most = kAnyNumber;  // threads at once
  std::atomic<int64_t> next{0};
  // Guarded by the stream's mutex.
  bool begun = false;
  bool done = false;
  int runners = 0;

  bool open() const {
    return !begun || (next.load(std::memory_order_relaxed) < copy.count && runners < most);
  }

  void work() {
    int64_t first = next.load(std::memory_order_relaxed);
    while (first < copy.count) {
      const int64_t left = copy.count - first;
      const int64_t part = std::min(left, std::clamp(left / 4, kSmallestPart, kLargestPart));
      if (next.compare_exchange_weak(first, first + part, std::memory_order_relaxed)) {
        copy_part(copy, first, first + part, path);
        first = next.load(std::memory_order_relaxed);
      }
    }
  }
};

CopyStream::CopyStream(int threads) : owner_(getpid()) {
  spare_.reserve(kSpares);
  try {
    start_threads(threads);
  } catch (...) {
    close();
    throw;
  }
}

CopyStream::~CopyStream() { close(); }

bool CopyStream::usable() const { return getpid() == owner_; }

CopyStream::Lock CopyStream::enter() {
  if (!usable()) throw std::runtime_error("a copy stream serves only the process that made it");
  return Lock(mutex_);
}

void CopyStream::start_threads(int count) {
  while (static_cast<int>(threads_.size()) < count) threads_.emplace_back(&CopyStream::serve, this);
}

std::shared_ptr<RowNumbers> CopyStream::numbers(int64_t count) {
  {
    const Lock lock = enter();
    while (!spare_.empty()) {
      std::shared_ptr<RowNumbers> last = std::move(spare_.back());
      spare_.pop_back();
      if (last->room >= count) return last;
    }
  }
  return std::make_shared<RowNumbers>(std::max(count, kLeastRoom));
}

int64_t CopyStream::submit(const Move* moves, int64_t count, std::shared_ptr<RowNumbers> rows, int64_t after,
                           CopyPath path, bool wake) {
  std::vector<std::shared_ptr<Job>> jobs(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    auto job = std::make_shared<Job>();
    job->copy = {moves[i].source, moves[i].destination, rows->source.get(), rows->destination.get(),
                 rows->count};
    job->path = path;
    job->rows = rows;
    job->after = after;
    job->bytes = rows->written * moves[i].source.row_bytes;
    jobs[static_cast<size_t>(i)] = std::move(job);
  }
  rows->users = count;
  int64_t ticket;
  {
    const Lock lock = enter();
    if (closed_) throw std::runtime_error("the copy stream is closed");
    ticket = last_issued() + 1;
    jobs_.insert(jobs_.end(), std::make_move_iterator(jobs.begin()), std::make_move_iterator(jobs.end()));
  }
  if (wake) work_.notify_all();
  return ticket;
}

Waited CopyStream::wait(int64_t ticket, Clock::time_point deadline) {
  return wait_for(ticket, ticket, deadline);
}

Waited CopyStream::settle(int64_t ticket, Clock::time_point deadline) {
  return wait_for(1, ticket, deadline);
}

Waited CopyStream::wait_for(int64_t first, int64_t last, Clock::time_point deadline) {
  Lock lock = enter();
  if (pending(first, last) == nullptr) return Waited::kReady;
  statistics_.late += 1;
  Waited outcome = Waited::kWaited;
  while (const std::shared_ptr<Job> job = pending(first, last)) {
    if (Clock::now() >= deadline) return Waited::kTimeout;
    if (const std::shared_ptr<Job> mine = next_open(first, last)) {
      if (!mine->begun) outcome = Waited::kRan;
      work_on(mine, lock, statistics_.stolen_seconds);
      continue;
    }
    if (const std::shared_ptr<Job> before = next_open(1, job->after)) {
      work_on(before, lock, statistics_.stolen_seconds);
      continue;
    }
    const Clock::time_point start = Clock::now();
    const int64_t seen = finishes_;
    lock.unlock();
    while (finishes_ == seen && Clock::now() < std::min(deadline, start + kSpin)) relax();
    lock.lock();
    if (finishes_ == seen) finished_.wait_until(lock, deadline);
    statistics_.waited_seconds += seconds_since(start);
  }
  return outcome;
}

void CopyStream::run(const RowCopy& copy, int threads, CopyPath path) {
  auto job = std::make_shared<Job>();
  job->copy = copy;
  job->path = path;
  job->most = threads;
  Lock lock = enter();
  start_threads(threads - 1);
  jobs_.push_back(job);
  for (int other = 1; other < threads; ++other) work_.notify_one();
  work_on(job, lock, statistics_.stolen_seconds);
  finished_.wait(lock, [&] { return job->done; });
}

bool CopyStream::done(int64_t ticket) {
  const Lock lock = enter();
  return pending(ticket, ticket) == nullptr;
}

int64_t CopyStream::newest() {
  const Lock lock = enter();
  return last_issued();
}

StreamStatistics CopyStream::statistics() {
  const Lock lock = enter();
  return statistics_;
}

void CopyStream::close() {
  const std::lock_guard<std::mutex> once(closing_);
  {
    Lock lock = enter();
    closed_ = true;
    work_.notify_all();
    while (!jobs_.empty()) {
      if (const std::shared_ptr<Job> job = next_open(1, INT64_MAX)) {
        work_on(job, lock, statistics_.stolen_seconds);
      } else {
        finished_.wait(lock);
      }
    }
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// The oldest copy of these tickets that is not done.
std::shared_ptr<CopyStream::Job> CopyStream::pending(int64_t first, int64_t last) const {
  for (int64_t ticket = std::max(first, first_); ticket <= std::min(last, last_issued()); ++ticket) {
    const std::shared_ptr<Job>& job = jobs_[static_cast<size_t>(ticket - first_)];
    if (!job->done) return job;
  }
  return nullptr;
}

// The oldest copy of these tickets that can be begun or joined now.
std::shared_ptr<CopyStream::Job> CopyStream::next_open(int64_t first, int64_t last) const {
  for (int64_t ticket = std::max(first, first_); ticket <= std::min(last, last_issued()); ++ticket) {
    const std::shared_ptr<Job>& job = jobs_[static_cast<size_t>(ticket - first_)];
    if (!job->done && job->open() && job->after < first_) return job;
  }
  return nullptr;
}

void CopyStream::work_on(const std::shared_ptr<Job>& job, Lock& lock, double& seconds) {
  job->begun = true;
  job->runners += 1;
  lock.unlock();
  const Clock::time_point start = Clock::now();
  job->work();
  const double spent = seconds_since(start);
  lock.lock();
  seconds += spent;
  job->runners -= 1;
  if (job->runners == 0) finish(*job);
}

// Called by the last thread that leaves a copy; a thread leaves when there are no rows left to take.
void CopyStream::finish(Job& job) {
  statistics_.jobs += 1;
  statistics_.bytes += job.bytes;
  job.done = true;
  if (job.rows && --job.rows->users == 0 && spare_.size() < kSpares) spare_.push_back(job.rows);
  while (!jobs_.empty() && jobs_.front()->done) {
    jobs_.pop_front();
    first_ += 1;
  }
  finishes_ += 1;
  finished_.notify_all();
  if (!jobs_.empty() || closed_) work_.notify_all();
}

void CopyStream::serve() {
  be_patient();
  Lock lock(mutex_);
  while (true) {
    if (const std::shared_ptr<Job> job = next_open(1, INT64_MAX)) {
      work_on(job, lock, statistics_.busy_seconds);
    } else if (closed_ && jobs_.empty()) {
      return;
    } else {
      work_.wait(lock);
    }
  }
}

}  // namespace tidal
