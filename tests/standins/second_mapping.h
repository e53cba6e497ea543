// SPDX-License-Identifier: Apache-2.0
// The same memory at a second address, as an NPU sees host memory at another address than the host does.

#pragma once

#include <cstdint>

namespace standin {

struct SecondMapping {
  std::uint64_t at = 0;                       // the same byte's address
  std::uint64_t space = 0, space_length = 0;  // what is reserved for it
  bool real = false;  // it can be read and written all through, and shows the same memory
};

// Map a range a second time. Shared memory is mapped again; private memory becomes shared in place, its bytes
// kept; what can be neither (a mere reservation, or hugepages for a user without rights to their file) gets
// an address that faults. With `adjoining` the second addresses lie as the first ones do, otherwise each
// range stands alone.
SecondMapping MapAgain(std::uint64_t host, std::uint64_t length, bool adjoining);
void Unmap(const SecondMapping& mapping);

bool IsMapped(std::uint64_t at, std::uint64_t length);

// Shared memory without a name.
std::uint64_t MapFresh(std::uint64_t length);
void UnmapFresh(std::uint64_t at, std::uint64_t length);

}  // namespace standin
