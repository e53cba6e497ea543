// SPDX-License-Identifier: Apache-2.0
// What kernels include. On a device this name is CANN's header; here it is the simulation of the part of
// AscendC that our kernels use. See ../README.md.

#pragma once

#include "tidal_sim/copy.h"
#include "tidal_sim/macros.h"
#include "tidal_sim/pipe.h"
#include "tidal_sim/sync.h"
