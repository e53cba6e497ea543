// SPDX-License-Identifier: Apache-2.0
// The tiling function of GatherSelectionKvCache that CANN calls: it hands the arguments to the host tiling.

#include "tidal_cann_context.h"
#include "tidal_selection_host.h"

namespace optiling {
namespace {

using tidal::host::InputOf;

constexpr const char* kOp = "GatherSelectionKvCache";

struct CompileInfo {};

ge::graphStatus Tiling(gert::TilingContext* context) {
  const auto* attributes = context->GetAttrs();
  const int64_t* block = attributes == nullptr ? nullptr : attributes->GetAttrPointer<int64_t>(0);
  const tidal::host::SelectionArguments given{
      {InputOf(*context, 0, "selection_k_rope"), InputOf(*context, 1, "selection_kv_cache"),
       InputOf(*context, 5, "full_k_rope"), InputOf(*context, 6, "full_kv_cache")},
      InputOf(*context, 2, "selection_kv_block_table"),
      InputOf(*context, 3, "selection_kv_block_status"),
      InputOf(*context, 4, "selection_topk_indices"),
      InputOf(*context, 7, "full_kv_block_table"),
      InputOf(*context, 8, "full_kv_actual_seq"),
      InputOf(*context, 9, "full_q_actual_seq"),
      tidal::host::OutputOf(*context, 4, "selection_kv_actual_seq"),
      block == nullptr ? 0 : *block};
  tidal::host::Launch<tidal::SelectionTiling> launch;
  const std::string error = TileSelection(given, tidal::host::PlatformOf(*context), launch);
  if (!error.empty()) return tidal::host::Refuse(kOp, error);
  context->SetScheduleMode(tidal::host::kBatchSchedule);
  return tidal::host::Start(*context, kOp, launch);
}

ge::graphStatus Parse(gert::TilingParseContext*) { return ge::GRAPH_SUCCESS; }

}  // namespace

IMPL_OP_OPTILING(GatherSelectionKvCache).Tiling(Tiling).TilingParse<CompileInfo>(Parse);

}  // namespace optiling
