// SPDX-License-Identifier: Apache-2.0
// Queues of UB buffers, which go round idle -> allocated -> queued -> dequeued -> idle, and TBuf, which has
// no states. The steps of a queue set and wait for the flags of its two pipes, as on a device, and for no
// others.

#pragma once

#include <deque>
#include <string>
#include <vector>

#include "tensor.h"

namespace tidal_sim {

// The hard events of a queue: one says that a buffer is full, the other that it is empty again.
struct QueueEvents {
  AscendC::HardEvent filled, freed;
};

constexpr QueueEvents queue_events(AscendC::TPosition source, AscendC::TPosition destination) {
  using AscendC::HardEvent;
  if (destination == AscendC::TPosition::VECIN) return {HardEvent::MTE2_V, HardEvent::V_MTE2};
  if (source == AscendC::TPosition::VECIN) return {HardEvent::MTE2_MTE3, HardEvent::MTE3_MTE2};
  return {HardEvent::V_MTE3, HardEvent::MTE3_V};
}

// What does not depend on types: the buffers of one queue and their states.
class Queue {
 public:
  Queue(QueueEvents events, std::size_t depth) : events_(events), depth_(depth) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void add(LocalBuffer& buffer) { buffers_.push_back(&buffer); }
  bool ready() const { return !buffers_.empty(); }

  LocalPlace alloc() {
    Core& core = current("AllocTensor");
    const Caller who = core.who("AllocTensor");
    require_ready(who);
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      LocalBuffer& buffer = *buffers_[(next_ + i) % buffers_.size()];
      if (buffer.state != State::Idle) continue;
      next_ = (next_ + i + 1) % buffers_.size();
      if (buffer.freed >= 0) take_back(core, who, buffer);
      core.ub.forget(buffer);
      buffer.state = State::Allocated;
      return {&buffer, buffer.generation, 0, buffer.bytes};
    }
    refuse(who, "UB buffer '", buffers_[next_]->name, "' offset 0 is ", name_of(buffers_[next_]->state),
           " and no other of its queue is idle; a FreeTensor must come first");
  }

  void put(const LocalPlace& tensor) {
    Core& core = current("EnQue");
    const Caller who = core.who("EnQue");
    LocalBuffer& buffer = own(who, tensor);
    if (buffer.state != State::Allocated)
      refuse(who, "UB buffer '", buffer.name, "' offset 0 is ", name_of(buffer.state), ", not allocated");
    if (queued_.size() >= depth_)
      refuse(who, "UB buffer '", buffer.name, "' offset 0: the queue holds ", queued_.size(),
             " tensors already, which is its depth; a DeQue must come first");
    buffer.filled = core.flags.reserve(who, events_.filled, Flags::kIds);
    core.set_flag(who, events_.filled, buffer.filled);
    buffer.state = State::Queued;
    queued_.push_back(&buffer);
  }

  LocalPlace take() {
    Core& core = current("DeQue");
    const Caller who = core.who("DeQue");
    require_ready(who);
    if (queued_.empty())
      refuse(who, "UB buffer '", buffers_[0]->name,
             "' offset 0: nothing lies in its queue; an EnQue is missing");
    LocalBuffer& buffer = *queued_.front();
    queued_.pop_front();
    core.wait_flag(who, events_.filled, buffer.filled);
    core.flags.release(who, events_.filled, buffer.filled);
    buffer.filled = -1;
    buffer.state = State::Dequeued;
    return {&buffer, buffer.generation, 0, buffer.bytes};
  }

  void free(const LocalPlace& tensor) {
    Core& core = current("FreeTensor");
    const Caller who = core.who("FreeTensor");
    LocalBuffer& buffer = own(who, tensor);
    if (buffer.state == State::Queued)
      refuse(who, "UB buffer '", buffer.name, "' offset 0 still lies in its queue; a DeQue must come first");
    buffer.freed_event = events_.freed;
    buffer.freed = core.flags.reserve(who, events_.freed, Flags::kIds);
    core.set_flag(who, events_.freed, buffer.freed);
    buffer.state = State::Idle;
    ++buffer.generation;
  }

 private:
  void require_ready(const Caller& who) const {
    if (!ready()) refuse(who, "this queue has no buffers; call TPipe::InitBuffer first");
  }

  LocalBuffer& own(const Caller& who, const LocalPlace& tensor) const {
    require_ready(who);
    for (LocalBuffer* buffer : buffers_) {
      if (buffer != tensor.buffer) continue;
      if (buffer->generation != tensor.generation)
        refuse(who, "UB buffer '", buffer->name, "' offset 0: the tensor was given to FreeTensor before");
      return *buffer;
    }
    refuse(who, "UB buffer '", tensor.buffer != nullptr ? tensor.buffer->name : "(none)", "' offset ",
           tensor.offset, ": the tensor is not of this queue, that of '", buffers_[0]->name, "'");
  }

  // The flag of the last FreeTensor. What it waits for is run, so that the buffer can be filled with poison.
  void take_back(Core& core, const Caller& who, LocalBuffer& buffer) {
    const Clock clock = core.flags.wait(who, events_.freed, buffer.freed);
    core.pipes.wait_flag(event_of(events_.freed).to, clock);
    core.pipes.run_until(clock);
    core.flags.release(who, events_.freed, buffer.freed);
    buffer.freed = -1;
  }

  QueueEvents events_;
  std::size_t depth_;
  std::vector<LocalBuffer*> buffers_;
  std::deque<LocalBuffer*> queued_;
  std::size_t next_ = 0;
};

}  // namespace tidal_sim

namespace AscendC {

// A queue whose buffers are filled on the way to `source` and emptied on the way from `destination`.
template <TPosition source, TPosition destination, std::int32_t depth>
class TQueBind {
 public:
  static_assert((source == TPosition::VECIN && destination == TPosition::VECOUT) ||
                    (source == TPosition::GM && destination == TPosition::VECIN) ||
                    (source == TPosition::VECOUT && destination == TPosition::GM),
                "the simulation knows queues of VECIN, of VECOUT, and from VECIN to VECOUT");
  static_assert(depth >= 1, "a queue needs a depth of at least 1");
  static constexpr TPosition kPosition = source == TPosition::GM ? destination : source;

  template <typename T>
  LocalTensor<T> AllocTensor() {
    return LocalTensor<T>(queue_.alloc());
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    queue_.put(tensor.Place());
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    return LocalTensor<T>(queue_.take());
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    queue_.free(tensor.Place());
  }

  tidal_sim::Queue& State() { return queue_; }  // of the simulation only

 private:
  tidal_sim::Queue queue_{tidal_sim::queue_events(source, destination), depth};
};

template <TPosition position, std::int32_t depth>
class TQue : public TQueBind<position == TPosition::VECIN ? TPosition::GM : position,
                             position == TPosition::VECIN ? position : TPosition::GM, depth> {};

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() {
    return At<T>(buffer_ != nullptr ? buffer_->bytes : 0);
  }

  // The first `count` elements.
  template <typename T>
  LocalTensor<T> Get(std::uint32_t count) {
    return At<T>(std::uint64_t{count} * sizeof(T));
  }

  void Bind(tidal_sim::LocalBuffer& buffer) { buffer_ = &buffer; }  // of the simulation only
  bool Bound() const { return buffer_ != nullptr; }                 // of the simulation only

 private:
  template <typename T>
  LocalTensor<T> At(std::uint64_t bytes) {
    tidal_sim::Core& core = tidal_sim::current("TBuf::Get");
    const tidal_sim::Caller who = core.who("TBuf::Get");
    if (buffer_ == nullptr) tidal_sim::refuse(who, "this TBuf has no memory; call TPipe::InitBuffer first");
    if (bytes > buffer_->bytes)
      tidal_sim::refuse(who, "UB buffer '", buffer_->name, "' offset 0: ", bytes, " bytes asked, but it has ",
                        buffer_->bytes);
    return LocalTensor<T>({buffer_, buffer_->generation, 0, static_cast<std::uint32_t>(bytes)});
  }

  tidal_sim::LocalBuffer* buffer_ = nullptr;
};

}  // namespace AscendC
