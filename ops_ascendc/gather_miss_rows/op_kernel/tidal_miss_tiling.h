// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernel gather_miss_rows.

#pragma once

#include "tidal_copy_tiling.h"

namespace tidal {

struct MissTiling {
  CopyTiling copy;  // entries of one token
  int64_t rows;     // of miss_rows and miss_slots
  int64_t pitch;    // entries in one of them
};

}  // namespace tidal
