// SPDX-License-Identifier: Apache-2.0
// The few words in which the kernels talk about order: a handshake between two pipes, and DMA of whole
// arrays.

#pragma once

#include "kernel_operator.h"

namespace tidal {

// Everything that the first pipe of the event was given is done before the second goes on.
template <AscendC::HardEvent kEvent>
__aicore__ inline void Handshake() {
  using namespace AscendC;  // GetTPipePtr has been in both namespaces
  const auto id = static_cast<event_t>(GetTPipePtr()->FetchEventID(kEvent));
  SetFlag<kEvent>(id);
  WaitFlag<kEvent>(id);
}

// Copies `count` elements; global memory may be at any byte, UB at multiples of 32.
template <typename T>
__aicore__ inline void ReadArray(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from,
                                 int64_t count) {
  const AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  AscendC::DataCopyPad(to, from, shape, AscendC::DataCopyPadExtParams<T>{false, 0, 0, 0});
}

template <typename T>
__aicore__ inline void WriteArray(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from,
                                  int64_t count) {
  AscendC::DataCopyPad(to, from,
                       AscendC::DataCopyExtParams{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
}

__aicore__ inline int64_t Smaller(int64_t one, int64_t other) { return one < other ? one : other; }
__aicore__ inline int64_t Larger(int64_t one, int64_t other) { return one > other ? one : other; }

}  // namespace tidal
