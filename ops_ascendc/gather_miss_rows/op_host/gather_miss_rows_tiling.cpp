// SPDX-License-Identifier: Apache-2.0
// The tiling function of GatherMissRows that CANN calls: it hands the arguments to the host tiling.

#include "tidal_cann_context.h"
#include "tidal_miss_host.h"

namespace optiling {
namespace {

using tidal::host::InputOf;

constexpr const char* kOp = "GatherMissRows";

struct CompileInfo {};

ge::graphStatus Tiling(gert::TilingContext* context) {
  const tidal::host::MissArguments given{
      {InputOf(*context, 0, "selection_k_rope"), InputOf(*context, 1, "selection_kv_cache"),
       InputOf(*context, 2, "full_k_rope"), InputOf(*context, 3, "full_kv_cache")},
      InputOf(*context, 4, "miss_rows"),
      InputOf(*context, 5, "miss_slots"),
      InputOf(*context, 6, "miss_count")};
  tidal::host::Launch<tidal::MissTiling> launch;
  const std::string error = TileMisses(given, tidal::host::PlatformOf(*context), launch);
  if (!error.empty()) return tidal::host::Refuse(kOp, error);
  return tidal::host::Start(*context, kOp, launch);
}

ge::graphStatus Parse(gert::TilingParseContext*) { return ge::GRAPH_SUCCESS; }

}  // namespace

IMPL_OP_OPTILING(GatherMissRows).Tiling(Tiling).TilingParse<CompileInfo>(Parse);

}  // namespace optiling
