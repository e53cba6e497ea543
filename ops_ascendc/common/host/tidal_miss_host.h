// SPDX-License-Identifier: Apache-2.0
// Host tiling of GatherMissRows: the checks of its arguments, and the numbers that its kernel works with.

#pragma once

#include <string>

#include "tidal_cache_checks.h"
#include "tidal_miss_tiling.h"

namespace tidal {
namespace host {

struct MissArguments {
  Caches caches;
  Argument rows;
  Argument slots;
  Argument count;
};

// Returns an empty text and fills in `launch`, or returns what is wrong.
inline std::string TileMisses(const MissArguments& given, const Platform& platform,
                              Launch<MissTiling>& launch) {
  std::string error = CheckCaches(given.caches);
  if (!error.empty()) return error;
  for (const Argument* each : {&given.rows, &given.slots, &given.count}) {
    error = CheckInt32(*each);
    if (!error.empty()) return error;
  }
  if (given.rows.dims.size() != 2) return ShapeError(given.rows, "[rows, entries]");
  if (given.slots.dims != given.rows.dims) {
    return ShapeError(given.slots, Text(given.rows.dims) + " as " + given.rows.name);
  }
  if (given.count.dims != std::vector<int64_t>{given.rows.dims[0]}) {
    return ShapeError(given.count, Text({given.rows.dims[0]}) + ", one for each row of " + given.rows.name);
  }
  MissTiling& tiling = launch.tiling;
  tiling.rows = given.rows.dims[0];
  tiling.pitch = given.rows.dims[1];
  error = TileCopies(given.caches, 1, platform, 0, tiling.copy);
  if (!error.empty()) return error;
  launch.cores = CoresFor(tiling.rows * tiling.pitch, tiling.copy, platform);
  launch.workspace = platform.system_workspace;
  return "";
}

}  // namespace host
}  // namespace tidal
